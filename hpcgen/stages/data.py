"""The data stages: job arrays that produce a corpus's .bin/.idx pairs. Each task processes a share of the files."""

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
    from hpcgen.planning.allocation import Allocation
    from trainer.contract.config import TrainerConfig

JOB_FILE = "corpus.json"
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

    needs: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: {"data.corpus": "set at least its directory and source"}
    )
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
        """The work of one task; the script adds the task ID. Requires a corpus in the run file."""
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
        """At most DOWNLOAD_CPUS for a download."""
        return min(DOWNLOAD_CPUS, share) if share and self.asks_hub else share

    def max_tasks(self, config: RunConfig) -> int | None:
        """The number of output files, for stages that produce them."""
        from hpcgen.config.corpus import num_outputs

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

    def environment_advice(self, run: Run, given: Mapping[str, str]) -> Iterator[Advice]:
        """Warnings about variables that prevent downloads from the hub."""
        for name in HUB_OFFLINE if self.asks_hub else ():
            if given.get(name, "0").lower() in ("1", "on", "yes", "true"):
                yield Advice(
                    name, "prevents downloads from the hub", "remove it; the train stage sets it itself"
                )


PREPARE = CorpusStage(
    name="prepare",
    other_names=("preprocess", "preprocess-data", "preprocessing", "preparation"),
    order=60,
    summary="makes the .bin/.idx pairs directly from the compressed files",
    settings_doc="Resources for making the .bin/.idx pairs directly from the compressed files, in one pass.",
    folder="tokens",
    makes_output_files=True,
    reads_source=True,
    makes_pairs=True,
    time_limit="12:00:00",
)
STAGES = (
    CorpusStage(
        name="download",
        other_names=("fetch", "wget"),
        order=20,
        summary="fetches the files of the corpus",
        settings_doc="Resources for downloading the files of the corpus.",
        folder="download",
        shares_node=True,
        asks_hub=True,
        time_limit="1-00:00:00",
    ),
    CorpusStage(
        name="extract",
        other_names=("decompress", "unpack", "unzip", "gunzip", "untar"),
        order=30,
        summary="makes plain JSON Lines from compressed and Parquet files",
        settings_doc="Resources for decompressing the files of the corpus.",
        folder="extract",
        reads_source=True,
        time_limit="8:00:00",
    ),
    CorpusStage(
        name="concat",
        other_names=("concatenate",),
        order=40,
        summary="joins the files of the corpus into num_output_files files",
        settings_doc="Resources for joining the extracted files into num_output_files files.",
        folder="concat",
        makes_output_files=True,
        reads_source=True,
        time_limit="8:00:00",
    ),
    CorpusStage(
        name="tokenize",
        other_names=("tokenization", "encode"),
        order=50,
        summary="makes a .bin/.idx pair from each concatenated file",
        settings_doc="Resources for tokenizing each concatenated file into a .bin/.idx pair.",
        folder="tokens",
        makes_output_files=True,
        makes_pairs=True,
        time_limit="8:00:00",
    ),
    PREPARE,
)
