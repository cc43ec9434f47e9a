"""The tokenizing stage: JSON Lines to one .bin/.idx pair."""

from __future__ import annotations

from pathlib import PurePosixPath

from hpcgen.config.loader import Run
from hpcgen.config.run import RunConfig
from hpcgen.planning.allocation import Allocation
from hpcgen.planning.stages.work import Work


def work(run: Run, config: RunConfig, allocation: Allocation) -> Work:
    """What the tokenizing stage runs; the run file has its section."""
    tokenize, tokenizer = config.data.tokenize, config.data.tokenizer
    assert tokenize is not None
    options = {
        "--output-prefix": tokenize.output_prefix,
        "--tokenizer": tokenizer.tokenizer_file if tokenizer.kind == "huggingface" else tokenizer.kind,
        "--vocab-file": tokenizer.vocab_file,
        "--merges-file": tokenizer.merges_file,
        "--eod-token": tokenizer.eod_token,
        "--json-key": tokenize.json_key,
    }
    words = [f"{option}={value}" for option, value in options.items() if value is not None]
    flags = ["--drop-empty"] if tokenize.drop_empty else []
    files = (tokenizer.vocab_file, tokenizer.merges_file, tokenizer.tokenizer_file)
    return Work(
        # --overwrite: a job that Slurm requeued begins again
        arguments=("-m", "hpcgen", "data", "tokenize", "--overwrite", *words, *flags, "--", *tokenize.input),
        inputs=(*tokenize.input, *(path for path in files if path)),
        large=(str(PurePosixPath(tokenize.output_prefix).parent),),
    )
