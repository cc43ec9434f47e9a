"""Checks that pairs are as the data stages of hpcgen recorded them.

A loss mask with other content, or an index of other documents, would train on the wrong tokens without any error.
Packing and the index cache read both files at each start anyway. Each .bin would take too long; `hpcgen data verify`
reads it.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainer.contract.config import ConfigError
from trainer.contract.files.hashing import num_threads
from trainer.contract.files.loss_mask import has_mask, mask_path
from trainer.contract.resuming.provenance import identify, recorded


def require_as_recorded(prefixes: Iterable[str]) -> None:
    """Compare the .idx files and the loss masks of pairs with the records next to them. Pairs without one are skipped.

    Raises:
        ConfigError: a file has other content than its record says.
        OSError: a file cannot be read.
    """
    files = [
        Path(path)
        for prefix in prefixes
        for path in (f"{prefix}.idx", *([mask_path(prefix)] if has_mask(prefix) else []))
    ]
    with ThreadPoolExecutor(num_threads()) as threads:
        are_valid = [*threads.map(_is_as_recorded, files)]
    for path, is_valid in zip(files, are_valid, strict=True):
        if not is_valid:
            raise ConfigError(
                "its SHA-256 is not the one in its record in the same directory. Make the pair again. If the pair was "
                "replaced on purpose, remove the record",
                where=str(path),
            )


def _is_as_recorded(path: Path) -> bool:
    made = recorded(path)
    return made is None or made["sha256"] is None or identify(path)["sha256"] == made["sha256"]
