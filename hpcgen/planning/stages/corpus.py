"""The stages that make a corpus's .bin/.idx pairs: job arrays, each task of which works through its share of files."""

from __future__ import annotations

import dataclasses
import json

from hpcgen.config.run import RunConfig
from hpcgen.planning.allocation import Allocation
from hpcgen.planning.paths import corpus_job, manifest_of
from hpcgen.planning.stages.work import Work

JOB_FILE = "corpus.json"
WRITES = {
    "download": "download",
    "extract": "extract",
    "concat": "concat",
    "tokenize": "tokens",
    "prepare": "tokens",
}
"""Stage -> where its outputs go, below the corpus's directory."""
LARGE = ("concat", "tokens")
"""Of these, the ones of few and large files. A corpus's own files are many: each over all storage targets would only
cost objects."""
READ_THE_SOURCE = ("extract", "concat", "prepare")
"""Stages that may read the corpus's own files where these lie in a directory."""
TOKENIZING = ("tokenize", "prepare")


def work(stage: str, config: RunConfig, allocation: Allocation) -> Work:
    """What a task of a data stage runs; the run file has a corpus. The script adds the task's number."""
    job = corpus_job(config)
    corpus, tokenizer, outputs = job.corpus, job.tokenizer, f"{job.corpus.directory}/{WRITES[stage]}"
    array = allocation.array
    assert array is not None
    files = (tokenizer.vocab_file, tokenizer.merges_file, tokenizer.tokenizer_file)
    of_tokenizer = tuple(path for path in files if path) if stage in TOKENIZING else ()
    is_large = WRITES[stage] in LARGE
    return Work(
        arguments=("-m", "hpcgen", "data", stage, f"--num-tasks={array.num_tasks}"),
        inputs=(manifest_of(corpus), *of_tokenizer),
        reads=_source(stage, config),
        writes=(corpus.directory, *(() if is_large else (outputs,))),
        large=(outputs,) if is_large else (),
        files={JOB_FILE: json.dumps(dataclasses.asdict(job), indent=1)},
        values={"num_tasks": array.num_tasks},
    )


def _source(stage: str, config: RunConfig) -> tuple[str, ...]:
    assert config.data.corpus is not None
    directory = config.data.corpus.source.directory
    return (directory,) if directory and stage in READ_THE_SOURCE else ()
