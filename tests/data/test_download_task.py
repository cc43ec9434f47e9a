"""The tasks of the stage download: what is downloaded, kept and recorded."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from hpcgen.data.listed_files import ManifestFile
from hpcgen.data.manifest import Manifest
from hpcgen.data.progress import Step
from hpcgen.data.record import read_record
from hpcgen.data.stages import units
from hpcgen.data.stages.base import Context
from hpcgen.data.stages.download import DOWNLOAD
from hpcgen.data.task import run_task
from hpcgen.errors import HpcgenError
from tests.data.downloads import LINES, TOKEN, corpus_job, manifest_of, names
from tests.http_server import Server, cut, no_ranges


@pytest.mark.process
@pytest.mark.usefixtures("forks")
def test_a_task_downloads_what_is_missing_and_records_it(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED", TOKEN)
    job = corpus_job(tmp_path, server, "PLANTED")
    files = {f"train/{number}.jsonl": LINES[: 1000 * number + 33] for number in range(9)}
    manifest = manifest_of(server, files)
    report = run_task("download", job, manifest, workers=1)
    assert (report.errors, len(report.records)) == ((), 9)
    for name, content in files.items():
        path = job.directory / "download" / name
        assert path.read_bytes() == content
        record = read_record(path)
        assert record is not None
        assert record.outputs[0].sha256 == hashlib.sha256(content).hexdigest()
        assert record.inputs[0].name == name
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert TOKEN.encode() not in written

    server.requests.clear()
    assert run_task("download", job, manifest, workers=1).done_before == 9
    assert server.requests == []

    damaged = job.directory / "download" / "train/3.jsonl"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert run_task("download", job, manifest, workers=1).errors == ()
    assert [request.path for request in server.requests] == ["/train/3.jsonl"]
    assert damaged.read_bytes() == files["train/3.jsonl"]


@pytest.mark.process
@pytest.mark.usefixtures("forks")
def test_one_file_that_is_gone_does_not_keep_the_others_back(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED", TOKEN)
    job = corpus_job(tmp_path, server, "PLANTED")
    manifest = manifest_of(server, {"a.jsonl": LINES, "b.jsonl": LINES, "c.jsonl": LINES})
    del server.files["/b.jsonl"]
    report = run_task("download", job, manifest, workers=1)
    [error] = report.errors
    assert error.startswith("download/b.jsonl: http://127.0.0.1:")
    assert "the server does not have this file (HTTP 404 Not Found)" in error
    assert TOKEN not in error
    assert names(job.directory / "download") == [
        "a.jsonl",
        "a.jsonl.record.json",
        "c.jsonl",
        "c.jsonl.record.json",
    ]


@pytest.mark.process
@pytest.mark.usefixtures("forks")
def test_an_existing_file_with_the_right_hash_is_kept(tmp_path: Path, server: Server) -> None:
    job = corpus_job(tmp_path, server)
    manifest = manifest_of(server, {"a.jsonl": LINES, "b.jsonl": LINES})
    place = job.directory / "download"
    place.mkdir(parents=True)
    (place / "a.jsonl").write_bytes(LINES)
    (place / "b.jsonl").write_bytes(LINES[:-1] + b" ")
    assert run_task("download", job, manifest, workers=1).errors == ()
    assert [request.path for request in server.requests] == ["/b.jsonl"]
    assert (place / "b.jsonl").read_bytes() == LINES


@pytest.mark.process
@pytest.mark.usefixtures("forks")
def test_only_addresses_of_stores_are_fetched(tmp_path: Path, server: Server) -> None:
    job = corpus_job(tmp_path, server)
    manifest = Manifest("test", [ManifestFile(name="p.jsonl", split="corpus", url="ftp://a.example/p.jsonl")])
    [error] = run_task("download", job, manifest, workers=1).errors
    assert "p.jsonl: its URL does not start with https://, http://, s3://, " in error
    assert names(job.directory / "download") == []


def test_download_itself_says_what_could_not_be_written(tmp_path: Path, server: Server) -> None:
    job = corpus_job(tmp_path, server)
    job.directory.mkdir()
    (job.directory / "download").write_text("a file in the way")
    [unit] = units("download", job, manifest_of(server, {"a.jsonl": LINES}))
    with pytest.raises(HpcgenError, match=r"cannot write .*download/a\.jsonl: "):
        DOWNLOAD.make(unit, job, Context(configuration="c"))


def test_progress_never_exceeds_the_total(tmp_path: Path, server: Server) -> None:
    job = corpus_job(tmp_path, server)
    manifest = manifest_of(server, {"a.jsonl": LINES})
    server.behaviours["/a.jsonl"] = [cut(100_000), no_ranges]
    [unit] = units("download", job, manifest)
    steps: list[Step] = []
    record = DOWNLOAD.make(unit, job, Context(configuration="c", advance=steps.append))
    assert sum(step.bytes for step in steps) == len(LINES) == record.outputs[0].size
