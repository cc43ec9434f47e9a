"""Stores that a corpus is downloaded from: what is listed, a download that is continued, and files that change.

The stores of three clouds are emulators, which `make test-stores` installs. Without one, its tests are skipped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from hpcgen.config.corpus import CorpusConfig, CorpusJob, SourceConfig, UrlSource, problems
from hpcgen.config.tokenizer import TokenizerConfig
from hpcgen.data import stores
from hpcgen.data.corpus_plan import difference, plan_corpus
from hpcgen.data.listed_files import ManifestFile
from hpcgen.data.manifest import Manifest
from hpcgen.data.sources import check_source, list_source
from hpcgen.data.stages import units
from hpcgen.data.stages.base import Context
from hpcgen.data.stages.download import DOWNLOAD
from hpcgen.data.stores import local, objects, open_store
from hpcgen.data.stores.base import Wanted
from hpcgen.data.transfer import fetched
from hpcgen.data.unit_checker import UnitChecker
from hpcgen.errors import HpcgenError
from tests.data.downloads import LINES, QUICK, become_another_process, names
from tests.patience import wait_until

SECRET = "planted0secret0value"
AZURITE_KEY = (  # of every Azurite, as its documentation says
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)


@dataclass(frozen=True)
class Place:
    """A directory of a store."""

    url: str
    write: Callable[[str, bytes], None]
    """Writes a file with this name below the directory, or replaces it."""


@pytest.fixture(params=["file", "s3", "gs", pytest.param("az", marks=pytest.mark.process)])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    objects._file_system.cache_clear()
    monkeypatch.setattr(objects, "_BLOCK", 100_000)
    monkeypatch.setattr(local, "_BLOCK", 100_000)
    with contextlib.ExitStack() as stack:
        yield PLACES[request.param](stack, tmp_path, monkeypatch)
    objects._file_system.cache_clear()
    stores._process_store.cache_clear()


def _disk(stack: contextlib.ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    counter = itertools.count(1)

    def write(name: str, content: bytes) -> None:
        path = tmp_path / "archive" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".new{next(counter)}")
        new.write_bytes(content)
        path.write_bytes(content) if path.exists() else new.rename(path)

    return Place(f"file://{tmp_path}/archive", write)


def _amazon(stack: contextlib.ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    for package in ("s3fs", "moto", "flask"):
        pytest.importorskip(package)
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    stack.callback(server.stop)
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    return _bucket("s3")


def _google(stack: contextlib.ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    for package in ("gcsfs", "gcp_storage_emulator"):
        pytest.importorskip(package)
    from gcp_storage_emulator.server import create_server

    port = _free_port()
    server = create_server("127.0.0.1", port, in_memory=True)
    server.start()
    stack.callback(server.stop)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("FSSPEC_GCS_TOKEN", "anon")
    return _bucket("gs")


def _azure(stack: contextlib.ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    pytest.importorskip("adlfs")
    if (program := shutil.which("azurite-blob")) is None:
        pytest.skip("azurite is not installed (npm install -g azurite)")
    port = _free_port()
    arguments = ["--blobPort", str(port), "--inMemoryPersistence", "--silent", "--skipApiVersionCheck"]
    process = stack.enter_context(subprocess.Popen([program, *arguments], cwd=tmp_path))
    stack.callback(process.terminate)
    wait_until(lambda: _answers(port))
    monkeypatch.setenv(
        "AZURE_STORAGE_CONNECTION_STRING",
        f"DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey={AZURITE_KEY};"
        f"BlobEndpoint=http://127.0.0.1:{port}/devstoreaccount1;",
    )
    return _bucket("az")


PLACES = {"file": _disk, "s3": _amazon, "gs": _google, "az": _azure}


def _bucket(scheme: str) -> Place:
    """A bucket of an emulator, which the library of the store fills."""
    file_system, name = objects._file_system(scheme), f"corpus-{secrets.token_hex(4)}"
    file_system.mkdir(name)
    return Place(f"{scheme}://{name}", lambda key, content: file_system.pipe_file(f"{name}/{key}", content))


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _answers(port: int) -> bool:
    with socket.socket() as found:
        return found.connect_ex(("127.0.0.1", port)) == 0


def job_of(tmp_path: Path, template: str, **source: Any) -> CorpusJob:
    url = SourceConfig(url=UrlSource(template=template, **source))
    corpus = CorpusConfig(directory=str(tmp_path / "corpus"), source=url)
    return CorpusJob(corpus=corpus, tokenizer=TokenizerConfig(kind="bytes"))


def make(job: CorpusJob, manifest: Manifest) -> None:
    """Downloads all files of a manifest, one after the other."""
    for unit in units("download", job, manifest):
        DOWNLOAD.make(unit, job, Context(configuration=DOWNLOAD.configuration(job)))


def test_a_corpus_is_listed_by_pattern_and_downloaded(
    place: Place, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """One emulator for all that is right about a store: names, sizes, versions, bytes, and nothing secret in logs."""
    files = {"train/b [1].jsonl": LINES, "train/deep/a.jsonl": LINES[:1000], "train/empty.jsonl": b""}
    for name, content in (files | {"train/other.txt": b"x", "valid/c.jsonl": LINES}).items():
        place.write(name, content)
    job = job_of(tmp_path, f"{place.url}/train/**/*.jsonl")
    listing = list_source(job)
    assert {file.name: file.size for file in listing.files} == {
        name.removeprefix("train/"): len(content) for name, content in files.items()
    }
    assert all(file.version and quote(file.name) in (file.url or "") for file in listing.files)
    assert len(list_source(job_of(tmp_path, f"{place.url}/train/*.jsonl")).files) == 2
    numbered = list_source(job_of(tmp_path, f"{place.url}/train/b%20[{{index}}].jsonl", first=1)).files
    assert [file.size for file in numbered] == [len(LINES)]

    manifest = Manifest("test", [file for file in listing.files if file.size])
    check_source({"download": units("download", job, manifest)}, job)
    make(job, manifest)
    for name in ("b [1].jsonl", "deep/a.jsonl"):
        assert (job.directory / "download" / name).read_bytes() == files[f"train/{name}"]
    assert SECRET not in f"{capfd.readouterr()}{caplog.text}"


def test_a_download_is_continued_if_the_file_is_the_same(place: Place, tmp_path: Path) -> None:
    place.write("a.jsonl", LINES)
    url, target = f"{place.url}/a.jsonl", tmp_path / "a.jsonl"
    wanted = Wanted(name="a.jsonl", url=url, size=None, sha256=None)

    def download(limit: int | None = None) -> tuple[bytes, int]:
        """Content of the part, and the bytes that were received. Stops after `limit` bytes."""
        received = list[int]()

        def advance(num_bytes: int) -> None:
            received.append(num_bytes)
            if limit is not None and sum(received) >= limit:
                raise KeyboardInterrupt

        with open_store(url, None, QUICK) as store, fetched(wanted, target, store, advance) as part:
            part.file.flush()
            return Path(part.file.name).read_bytes(), sum(received[1:])

    for changed, expected in ((None, len(LINES) - 100_000), (LINES[::-1], len(LINES) - 100_000)):
        become_another_process()
        with pytest.raises(KeyboardInterrupt):
            download(limit=100_000)
        if changed is not None:
            place.write("a.jsonl", changed)
        become_another_process()
        content, received = download()
        assert (content, received) == (changed or LINES, expected)


def test_a_file_that_changes_is_refused(place: Place, tmp_path: Path) -> None:
    """Neither a mixture of two versions, nor a version that the manifest does not have."""
    place.write("a.jsonl", LINES)
    job = job_of(tmp_path, f"{place.url}/a.jsonl")
    manifest = Manifest("test", list_source(job).files)
    place.write("a.jsonl", LINES[::-1])
    with pytest.raises(
        HpcgenError, match=r"the file has changed: its version is .*; run hpcgen data plan again"
    ):
        make(job, manifest)
    assert [name for name in names(job.directory / "download") if "part" not in name] == []

    replanned = Manifest("test", list_source(job).files)
    assert difference(manifest, replanned).changed == 1
    [unit], written = units("download", job, replanned), False

    def advance(step: object) -> None:
        nonlocal written
        if not written:
            written = True
            place.write("a.jsonl", LINES[:-1] + b" ")

    with pytest.raises(HpcgenError, match="the file has changed"):
        DOWNLOAD.make(unit, job, Context(configuration=DOWNLOAD.configuration(job), advance=advance))


def test_a_new_version_of_the_same_size_is_downloaded_again(place: Place, tmp_path: Path) -> None:
    job = job_of(tmp_path, f"{place.url}/a.jsonl")
    place.write("a.jsonl", LINES)
    before = Manifest("test", list_source(job).files)
    make(job, before)
    place.write("a.jsonl", LINES[::-1])
    after = Manifest("test", list_source(job).files)
    assert [
        UnitChecker(job).done_record(unit) is not None
        for manifest in (before, after)
        for unit in units("download", job, manifest)
    ] == [True, False]


def test_what_is_not_there_is_reported_when_planning(place: Place, tmp_path: Path) -> None:
    place.write("a.jsonl", LINES)
    for template, message in (
        (f"{place.url}/{{index}}.jsonl", r"source\.url: 1 of 1 file not in the store: .*/0\.jsonl"),
        (f"{place.url}/b/*.jsonl", r"template = .*/b/\*\.jsonl matches no file; correct it"),
    ):
        with pytest.raises(HpcgenError, match=message):
            list_source(job_of(tmp_path, template))


def test_credentials_that_the_store_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for the errors of every library: the variables are named, and nothing is tried again."""

    class Denied:
        def info(self, path: str) -> None:
            raise PermissionError("Forbidden for https://x/y?sig=abc0def&x=1")

        def invalidate_cache(self) -> None:
            pass

    monkeypatch.setattr(objects, "_file_system", lambda scheme: Denied())
    with pytest.raises(HpcgenError, match=r"denies access .*; export AWS_ACCESS_KEY_ID and") as error:
        list_source(job_of(tmp_path, "s3://b/{index}.jsonl"))
    assert "abc0def" not in str(error.value)


