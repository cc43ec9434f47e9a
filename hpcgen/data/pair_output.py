"""The pairs that a unit makes: private files while they are written, which `publish` renames together."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from hpcgen.data.hashed_files import HashedFile
from hpcgen.data.indexed_dataset import IndexedDatasetWriter
from hpcgen.data.jsonl import Reject
from hpcgen.data.record import SIDE_FILE, Counts, Record, publish_unit, record_path
from hpcgen.errors import HpcgenError
from hpcgen.files import private_file
from hpcgen.text import counted
from trainer.contract.files.index_header import BIN, bin_path, idx_path
from trainer.contract.files.loss_mask import mask_path

_SPOOL_BYTES = 64 * 1024 * 1024
"""Memory for document lengths, shared by all outputs of a unit."""


class PairFile(HashedFile):
    """A private file with its final path."""

    def __init__(self, file: BinaryIO, target: Path, directory: Path) -> None:
        super().__init__(file, target.relative_to(directory).as_posix())
        self.target = target


class PairOutput:
    """One pair whose files are private, with a side file for rejects if there are any."""

    def __init__(
        self,
        stack: ExitStack,
        directory: Path,
        name: str,
        dtype: np.dtype[Any],
        num_outputs: int,
        *,
        has_mask: bool,
    ) -> None:
        self._stack = stack
        self._directory = directory
        self._prefix = directory / name
        self._bin = self._open(bin_path(self._prefix), swept=True)
        self._idx = self._open(idx_path(self._prefix), swept=True)
        self.mask = self._open(self.mask_path, swept=True) if has_mask else None
        """The loss mask, one byte for each token; None if the documents are not chats."""
        self._rejects: PairFile | None = None
        self.writer = stack.enter_context(
            IndexedDatasetWriter(
                self._bin,
                dtype,
                spool_directory=self._prefix.parent,
                spool_bytes=_SPOOL_BYTES // num_outputs,
            )
        )

    @property
    def files(self) -> list[PairFile]:
        """All files, the index last: for readers that ignore records, the index marks a complete pair."""
        return [file for file in (self._rejects, self._bin, self.mask, self._idx) if file is not None]

    @property
    def mask_path(self) -> Path:
        """File for the loss mask."""
        return Path(mask_path(self._prefix))

    @property
    def rejects_path(self) -> Path:
        """File for rejected lines."""
        return self._prefix.with_name(self._prefix.name + SIDE_FILE)

    def add_reject(self, reject: Reject) -> None:
        """Writes the place, reason and content of a bad line to the side file."""
        if self._rejects is None:
            self._rejects = self._open(self.rejects_path)
        line: dict[str, Any] = {"file": str(reject.path), "line": reject.line + 1, "reason": reject.reason}
        key = "content" if reject.is_complete else "begin"
        try:
            line[key] = str(reject.data, "utf-8")
        except UnicodeDecodeError:
            line[f"{key}_base64"] = base64.b64encode(reject.data).decode()
        self._rejects.write(json.dumps(line).encode() + b"\n")

    def finish(self, counts: Counts, num_outputs: int) -> None:
        """Writes the index.

        Raises:
            HpcgenError: the pair has no tokens. Megatron-Core cannot read such a pair.
        """
        if not self.writer.num_tokens:
            split = f"{counted(counts.documents_in, 'line')} for {counted(num_outputs, 'output')}"
            if not counts.tokens and counts.warnings:
                reason, hint = (
                    "; ".join(counts.warnings),
                    "use a tokenizer that knows the text, or every byte",
                )
            elif not counts.tokens and counts.rejected == counts.documents_in:
                reason, hint = f"all {split} are bad", "correct the files"
            else:
                reason = split
                hint = (
                    "use a smaller data.corpus.num_output_files"
                    if num_outputs > 1
                    else "leave out files without text"
                )
            raise HpcgenError(f"{self._prefix}: none of its documents has a token ({reason})", hint)
        self.writer.write_index(self._idx)

    def _open(self, target: Path, swept: bool = False) -> PairFile:
        file = self._stack.enter_context(private_file(target, swept=swept))
        return PairFile(file, target, self._directory)


def publish(outputs: Sequence[PairOutput], record: Record, place: Path) -> None:
    """Publishes all files. Removes stale side files, and records of earlier runs that made each pair as a unit."""
    files = [file for output in outputs for file in output.files]
    targets = [file.target for file in files]
    pairs = [path.with_suffix("") for path in targets if path.suffix == BIN]
    optional = (path for output in outputs for path in (output.rejects_path, output.mask_path))
    stale = [
        *(path for path in optional if path not in targets),
        *(record_path(pair) for pair in pairs if pair != place),
    ]
    publish_unit([(file.file, file.target) for file in files], record, place, stale=stale)
