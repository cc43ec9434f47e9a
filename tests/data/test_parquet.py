"""Parquet files as Hugging Face's datasets and pyarrow write them give the same pairs as JSON Lines."""

from __future__ import annotations

import hashlib
import json
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hpcgen.config.tokenizer import TokenizerConfig
from hpcgen.data.first_bytes import unexpected_content
from hpcgen.data.hashed_files import CheckedFile
from hpcgen.data.parquet import read_rows
from hpcgen.data.record import read_record
from hpcgen.data.tokenize_files import TokenizeReport, tokenize_files
from hpcgen.data.tokenizer import load_tokenizer
from hpcgen.data.unit import Input
from hpcgen.errors import HpcgenError

from .conftest import HARD_TEXTS
from .data_runs import documents, json_lines, make_units, one_unit, pairs, planned_corpus, write_file

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("forks")]

TEXTS = [*HARD_TEXTS, *documents(120)]


def write(path: Path, texts: Any, **settings: Any) -> Path:
    """A file with a column of texts between two others, in several row groups."""
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = texts if isinstance(texts, pa.Array) else pa.array(texts, pa.string())
    count = range(len(texts))
    table = pa.table(
        {"id": [f"<urn:{n}>" for n in count], "text": texts, "meta": [{"n": n, "u": None} for n in count]}
    )
    pq.write_table(table, path, **{"row_group_size": 37, **settings})
    return path


def tokenized(path: Path, name: str = "out", **settings: Any) -> TokenizeReport:
    tokenizer = load_tokenizer(TokenizerConfig(kind="bytes"))
    return tokenize_files([path], path.parent / name, tokenizer, workers=1, **settings)


def pair_of(path: Path, name: str = "out") -> tuple[bytes, bytes]:
    tokenized(path, name)
    return tuple((path.parent / f"{name}.{suffix}").read_bytes() for suffix in ("bin", "idx"))


def refusal(path: Path, **settings: Any) -> str:
    """The message of a failed run, which published nothing."""
    with pytest.raises(HpcgenError) as error:
        tokenized(path, **settings)
    assert not list(path.parent.glob("*out*"))
    return str(error.value)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    return pair_of(write_file(tmp_path_factory.mktemp("lines") / "a.jsonl", json_lines(TEXTS)))


@pytest.mark.parametrize(
    ("column_type", "settings"),
    [
        (pa.string(), {"compression": "zstd", "version": "1.0"}),
        pytest.param(pa.large_string(), {}, marks=pytest.mark.slow),
        (pa.binary(), {}),
        pytest.param(pa.dictionary(pa.int32(), pa.string()), {}, marks=pytest.mark.slow),
        (pa.dictionary(pa.int8(), pa.large_string()), {"compression": "zstd"}),
    ],
    ids=str,
)
def test_the_pair_is_that_of_json_lines(tmp_path, expected, column_type, settings):
    texts = pa.array(TEXTS, column_type.value_type if pa.types.is_dictionary(column_type) else column_type)
    if pa.types.is_dictionary(column_type):
        texts = pa.DictionaryArray.from_arrays(pa.array(range(len(TEXTS)), pa.int32()), texts)
    path = write(tmp_path / "a.parquet", texts, **settings)
    assert pair_of(path) == expected
    read = read_record(tmp_path / "out").inputs[0]
    assert (read.size, read.sha256) == (path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())


def test_a_file_that_datasets_writes(tmp_path, expected):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    dataset = datasets.Dataset.from_dict({"text": TEXTS, "score": [0.5] * len(TEXTS)})
    dataset.to_parquet(tmp_path / "a.parquet", batch_size=50)
    assert pair_of(tmp_path / "a.parquet") == expected


