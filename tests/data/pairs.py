"""Small pairs for the tests of what reads them, written as Megatron-LM describes the format."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from trainer.contract.files.index_header import bin_path, idx_path


def write(prefix: Path, documents: list[list[int]], vocab_size: int = 300) -> Path:
    """A pair of these documents, each of them one sequence, or none when it is empty."""
    return write_sequences(prefix, [[ids] if ids else [] for ids in documents], vocab_size)


def write_sequences(prefix: Path, documents: list[list[list[int]]], vocab_size: int = 300) -> Path:
    """A pair of documents of several sequences, such as preprocess_data.py --split-sentences writes."""
    code, dtype = (8, np.dtype("<u2")) if vocab_size < 65500 else (4, np.dtype("<i4"))
    sequences = [sequence for document in documents for sequence in document]
    lengths = np.array([len(sequence) for sequence in sequences], "<i4")
    offsets = (np.cumsum(lengths) - lengths).astype("<i8") * dtype.itemsize
    bounds = np.cumsum([0, *map(len, documents)]).astype("<i8")
    header = struct.pack("<9sQBQQ", b"MMIDIDX", 1, code, len(lengths), len(bounds))
    idx_path(prefix).write_bytes(header + lengths.tobytes() + offsets.tobytes() + bounds.tobytes())
    bin_path(prefix).write_bytes(np.array([i for ids in sequences for i in ids], dtype).tobytes())
    return prefix
