"""Mistakes that `hpcgen data plan` and `hpcgen submit` find in the first documents of local files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from hpcgen.config.corpus import CorpusConfig, CorpusJob
from hpcgen.config.tokenizer import TokenizerConfig
from hpcgen.data.first_documents import check_first_documents
from hpcgen.data.listed_files import ManifestFile
from hpcgen.data.manifest import Manifest, manifest_path, read_manifest
from hpcgen.data.task import run_task
from hpcgen.errors import HpcgenError
from tests.http_server import http_server

from .data_runs import json_lines, make_units, planned_corpus, write_file


def checked(folder: Path, contents: dict[str, bytes], **settings: Any) -> None:
    """Checks a corpus of files, and makes its pairs if nothing is refused."""
    for name, content in contents.items():
        write_file(folder / "source" / name, content)
    job = planned_corpus(folder / "source", folder / "corpus", list(contents), **settings)
    check_first_documents(job, read_manifest(manifest_path(job.directory)))
    make_units(job, "prepare")


@pytest.mark.parametrize(
    ("contents", "count", "message"),
    [
        (
            {"a.jsonl": json_lines(["x"] * 5)},
            6,
            "6 pairs would be made of 5 documents with text in .*a.jsonl",
        ),
        ({"a.jsonl.zst": json_lines(["x"] * 5)}, 6, "use at most 5"),
        ({"a.jsonl.gz": json_lines(["x", "", "x", ""])}, 2, "2 documents with text in .*; use at most 1"),
        ({"a.jsonl": json_lines(["x"] * 50), "b.jsonl": json_lines(["x" * 2000])}, 3, "use at most 2"),
        ({"a.jsonl": json_lines(["x"]), "b.jsonl": json_lines([""])}, 2, "1 pair would be .*; use at most 1"),
        (
            {"a.jsonl": json_lines([""]), "b.jsonl": json_lines([""])},
            1,
            "a.jsonl, .*b.jsonl: no document has text",
        ),
        ({"a.jsonl": b'{"body": "x"}\n'}, 1, "a.jsonl:1: missing key 'text'"),
        ({"a.jsonl": b'{"body": "x"}\n'}, 8, "a.jsonl:1: missing key 'text'"),
        ({"a.jsonl": json_lines(["x"]), "b.jsonl": b"\xff\n"}, 1, r"b.jsonl:1: byte 1 .* is not UTF-8"),
    ],
)
def test_what_the_tasks_would_refuse(
    tmp_path: Path, contents: dict[str, bytes], count: int, message: str
) -> None:
    with pytest.raises(HpcgenError, match=message):
        checked(tmp_path, contents, num_output_files=count)


@pytest.mark.parametrize(
    ("contents", "settings"),
    [
        ({"a.jsonl": json_lines(["x"])}, {}),
        ({"a.jsonl": json_lines(["x"] * 5)}, {"num_output_files": 5}),
        ({"a.jsonl": json_lines([""]), "b.jsonl": json_lines(["x"])}, {}),
        ({"a.jsonl": json_lines(["x", ""]) + b"{}\n"}, {"bad_documents": "skip", "max_bad_fraction": 0.5}),
        # nine blocks: too long to be counted
        ({"a.jsonl": json_lines(["x" * 2**22] * 9)}, {"num_output_files": 9}),
    ],
)
def test_corpora_that_the_tasks_accept(
    tmp_path: Path, contents: dict[str, bytes], settings: dict[str, Any]
) -> None:
    checked(tmp_path, contents, **settings)


def test_a_source_that_was_removed_after_extraction(tmp_path: Path) -> None:
    source = write_file(tmp_path / "source/a.jsonl.gz", json_lines(["x"]))
    job = planned_corpus(tmp_path / "source", tmp_path / "corpus", ["a.jsonl.gz"])
    make_units(job, "extract")
    source.unlink()
    check_first_documents(job, read_manifest(manifest_path(job.directory)))
    make_units(job, "concat")


@pytest.mark.process
@pytest.mark.usefixtures("forks")
def test_a_download_is_read_once_it_is_complete(tmp_path: Path) -> None:
    content = json_lines(["x"] * 3)
    corpus = CorpusConfig(directory=str(tmp_path / "corpus"), num_output_files=4)
    job = CorpusJob(corpus=corpus, tokenizer=TokenizerConfig(kind="bytes"))
    with http_server() as server:
        server.files["/a.jsonl"] = content
        file = ManifestFile(name="a.jsonl", split="corpus", size=len(content), url=f"{server.url}/a.jsonl")
        manifest = Manifest("a test", [file])
        check_first_documents(job, manifest)
        assert run_task("download", job, manifest, workers=1).errors == ()
    with pytest.raises(HpcgenError, match=r"download/a\.jsonl; use at most 3"):
        check_first_documents(job, manifest)
    changed = Manifest("a test", [msgspec.structs.replace(file, size=len(content) + 1)])
    check_first_documents(job, changed)  # the file will be downloaded again


@pytest.mark.process
@pytest.mark.usefixtures("forks")
def test_parquet_rows(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = tmp_path / "table.parquet"
    pq.write_table(pa.table({"text": ["x", "", "y"], "body": [1, 2, 3]}), file)
    contents = {"a.parquet": file.read_bytes()}
    with pytest.raises(HpcgenError, match="use at most 1"):
        checked(tmp_path, contents, num_output_files=2)
    with pytest.raises(HpcgenError, match="column 'body' has the type int64, not string"):
        checked(tmp_path / "other", contents, json_key="body")
