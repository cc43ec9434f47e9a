from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpcgen.data.indexed_dataset import (
    DatasetCounts,
    IndexedDatasetWriter,
    bin_path,
    idx_path,
    read_counts,
    token_dtype,
)
from hpcgen.errors import HpcgenError


def write(prefix: Path, documents: list[list[int]], vocab_size: int) -> tuple[bytes, bytes]:
    """Writes the documents in two portions, as two blocks of a corpus would."""
    with (
        bin_path(prefix).open("wb") as bin_file,
        idx_path(prefix).open("wb") as idx_file,
        IndexedDatasetWriter(bin_file, token_dtype(vocab_size), spool_bytes=8) as writer,
    ):
        for part in (documents[:2], documents[2:]):
            lengths = np.array([len(ids) for ids in part], np.int64)
            writer.add_documents(np.array([i for ids in part for i in ids], np.uint32), lengths)
        writer.write_index(idx_file)
    return bin_path(prefix).read_bytes(), idx_path(prefix).read_bytes()


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(257, "uint16"), (65499, "uint16"), (65500, "int32"), (2**20, "int32")]
)
def test_dtype_is_megatrons(megatron, vocab_size, dtype):
    assert token_dtype(vocab_size).name == dtype == megatron.DType.optimal_dtype(vocab_size).__name__


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.integers(0, 65498), max_size=5), max_size=6), st.sampled_from([65499, 65500]))
def test_files_are_megatrons_byte_for_byte(megatron_pair, tmp_path, documents, vocab_size):
    ended = [[*ids, 7] if ids else [] for ids in documents]
    assert write(tmp_path / "ours", ended, vocab_size) == megatron_pair(tmp_path, documents, 7, vocab_size)


def test_megatron_reads_the_pair(megatron, tmp_path):
    documents = [[1, 2, 3], [], [65498], [4, 5]]
    write(tmp_path / "a.bin.x", documents, 65499)
    dataset = megatron.IndexedDataset(str(tmp_path / "a.bin.x"))
    assert [list(sequence) for sequence in dataset[:]] == [[1, 2, 3], [65498], [4, 5]]
    assert list(dataset.document_indices) == [0, 1, 1, 2, 3]


def test_counts(tmp_path):
    write(tmp_path / "x", [[1, 2, 3], [], [4]], 70000)
    assert read_counts(tmp_path / "x") == DatasetCounts(documents=3, sequences=2, tokens=4, dtype="int32")


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_counts_refuse_a_truncated_pair(tmp_path, suffix):
    write(tmp_path / "x", [[1, 2, 3], [], [4]], 70000)
    path = tmp_path / f"x{suffix}"
    content = path.read_bytes()
    for size in range(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(HpcgenError, match=rf"x{suffix}"):
            read_counts(tmp_path / "x")
    path.unlink()
    with pytest.raises(HpcgenError, match=r"a dataset is a \.bin and an \.idx file"):
        read_counts(tmp_path / "x")


def test_counts_refuse_another_file(tmp_path):
    bin_path(tmp_path / "x").write_bytes(b"")
    idx_path(tmp_path / "x").write_bytes(b"<html>" * 20)
    with pytest.raises(HpcgenError, match="not a Megatron index"):
        read_counts(tmp_path / "x")


def test_a_document_too_long_for_the_index_is_refused():
    with (
        IndexedDatasetWriter(io.BytesIO(), token_dtype(100)) as writer,
        pytest.raises(OverflowError, match="2,147,483,648 tokens"),
    ):
        writer.add_documents(np.empty(0, np.uint16), np.array([5, 2**31]))
