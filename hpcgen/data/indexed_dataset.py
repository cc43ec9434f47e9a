"""Megatron-Core's .bin/.idx pair, byte for byte as megatron.core.datasets.indexed_dataset writes it, without torch.

`trainer.contract.files.index_header` describes the two files. In pairs made by hpcgen, a document is one sequence, or
none if it has no tokens.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hpcgen.config.tokenizer import id_bytes
from hpcgen.errors import HpcgenError
from hpcgen.text import counted
from trainer.contract.files.index_header import DTYPES, HEADER_SIZE, Header, bin_path, idx_path, read_header
from trainer.contract.files.regular_file import open_regular, require_regular

_LONGEST_SEQUENCE = 2**31 - 1
_CHUNK_BYTES = 4 * 1024 * 1024
"""Bytes of document lengths to process at once; a multiple of their item size."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The dtype that Megatron-Core chooses for an unpadded vocabulary (DType.optimal_dtype)."""
    return np.dtype("<u2" if id_bytes(vocab_size) == 2 else "<i4")


class Writable(Protocol):
    """A file that may be hashed while it is written."""

    def write(self, data: Any, /) -> Any:
        """Appends the bytes of `data`."""


class IndexedDatasetWriter:
    """Appends documents to an open .bin file and, at the end, writes the matching .idx file.

    Memory does not grow with the number of documents: beyond `spool_bytes`, their lengths go to an unnamed file in
    `spool_directory`.
    """

    def __init__(
        self,
        bin_file: Writable,
        dtype: np.dtype[Any],
        *,
        spool_directory: Path | None = None,
        spool_bytes: int = 64 * 1024 * 1024,
    ) -> None:
        self._bin_file = bin_file
        self._dtype = dtype
        self._lengths = tempfile.SpooledTemporaryFile(  # noqa: SIM115
            spool_bytes, dir=str(spool_directory) if spool_directory else None
        )
        self.num_documents = 0
        self.num_sequences = 0
        self.num_tokens = 0

    def add_documents(self, tokens: NDArray[Any], lengths: NDArray[np.int64]) -> None:
        """Appends `tokens` [sum(lengths)], the ids of len(lengths) documents end to end.

        Raises:
            OverflowError: a document is too long for the index (2^31 - 1 tokens).
        """
        if lengths.max(initial=0) > _LONGEST_SEQUENCE:
            raise OverflowError(
                f"a document has {lengths.max():,} tokens; the index format allows at most {_LONGEST_SEQUENCE:,}"
            )
        self._bin_file.write(tokens.astype(self._dtype, copy=False).data)
        self._lengths.write(lengths.astype("<i4").data)
        self.num_documents += len(lengths)
        self.num_sequences += int(np.count_nonzero(lengths))
        self.num_tokens += len(tokens)

    def write_index(self, idx_file: Writable) -> None:
        """Writes the index of everything added so far."""
        code = next(code for code, name in DTYPES.items() if np.dtype(name) == self._dtype)
        idx_file.write(Header(code, self.num_sequences, self.num_documents).pack())
        for lengths in self._length_chunks():
            idx_file.write(lengths[lengths > 0].data)
        end = 0
        for lengths in self._length_chunks():
            sizes = lengths[lengths > 0].astype(np.int64) * self._dtype.itemsize
            ends = end + np.cumsum(sizes)
            idx_file.write((ends - sizes).astype("<i8").data)
            end = int(ends[-1]) if len(ends) else end
        sequences = 0
        idx_file.write(np.zeros(1, "<i8").data)
        for lengths in self._length_chunks():
            bounds = sequences + np.cumsum(lengths > 0)
            idx_file.write(bounds.astype("<i8").data)
            sequences = int(bounds[-1])

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lengths.close()

    def _length_chunks(self) -> Iterator[NDArray[np.int32]]:
        """Yields the lengths of all documents in chunks."""
        self._lengths.seek(0)
        while data := self._lengths.read(_CHUNK_BYTES):
            yield np.frombuffer(data, "<i4")


@dataclass(frozen=True)
class DatasetCounts:
    """Size of the content of a .bin/.idx pair."""

    documents: int
    sequences: int
    tokens: int
    dtype: str


def read_counts(prefix: Path) -> DatasetCounts:
    """Reads the counts of the pair at `prefix` from the index's header and the size of the .bin file.

    Raises:
        HpcgenError: a file is missing, is not an index, or the sizes do not match (a torn or truncated pair).
    """
    index, data = idx_path(prefix), bin_path(prefix)
    try:
        with open_regular(index) as file:
            beginning = file.read(HEADER_SIZE)
        require_regular(data)
        index_size, data_size = index.stat().st_size, data.stat().st_size
    except OSError as error:
        raise HpcgenError(
            f"cannot read the dataset {prefix}: {error}", "a dataset is a .bin and an .idx file"
        ) from error
    if len(beginning) < HEADER_SIZE:
        raise HpcgenError(
            f"{counted(len(beginning), 'byte')}, less than the header of a Megatron index ({HEADER_SIZE})",
            "tokenize again",
            where=index,
        )
    header = read_header(beginning)
    if header is None:
        raise HpcgenError(
            "not a Megatron index (version 1)", "give the prefix of a .bin/.idx pair", where=index
        )
    if index_size < header.file_size:
        size = (
            f"{index_size:,} bytes for {counted(header.num_sequences, 'sequence')} and "
            f"{counted(header.num_documents, 'document')}"
        )
        raise HpcgenError(f"truncated ({size})", "tokenize again", where=index)
    dtype = np.dtype(DTYPES[header.code])
    end = _end(index, header)
    if end != data_size:
        raise HpcgenError(
            f"{data_size:,} bytes, but its index describes {end:,} bytes", "tokenize again", where=data
        )
    return DatasetCounts(header.num_documents, header.num_sequences, end // dtype.itemsize, dtype.name)


def _end(index: Path, header: Header) -> int:
    """End of the last sequence in the .bin file in bytes: its offset plus its length."""
    if not header.num_sequences:
        return 0
    with open_regular(index) as file:
        file.seek(HEADER_SIZE + 4 * (header.num_sequences - 1))
        length = int.from_bytes(file.read(4), "little")
        file.seek(header.bounds_at - 8)
        return int.from_bytes(file.read(8), "little") + length * header.token_bytes
