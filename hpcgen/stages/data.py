"""The data stages: job arrays that produce a corpus's .bin/.idx pairs. Each task processes a share of the files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hpcgen.config.corpus import num_outputs
from hpcgen.config.loader import Run
from hpcgen.config.run import RunConfig
from hpcgen.errors import Problem
from hpcgen.planning.allocation import Allocation
from hpcgen.planning.kind import Export, Stage, Work
from hpcgen.planning.paths import corpus_job, manifest_of
from trainer.contract.config import TrainerConfig

DOWNLOAD_CPUS = 4
"""CPUs of a download task, which mostly waits for the network and hashes the data."""
HUB_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


@dataclass(frozen=True, kw_only=True, eq=False)
class CorpusStage(Stage):
    """A step from a corpus's files to its pairs. A task runs `hpcgen data NAME`."""

    folder: str
    """Output directory, relative to the corpus's directory."""
    makes_output_files: bool = False
    """The outputs are the corpus's `num_output_files`, which are few and large. Further tasks would be idle. The output
    directory is striped. Other stages write an output per source file, and striping would only cost Lustre objects."""
    reads_source: bool = False
    """The tasks may read the corpus's source files, if these are in a directory."""
    asks_hub: bool = False
    """The tasks download files, which may need a token."""

    def work(
        self, run: Run, config: RunConfig, allocation: Allocation, trainer: TrainerConfig | None
    ) -> Work:
        """The work of one task; the script adds the task ID. Requires a corpus in the run file."""
        job = corpus_job(config)
        corpus, tokenizer, outputs = job.corpus, job.tokenizer, f"{job.corpus.directory}/{self.folder}"
        assert config.data.corpus is not None
        assert allocation.array is not None
        source, num_tasks = config.data.corpus.source.directory, allocation.array.num_tasks
        vocabulary = (tokenizer.vocab_file, tokenizer.merges_file, tokenizer.tokenizer_file)
        return Work(
            arguments=("-m", "hpcgen", "data", self.name, f"--num-tasks={num_tasks}"),
            inputs=(manifest_of(corpus), *(path for path in vocabulary if path and self.makes_pairs)),
            reads=(source,) if source and self.reads_source else (),
            writes=(corpus.directory, *(() if self.makes_output_files else (outputs,))),
            large=(outputs,) if self.makes_output_files else (),
            files={self.config_file: json.dumps(dataclasses.asdict(job), indent=1)},
            values={"num_tasks": num_tasks},
        )

    def cpus_per_task(self, share: int | None) -> int | None:
        """At most DOWNLOAD_CPUS for a download."""
        return min(DOWNLOAD_CPUS, share) if share and self.asks_hub else share

    def max_tasks(self, config: RunConfig) -> int | None:
        """The number of output files, for stages that produce them."""
        corpus = config.data.corpus
        return sum(num_outputs(corpus).values()) if corpus and self.makes_output_files else None

    def secrets(self, config: RunConfig) -> tuple[str, ...]:
        """The token for the corpus's source."""
        token = config.data.corpus.source.token_variable if config.data.corpus and self.asks_hub else None
        return (token,) if token else ()

    def exports(self, run: Run, config: RunConfig) -> Iterator[Export]:
        """Allows a download to access the hub."""
        for name in HUB_OFFLINE if self.asks_hub else ():
            yield Export(name, "0", "This stage needs the hub, regardless of the submitting shell's setting.")

    def environment_advice(self, run: Run, given: Mapping[str, str]) -> Iterator[Problem]:
        """Warnings about variables that prevent downloads from the hub."""
        for name in HUB_OFFLINE if self.asks_hub else ():
            if given.get(name, "0").lower() in ("1", "on", "yes", "true"):
                hint = "remove it; the train stage sets it itself"
                yield Problem(f"environment.{name}", "prevents downloads from the hub", hint)


PREPARE = CorpusStage.of("prepare", folder="tokens", makes_output_files=True, reads_source=True)
STAGES = (
    CorpusStage.of("download", folder="download", asks_hub=True),
    CorpusStage.of("extract", folder="extract", reads_source=True),
    CorpusStage.of("concat", folder="concat", makes_output_files=True, reads_source=True),
    CorpusStage.of("tokenize", folder="tokens", makes_output_files=True),
    PREPARE,
)
