"""The tokenizer of a run as programs of the trainer read it: a known name, a tokenizer.json or a directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from hpcgen.config.tokenizer import TokenizerConfig
from hpcgen.errors import Problem

GPT2_FILES = ("vocab.json", "merges.txt")
"""Names of GPT-2's files in a directory that the trainer reads."""


def tokenizer_name(tokenizer: TokenizerConfig) -> str:
    """The tokenizer as the trainer names it."""
    if tokenizer.tokenizer_file is not None:
        return tokenizer.tokenizer_file
    return str(PurePosixPath(tokenizer.vocab_file).parent) if tokenizer.vocab_file else tokenizer.kind


def tokenizer_problems(tokenizer: TokenizerConfig, reader: str) -> Iterator[Problem]:
    """Yields a problem if GPT-2's files are not in a directory that the trainer can read. `reader` is a key."""
    vocabulary, merges = tokenizer.vocab_file, tokenizer.merges_file
    if vocabulary is None or merges is None:
        return
    paths = (PurePosixPath(vocabulary), PurePosixPath(merges))
    if tuple(path.name for path in paths) != GPT2_FILES or paths[0].parent != paths[1].parent:
        reason = f"and merges_file have other names or directories than {reader} requires"
        hint = f"put both files into one directory as {' and '.join(GPT2_FILES)}"
        yield Problem("data.tokenizer.vocab_file", reason, hint, about=("data.tokenizer.merges_file",))
