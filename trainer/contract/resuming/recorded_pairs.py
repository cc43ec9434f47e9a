"""Comparison of pairs with the records that the data stages of hpcgen wrote next to them.

A loss mask with other content, or an index of other documents, would train on the wrong tokens without any error. Both
are small and read at each start anyway. Each .bin would take too long; `hpcgen data verify` reads it.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainer.contract.files.hashing import num_threads
from trainer.contract.files.loss_mask import has_mask, mask_path
from trainer.contract.problem import FilePlace, Problem
from trainer.contract.resuming.provenance import identify, recorded


def compared_files(prefix: str) -> list[Path]:
    """The .idx file and the loss mask of a pair, if it has one."""
    return [Path(path) for path in (f"{prefix}.idx", *([mask_path(prefix)] if has_mask(prefix) else []))]


def record_problems(prefixes: Iterable[str]) -> list[Problem]:
    """A problem for each of the `compared_files` that differs from its record. Files without a record are not read.

    Raises:
        OSError: a file cannot be read.
    """
    files = [path for prefix in prefixes for path in compared_files(prefix)]
    with ThreadPoolExecutor(num_threads()) as threads:
        are_valid = [*threads.map(_is_as_recorded, files)]
    return [
        Problem(
            "",
            "its SHA-256 is not the one in its record in the same directory",
            "make the pair again. If the pair was replaced on purpose, remove the record",
            where=FilePlace(path),
        )
        for path, is_valid in zip(files, are_valid, strict=True)
        if not is_valid
    ]


def _is_as_recorded(path: Path) -> bool:
    made = recorded(path)
    return made is None or made["sha256"] is None or identify(path)["sha256"] == made["sha256"]
