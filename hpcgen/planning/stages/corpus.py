"""The stages that make a corpus's .bin/.idx pairs: job arrays, each task of which works through its share of files."""

from __future__ import annotations

import dataclasses
import json

from hpcgen.config.loader import Run
from hpcgen.config.run import RunConfig
from hpcgen.planning.allocation import Allocation
from hpcgen.planning.paths import corpus_job
from hpcgen.planning.stages.work import Work

JOB_FILE = "corpus.json"


def work(run: Run, config: RunConfig, allocation: Allocation) -> Work:
    """What a task of a data stage runs; the run file has a corpus."""
    job = corpus_job(config)
    corpus, tokenizer = job.corpus, job.tokenizer
    files = (tokenizer.vocab_file, tokenizer.merges_file, tokenizer.tokenizer_file)
    reads = (corpus.source.directory,) if corpus.source.directory else ()
    return Work(
        arguments=("-m", "hpcgen", "data"),
        inputs=(f"{corpus.directory}/manifest.jsonl", *(path for path in files if path)),
        reads=reads,
        large=(corpus.directory,),
        files={JOB_FILE: json.dumps(dataclasses.asdict(job), indent=1)},
    )