def test_both_paths_through_the_stages_and_several_outputs_for_each_file(tmp_path):
    """Three documents in four go to other outputs than their neighbors, in prepare and in extract, concat, tokenize."""
    halves = {"a": TEXTS[:60], "b": TEXTS[60:]}
    for name, texts in halves.items():
        write(tmp_path / "pq" / f"{name}.parquet", texts)
        write_file(tmp_path / "lines" / f"{name}.jsonl.zst", json_lines(texts))
    made = []
    for folder, suffix in (("lines", "jsonl.zst"), ("pq", "parquet")):
        for stages in (("prepare",), ("extract", "concat", "tokenize")):
            job = planned_corpus(
                tmp_path / folder,
                tmp_path / f"{folder}-{stages[0]}",
                [f"{name}.{suffix}" for name in halves],
                num_output_files=5,
            )
            make_units(job, *stages)
            made.append(pairs(job.directory))
    assert made[0]
    assert made[0] == made[1] == made[2] == made[3]
    first = json.loads((tmp_path / "pq-extract" / "extract" / "a.jsonl").read_text().split("\n")[5])
    assert first == {"id": "<urn:5>", "text": TEXTS[5], "meta": {"n": 5, "u": None}}


def test_bad_rows_are_named_or_skipped(tmp_path):
    texts = ["good", None, b"\xff".decode("utf-8", "surrogateescape"), "x" * (25 << 20), "good"]
    raw = [text if text is None else text.encode("utf-8", "surrogateescape") for text in texts]
    column = pa.array(raw, pa.binary()).view(pa.string())
    path = write(tmp_path / "a.parquet", column)
    assert refusal(path) == f"{path}:2: the text is null; correct it, or set bad_documents: skip"
    report = tokenized(path, bad_documents="skip", max_bad_fraction=1)
    assert (report.documents_read, report.documents, report.rejected_documents) == (5, 2, 3)
    rejects = [json.loads(line) for line in (tmp_path / "out.rejects.jsonl").read_text().splitlines()]
    assert [(line["line"], line["reason"]) for line in rejects] == [
        (2, "the text is null"),
        (3, "byte 1 of the text (0xff) is not UTF-8"),
        (4, "the text has 26,214,400 bytes, more than the maximum of 25,165,824"),
    ]
    assert rejects[1]["content_base64"] == "/w=="
    assert rejects[2]["begin"] == "x" * 200


def test_columns_without_text(tmp_path):
    path = write(tmp_path / "a.parquet", TEXTS)
    names = "'id', 'text', 'meta'"
    assert refusal(path, json_key="content") == (
        f"{path}: the file has no column 'content' (its columns are {names}); "
        "set json_key to the column with the text"
    )
    assert refusal(path, json_key="meta").startswith(f"{path}: column 'meta' has the type struct<")
    assert refusal(path, json_key="meta").endswith(
        ">, not string; set json_key to a column of strings ('id', 'text')"
    )
    assert "no column 'n'" in refusal(path, json_key="n")


def damaged_page(content: bytes) -> bytes:
    """A changed byte in the texts of the third row group."""
    at = content.index(b"alpha", len(content) * 5 // 8)
    return content[:at] + b"@" + content[at + 1 :]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content: content[:-1000], "damaged or truncated Parquet data: Parquet magic bytes not found"),
        pytest.param(
            lambda content: content[:3],
            "damaged or truncated Parquet data: Parquet file size is 3 bytes",
            marks=pytest.mark.slow,
        ),
        (lambda content: content[1000:], "damaged or truncated Parquet data after row 0: "),
        (damaged_page, "damaged or truncated Parquet data after row 74: "),
        pytest.param(
            lambda content: b'{"text": "x"}\n' * 9,
            "damaged or truncated Parquet data: Parquet magic bytes",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["truncated", "short", "beginning", "page", "json"],
)
def test_damaged_files(tmp_path, damage, reason):
    path = write(
        tmp_path / "a.parquet", TEXTS, compression="none", use_dictionary=False, write_page_checksum=True
    )
    path.write_bytes(damage(path.read_bytes()))
    message = refusal(path, bad_documents="skip")
    assert message.startswith(f"{path}: {reason}")
    assert message.endswith("; download it again")


def test_a_file_without_rows(tmp_path):
    path = write(tmp_path / "a.parquet", [])
    assert refusal(path) == f"{path}: the file has no rows; remove it, or exclude it with data.corpus.include"


