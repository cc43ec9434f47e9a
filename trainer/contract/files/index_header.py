"""Megatron-Core's pair of files with tokenized documents, PREFIX.bin and PREFIX.idx, and the header of the latter.

PREFIX.bin holds the token IDs of all sequences end to end. PREFIX.idx holds, as little-endian integers:
    9 bytes    b"MMIDIDX\\0\\0"
    uint64     version, 1
    uint8      code of the IDs' dtype
    uint64     S, the number of sequences
    uint64     D + 1, one more than the number of documents
    int32[S]   tokens in each sequence
    int64[S]   byte offset of each sequence in PREFIX.bin
    int64[D+1] 0, then after each document the number of sequences so far
Source: megatron/core/datasets/indexed_dataset.py.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import NamedTuple

BIN, IDX = ".bin", ".idx"
SUFFIXES = (IDX, BIN)
"""Suffixes of the files of a pair."""

DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
"""numpy's names of the dtypes by the codes of Megatron-Core's DType. The last digit is the number of bytes."""

_MAGIC, _VERSION = b"MMIDIDX\x00\x00", 1
_HEADER = struct.Struct("<9sQBQQ")

HEADER_SIZE = _HEADER.size
"""Size of the header of a .idx file (bytes). The lengths of the sequences follow."""

CHECKED_DOCUMENTS = 100
"""Number of documents of a pair whose last token is compared with data.eod_id."""

CHECKED_TOKENS = 2**20
"""Number of tokens of a pair that are compared with the size of the vocabulary."""


def bin_path(prefix: str | os.PathLike[str]) -> Path:
    """Path of the file of token IDs. The suffix is appended, because a dot in the prefix is part of its name."""
    return Path(f"{os.fspath(prefix)}{BIN}")


def idx_path(prefix: str | os.PathLike[str]) -> Path:
    """Path of the index file."""
    return Path(f"{os.fspath(prefix)}{IDX}")


def is_complete(prefix: str | os.PathLike[str]) -> bool:
    """True if both files of a pair exist."""
    return idx_path(prefix).is_file() and bin_path(prefix).is_file()


class Header(NamedTuple):
    """The header of a .idx file."""

    code: int
    """Code of the dtype, one of DTYPES."""
    num_sequences: int
    num_documents: int

    @property
    def token_bytes(self) -> int:
        """Size of a token in the .bin."""
        return int(DTYPES[self.code][-1])

    @property
    def bounds_at(self) -> int:
        """Where the numbers of sequences before each document begin (bytes)."""
        return HEADER_SIZE + 12 * self.num_sequences

    @property
    def file_size(self) -> int:
        """Size of the complete file (bytes)."""
        return self.bounds_at + 8 * (self.num_documents + 1)

    def pack(self) -> bytes:
        """The bytes of the header."""
        return _HEADER.pack(_MAGIC, _VERSION, self.code, self.num_sequences, self.num_documents + 1)


def read_header(content: bytes) -> Header | None:
    """The header in the first HEADER_SIZE bytes of a .idx file; None if they are not one."""
    try:
        magic, version, code, sequences, bounds = _HEADER.unpack(content)
    except struct.error:
        return None
    is_header = (magic, version) == (_MAGIC, _VERSION) and code in DTYPES and bounds
    return Header(code, sequences, bounds - 1) if is_header else None
