"""Texts of the evaluation that are also pairs of the training, so that their loss is not the loss on unseen text."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from hpcgen.config.run import RunConfig
from hpcgen.errors import Problem
from trainer.contract.config import TrainerConfig
from trainer.contract.files.index_header import SUFFIXES

_COMPARED_BYTES = 2**20
"""Bytes at the beginning of files of equal size that are compared to recognize a copy."""


def trained_texts(
    config: RunConfig, trainer: TrainerConfig, exists: Callable[[str], bool]
) -> Iterator[Problem]:
    """Yields a warning for each text that training reads: the same pair, even under a different path, or a copy."""
    for index, text in enumerate(config.evaluation.data):
        for key in ("train", "datasets"):
            for number, pair in enumerate(getattr(trainer.data, key)):
                if _is_same(text.prefix, pair.prefix, exists):
                    reason = (
                        f"is a pair that the model is trained on (data.{key}[{number}]), so its loss is not that of "
                        "unseen text"
                    )
                    yield Problem(f"evaluation.data[{index}].prefix", reason, "name a pair that is held out")


def _is_same(one: str, other: str, exists: Callable[[str], bool]) -> bool:
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    if not all(exists(prefix + suffix) for prefix in (one, other) for suffix in SUFFIXES):
        return False
    try:
        return all(_is_same_file(Path(one + suffix), Path(other + suffix)) for suffix in SUFFIXES)
    except OSError:
        return False


def _is_same_file(one: Path, other: Path) -> bool:
    if one.samefile(other):
        return True
    return one.stat().st_size == other.stat().st_size and _beginning(one) == _beginning(other)


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_COMPARED_BYTES)