@pytest.mark.parametrize("package", ["s3fs", "gcsfs", "adlfs"])
def test_a_missing_package_is_found_before_anything_is_written(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hpcgen.data.task import run_task

    [scheme] = [scheme for scheme, name in objects.Objects.modules.items() if name == package]
    monkeypatch.setitem(sys.modules, package, None)
    objects._file_system.cache_clear()
    job = job_of(tmp_path, f"{scheme}://b/a.jsonl")
    with pytest.raises(ModuleNotFoundError, match=package):
        list_source(job)
    file = ManifestFile(name="a.jsonl", split="corpus", url=f"{scheme}://b/a.jsonl")
    with pytest.raises(ModuleNotFoundError, match=package):
        run_task("download", job, Manifest("test", [file]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("template", "token", "message"),
    [
        ("https://a.example/*.jsonl", None, "a web server cannot list its files"),
        ("gs://b/**.jsonl", None, "has ** in a part of a name"),
        ("s3://b/*.jsonl", "TOKEN", "has no effect for s3://; remove it; `secrets` names"),
        ("file:///a/*.jsonl", "TOKEN", "has no effect for file://"),
        ("https://a.example/{index}.jsonl", "TOKEN", None),
        ("az://b/**/*.jsonl", None, None),
    ],
)
def test_what_a_store_cannot_do(template: str, token: str | None, message: str | None) -> None:
    source = SourceConfig(url=UrlSource(template=template), token_variable=token)
    found = [
        f"{problem.reason}; {problem.hint}"
        for problem in problems(CorpusConfig(directory="/c", source=source), TokenizerConfig())
    ]
    assert len(found) == (message is not None)
    assert message is None or message in found[0]


def test_a_shared_corpus_takes_no_files_of_this_machine(tmp_path: Path) -> None:
    """A member of the group could name a private file in the manifest, and read what another member downloads."""
    (tmp_path / "secret.jsonl").write_bytes(LINES)
    job = dataclasses.replace(job_of(tmp_path, f"file://{tmp_path}/*.jsonl"), share="group")
    with pytest.raises(HpcgenError, match="is not copied into a corpus with share: group"):
        plan_corpus(job)
    manifest = Manifest("test", list_source(job).files)
    with pytest.raises(HpcgenError, match="is not copied into a corpus with share: group"):
        make(job, manifest)
    assert not job.directory.exists()


def test_a_question_mark_in_a_name_is_written_as_a_code(tmp_path: Path) -> None:
    with pytest.raises(HpcgenError, match=r"contains \? or #, which a name has as %3F or %23"):
        list_source(job_of(tmp_path, "s3://bucket/a?versionId=3"))