def test_a_file_that_changed_since_it_was_planned(tmp_path):
    write(tmp_path / "source" / "a.parquet", TEXTS)
    job = planned_corpus(tmp_path / "source", tmp_path / "corpus", ["a.parquet"], num_output_files=1)
    write(tmp_path / "source" / "a.parquet", TEXTS[1:])
    with pytest.raises(HpcgenError, match=r"a\.parquet has changed since it was planned"):
        make_units(job, "prepare")


def test_memory_does_not_depend_on_the_size_of_row_groups(tmp_path):
    """A row group of 80 MB is read with a small part of it in memory at a time."""
    texts = [f"{n} " * 1000 for n in range(13_000)]
    path = write(tmp_path / "a.parquet", texts, row_group_size=1_000_000, compression="none")
    assert pq.ParquetFile(path).metadata.num_row_groups == 1
    before = pa.total_allocated_bytes()
    highest = size = 0
    tracemalloc.start()
    with CheckedFile(Input(name="a.parquet", path=path)) as source:
        for rows in read_rows(path, source, "text"):
            size += rows.num_bytes
            highest = max(highest, pa.total_allocated_bytes() - before + tracemalloc.get_traced_memory()[0])
        assert source.finish().sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    tracemalloc.stop()
    assert size > 60_000_000
    assert highest < 25_000_000


def test_the_extra_is_named_before_anything_is_written(tmp_path, monkeypatch):
    from hpcgen.data.manifest import manifest_path, read_manifest
    from hpcgen.data.task import run_task

    write(tmp_path / "source" / "a.parquet", TEXTS)
    job = planned_corpus(tmp_path / "source", tmp_path / "corpus", ["a.parquet"], num_output_files=1)
    monkeypatch.delitem(sys.modules, "hpcgen.data.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ModuleNotFoundError, match="pyarrow"):
        run_task("prepare", job, read_manifest(manifest_path(job.directory)))
    assert not (tmp_path / "corpus" / "tokens").exists()
    assert one_unit(job, "prepare").inputs[0].name == "a.parquet"


@pytest.mark.parametrize(
    ("name", "head", "found"),
    [
        ("a.parquet", b"PAR1\x15\x04", None),
        ("a.parquet", b"<html>", "a web page"),
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1", "a Git LFS pointer"),
        ("a.parquet", b'{"error": 1}', "not .parquet data (it starts with 7b 22 65 72)"),
        ("a.jsonl", b"PAR1\x15\x04", ".parquet data, but the name does not end in .parquet"),
    ],
)
def test_downloads_are_recognized(name, head, found):
    assert (unexpected_content(name, head) or "").startswith(found or "")
    assert (unexpected_content(name, head) is None) == (found is None)


@pytest.mark.parametrize(
    "column_type",
    [
        pa.binary(),
        pytest.param(pa.large_binary(), marks=pytest.mark.slow),
        pytest.param(pa.dictionary(pa.int32(), pa.binary()), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_bytes_are_the_same_text_by_both_paths(tmp_path, column_type):
    rows = {"text": pa.array(["hello", "g\u00f6", None, ""], pa.binary()).cast(column_type)}
    table = pa.table({**rows, "image": pa.array([b"\xff\xd8", None, b"a", b""], pa.binary())})
    (tmp_path / "source").mkdir()
    pq.write_table(table, tmp_path / "source/a.parquet")
    settings = {"num_output_files": 1, "bad_documents": "skip", "max_bad_fraction": 1.0}
    for directory, stages in (("one", ["prepare"]), ("other", ["extract", "concat", "tokenize"])):
        make_units(
            planned_corpus(tmp_path / "source", tmp_path / directory, ["a.parquet"], **settings), *stages
        )
    assert pairs(tmp_path / "one") == pairs(tmp_path / "other")


def test_bytes_that_are_no_text_are_refused_by_extract_if_they_should_be_the_text(tmp_path):
    (tmp_path / "source").mkdir()
    pq.write_table(pa.table({"text": pa.array([b"a", b"\xff"], pa.binary())}), tmp_path / "source/a.parquet")
    job = planned_corpus(tmp_path / "source", tmp_path / "out", ["a.parquet"], num_output_files=1)
    with pytest.raises(HpcgenError, match="rows 1 to 2 have a string that is not UTF-8"):
        make_units(job, "extract")
