"""The data stages: job arrays that produce a corpus's .bin/.idx pairs. Each task processes a share of the files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from hpcgen.config.corpus import num_outputs
from hpcgen.config.loader import Run
from hpcgen.config.run import RunConfig
from hpcgen.config.stages import STAGE_ROWS
from hpcgen.errors import Problem
from hpcgen.planning.allocation import Allocation
from hpcgen.planning.inputs import chat_template_file, manifest, tokenizer_files
from hpcgen.planning.kind import Export, Stage, Work
from hpcgen.planning.paths import corpus_job
from trainer.contract.config import TrainerConfig
from trainer.contract.record import record

if TYPE_CHECKING:
    from hpcgen.data.stages.base import DataStage

DOWNLOAD_CPUS = 4
"""CPUs of a download task, which mostly waits for the network and hashes the data."""
HUB_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


@record(kw_only=True, eq=False)
class CorpusStage(Stage):
    """A step from a corpus's files to its pairs. A task runs `hpcgen data NAME`."""

    @property
    def data_stage(self) -> DataStage:
        """The data stage that the tasks run."""
        from hpcgen.data.stages import DATA_STAGES  # not at the top: a render of other stages does without it

        return DATA_STAGES[self.name]

    def work(
        self, run: Run, config: RunConfig, allocation: Allocation, trainer: TrainerConfig | None
    ) -> Work:
        """The work of one task; the script adds the task ID. Requires a corpus in the run file."""
        job = corpus_job(config)
        corpus, tool = job.corpus, self.data_stage
        outputs = f"{corpus.directory}/{tool.folder}"
        assert config.data.corpus is not None
        assert allocation.array is not None
        source, num_tasks = config.data.corpus.source.directory, allocation.array.num_tasks
        return Work(
            arguments=("-m", "hpcgen", "data", self.name, f"--num-tasks={num_tasks}"),
            inputs=(
                manifest(corpus),
                *((*tokenizer_files(config), *chat_template_file(config)) if self.makes_pairs else ()),
            ),
            reads=(source,) if source and tool.reads_source else (),
            writes=(corpus.directory, *(() if tool.makes_output_files else (outputs,))),
            large=(outputs,)
            if tool.makes_output_files
            else (),  # striped; many small files would only cost objects
            files={self.config_file: json.dumps(dataclasses.asdict(job), indent=1)},
            values={"num_tasks": num_tasks},
        )

    def cpus_per_task(self, share: int | None) -> int | None:
        """At most DOWNLOAD_CPUS for a download."""
        return min(DOWNLOAD_CPUS, share) if share and self.data_stage.downloads else share

    def max_tasks(self, config: RunConfig) -> int | None:
        """The number of output files, for stages that produce them."""
        corpus = config.data.corpus
        return sum(num_outputs(corpus).values()) if corpus and self.data_stage.makes_output_files else None

    def secrets(self, config: RunConfig) -> tuple[str, ...]:
        """The token for the corpus's source."""
        corpus = config.data.corpus
        token = corpus.source.token_variable if corpus and self.data_stage.downloads else None
        return (token,) if token else ()

    def exports(self, run: Run, config: RunConfig) -> Iterator[Export]:
        """Allows a download to access the hub."""
        for name in HUB_OFFLINE if self.data_stage.downloads else ():
            yield Export(name, "0", "This stage needs the hub, regardless of the submitting shell's setting.")

    def environment_advice(self, run: Run, given: Mapping[str, str]) -> Iterator[Problem]:
        """Warnings about variables that prevent downloads from the hub."""
        for name in HUB_OFFLINE if self.data_stage.downloads else ():
            if given.get(name, "0").lower() in ("1", "on", "yes", "true"):
                hint = "remove it; the train stage sets it itself"
                yield Problem(f"environment.{name}", "prevents downloads from the hub", hint)


STAGES = tuple(CorpusStage.of(name) for name, row in STAGE_ROWS.items() if row.is_array)
