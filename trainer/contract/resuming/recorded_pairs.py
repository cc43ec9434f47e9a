"""Comparison of pairs with the records that the data stages of hpcgen wrote next to them.

A loss mask with other content, or an index of other documents, would train on the wrong tokens without any error. Both
are small and read at each start anyway. Each .bin would take too long; `hpcgen data verify` reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainer.contract.files.hashing import num_threads
from trainer.contract.files.index_header import idx_path
from trainer.contract.files.loss_mask import has_mask, mask_path
from trainer.contract.problem import FilePlace, Problem
from trainer.contract.resuming.pair_identity import Identity
from trainer.contract.resuming.provenance import identify, recorded


def compared_files(prefix: str) -> list[Path]:
    """The .idx file and the loss mask of a pair, if it has one."""
    return [idx_path(prefix), *([Path(mask_path(prefix))] if has_mask(prefix) else [])]


def record_problems(prefixes: Iterable[str]) -> list[Problem]:
    """A problem for each of the `compared_files` that differs from its record. Files without a record are not read.

    Raises:
        OSError: a file cannot be read.
    """
    files = [path for prefix in prefixes for path in compared_files(prefix)]
    records = {directory: recorded(directory) for directory in {path.parent for path in files}}
    with ThreadPoolExecutor(num_threads()) as threads:
        are_valid = [*threads.map(lambda path: _is_as_recorded(path, records[path.parent]), files)]
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


def _is_as_recorded(path: Path, records: Mapping[str, Identity]) -> bool:
    made = records.get(path.name)
    return made is None or made["sha256"] is None or identify(path)["sha256"] == made["sha256"]
