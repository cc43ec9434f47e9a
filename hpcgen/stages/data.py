"""The data stages: job arrays that make a corpus's .bin/.idx pairs, each task from its share of the files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcgen.stages.stage import Advice, Export, Stage, Work

if TYPE_CHECKING:
    from hpcgen.config.loader import Run
    from hpcgen.config.run import RunConfig
    from hpcgen.data.unit import DataStage as Name
    from hpcgen.planning.allocation import Allocation
    from trainer.contract.config import TrainerConfig

JOB_FILE = "corpus.json"
DOWNLOAD_CPUS = 4
"""CPUs of a download, which waits for the network and hashes what arrives."""
HUB_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


@dataclass(frozen=True, kw_only=True, eq=False)
class CorpusStage(Stage):
    """A step on the way from the files of a corpus to its pairs. `hpcgen data NAME` does the work of a task."""

    name: Name
    folder: str
    """Directory of the outputs, below the corpus's directory."""
    makes_output_files: bool = False
    """The outputs are the corpus's `num_output_files`: few and large files. A task more than these would have nothing
    to do, and their directory is striped. Files of the source are many; striping each would only cost objects."""
    reads_source: bool = False
    """The tasks may read the corpus's own files, where these are in a directory."""
    asks_hub: bool = False
    """The tasks fetch files over the network, which may need a token."""

    is_array: bool = True
    frame: str = "data"
    is_single_task: bool = True
    by_submitit: bool = True
    own_variables: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: {"CORPUS_JOB": "RUN_DIR/jobs/ARRAY_TASK/corpus.json"}
    )
    config_file: str = JOB_FILE
    config_variable: str = "CORPUS_JOB"

    def work(
        self, run: Run, config: RunConfig, allocation: Allocation, trainer: TrainerConfig | None
    ) -> Work:
        """One task's share of the outputs; the script adds the task's number. The run file has a corpus."""
        from hpcgen.planning.paths import corpus_job, manifest_of

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
            files={JOB_FILE: json.dumps(dataclasses.asdict(job), indent=1)},
            values={"num_tasks": num_tasks},
        )

    def cpus_per_task(self, share: int | None) -> int | None:
        """Few CPUs for a download."""
        return min(DOWNLOAD_CPUS, share) if share and self.asks_hub else share

    def max_tasks(self, config: RunConfig) -> int | None:
        """As many as there are output files."""
        from hpcgen.config.corpus import num_outputs

        corpus = config.data.corpus
        return sum(num_outputs(corpus).values()) if corpus and self.makes_output_files else None

    def secrets(self, config: RunConfig) -> tuple[str, ...]:
        """The token for the corpus's source."""
        token = config.data.corpus.source.token_variable if config.data.corpus and self.asks_hub else None
        return (token,) if token else ()

    def exports(self, run: Run, config: RunConfig) -> Iterator[Export]:
        """Lets a download ask the hub."""
        for name in HUB_OFFLINE if self.asks_hub else ():
            yield Export(name, "0", "This stage asks the hub, whatever the submitting shell says.")

    def environment_advice(self, run: Run, given: Mapping[str, str]) -> Iterator[Advice]:
        """Variables that keep a download from its hub."""
        for name in HUB_OFFLINE if self.asks_hub else ():
            if given.get(name, "0").lower() in ("1", "on", "yes", "true"):
                yield Advice(name, "keeps the download from its hub", "remove it; training has it anyway")


STAGES = (
    CorpusStage(
        name="download",
        order=20,
        summary="fetches the files of the corpus",
        settings_doc="For fetching the files of the corpus.",
        folder="download",
        shares_node=True,
        asks_hub=True,
        time_limit="1-00:00:00",
    ),
    CorpusStage(
        name="extract",
        order=30,
        summary="uncompresses the files of the corpus",
        settings_doc="For uncompressing them.",
        folder="extract",
        reads_source=True,
        time_limit="8:00:00",
    ),
    CorpusStage(
        name="concat",
        order=40,
        summary="joins the files of the corpus into num_output_files files",
        settings_doc="For joining them into num_output_files files.",
        folder="concat",
        makes_output_files=True,
        reads_source=True,
        time_limit="8:00:00",
    ),
    CorpusStage(
        name="tokenize",
        order=50,
        summary="makes a .bin/.idx pair from each of these files",
        settings_doc="For making a .bin/.idx pair of each of these.",
        folder="tokens",
        makes_output_files=True,
        makes_pairs=True,
        time_limit="8:00:00",
    ),
    CorpusStage(
        name="prepare",
        order=60,
        summary="makes the same pairs from the compressed files, in one pass",
        settings_doc="For making the same pairs from the compressed files in one pass.",
        folder="tokens",
        makes_output_files=True,
        reads_source=True,
        makes_pairs=True,
        time_limit="12:00:00",
    ),
)
