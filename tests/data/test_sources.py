"""Sources of corpora: their listings, and the one error when a source is gone."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcgen.config.corpus import CorpusConfig, CorpusJob, HubSource, SourceConfig, UrlSource
from hpcgen.config.tokenizer import TokenizerConfig
from hpcgen.data.listed_files import Listing, ManifestFile
from hpcgen.data.manifest import Manifest, manifest_path, write_manifest
from hpcgen.data.pending import pending
from hpcgen.data.sources import check_source, list_source
from hpcgen.data.sources.directory import with_hashes
from hpcgen.data.sources.hub import list_repository
from hpcgen.data.stages import units
from hpcgen.data.task import run_task
from hpcgen.data.unit import Unit
from hpcgen.errors import ConfigErrors, HpcgenError
from tests.data.downloads import QUICK, TOKEN
from tests.http_server import COMMIT, REPOSITORY, Handler, Hub, Server, fake_hub, http_server, status

LINE = b'{"text": "a"}\n'
SHA256 = hashlib.sha256(LINE).hexdigest()


@pytest.fixture
def server() -> Iterator[Server]:
    with http_server() as running:
        yield running


@pytest.fixture
def hub(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    with fake_hub(server) as running:
        running.page_size = 2
        running.files = {
            "train/chunk2/b.jsonl.zst": b"b" * 7,
            "train/chunk10/a.jsonl.zst": b"a" * 5,
            "train/chunk1/c c.jsonl": LINE,
            "README.md": b"# corpus",
        }
        yield running


def job(tmp_path: Path, **source: object) -> CorpusJob:
    return CorpusJob(
        corpus=CorpusConfig(directory=str(tmp_path / "corpus"), source=SourceConfig(**source)),  # type: ignore[arg-type]
        tokenizer=TokenizerConfig(kind="bytes"),
    )


def names(listing: Listing) -> list[str]:
    return [file.name for file in listing.files]


# a hub


def test_a_repository_is_frozen_to_its_commit(hub: Hub) -> None:
    listing = list_repository(HubSource(repo_id=REPOSITORY, revision="v1"), None)
    assert listing.source == f"hub owner/corpus at {COMMIT}"
    assert names(listing) == [
        "README.md",
        "train/chunk1/c c.jsonl",
        "train/chunk10/a.jsonl.zst",
        "train/chunk2/b.jsonl.zst",
    ]
    assert listing.files[1] == ManifestFile(
        name="train/chunk1/c c.jsonl",
        split="corpus",
        size=len(LINE),
        sha256=SHA256,
        url=f"{hub.server.url}/datasets/owner/corpus/resolve/{COMMIT}/train/chunk1/c%20c.jsonl",
    )
    assert listing.files[0].sha256 is None  # not in LFS: the hub tells no hash
    assert [request.path.partition("?")[0] for request in hub.server.requests] == [
        "/api/datasets/owner/corpus/revision/v1",
        *[f"/api/datasets/owner/corpus/tree/{COMMIT}"] * 4,
    ]


def test_a_token_is_sent_only_where_one_is_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    list_repository(HubSource(repo_id=REPOSITORY), None)
    assert {request.headers.get("authorization") for request in hub.server.requests} == {None}
    hub.server.requests.clear()
    hub.token = TOKEN
    list_repository(HubSource(repo_id=REPOSITORY), "HF_TOKEN")
    assert {request.headers.get("authorization") for request in hub.server.requests} == {f"Bearer {TOKEN}"}


@pytest.mark.parametrize(
    ("refusal", "message"),
    [
        (
            (404, "RepoNotFound"),
            r"owner/corpus on http://127.* does not exist, or it is private and no token was sent",
        ),
        (
            (401, ""),
            r"does not exist, or it is private and no token was sent; check .*/datasets/owner/corpus",
        ),
        (
            (403, "GatedRepo"),
            r"is gated, and no token was sent; accept its terms at .*/datasets/owner/corpus",
        ),
        ((404, "RevisionNotFound"), r"has no revision main; see .*/datasets/owner/corpus/tree/main"),
        ((403, "Forbidden"), r"the hub answers HTTP 403 Forbidden, and no token was sent"),
        ((503, ""), r"the hub answers HTTP 503 Service Unavailable"),
    ],
)
def test_a_repository_that_is_gone_is_one_error(hub: Hub, refusal: tuple[int, str], message: str) -> None:
    hub.refusal = refusal
    with pytest.raises(HpcgenError, match=message) as error:
        list_repository(HubSource(repo_id=REPOSITORY), None, QUICK)
    assert "\n" not in str(error.value)


def test_a_request_to_a_busy_hub_is_retried(hub: Hub, server: Server) -> None:
    path = f"/api/datasets/{REPOSITORY}/revision/main"
    server.behaviours[path] = [status(503), status(429, {"Retry-After": "0"})]
    assert len(list_repository(HubSource(repo_id=REPOSITORY), None, QUICK).files) == 4
    assert len(server.asked(path)) == 3


def test_an_empty_repository(hub: Hub) -> None:
    hub.files = {}
    with pytest.raises(HpcgenError, match=r"is empty at main; check its name"):
        list_repository(HubSource(repo_id=REPOSITORY), None)


def test_a_hub_that_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://no.such.host.invalid")
    with pytest.raises(
        HpcgenError, match=r"invalid: the hub cannot be reached \(.*\); check the network and the"
    ):
        list_repository(HubSource(repo_id=REPOSITORY), None, QUICK)


def test_a_hub_whose_token_is_missing(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PLANTED", raising=False)
    with pytest.raises(HpcgenError, match=r"\$PLANTED is empty or not set; export PLANTED"):
        list_repository(HubSource(repo_id=REPOSITORY), "PLANTED")


@pytest.mark.process
def test_from_the_hub_to_the_files(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files come from a content network, which must not see the token."""
    monkeypatch.setenv("PLANTED", TOKEN)
    with http_server() as server, http_server() as storage, fake_hub(server, storage) as private:
        private.token, private.files = TOKEN, {"train/a.jsonl": LINE}
        storage.files["/train/a.jsonl"] = LINE
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        corpus = job(tmp_path, huggingface=HubSource(repo_id=REPOSITORY), token_variable="PLANTED")
        manifest = Manifest("hub", list_source(corpus).files)
        write_manifest(manifest, manifest_path(corpus.directory))
        assert run_task("download", corpus, manifest, workers=1).errors == ()
        assert {request.headers.get("authorization") for request in storage.requests} == {None}
    assert (corpus.directory / "download/train/a.jsonl").read_bytes() == LINE
    assert TOKEN not in "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())


# numbered files


def test_numbered_files_with_their_sizes(tmp_path: Path, server: Server) -> None:
    server.files |= {f"/corpus/en/part-{number:03d}.jsonl": LINE * (number + 1) for number in range(5, 9)}
    template = f"{server.url}/corpus/en/part-{{index:03d}}.jsonl"
    listing = list_source(job(tmp_path, url=UrlSource(template=template, first=5, count=4)))
    assert [(file.name, file.size) for file in listing.files] == [
        (f"part-{number:03d}.jsonl", len(LINE) * (number + 1)) for number in range(5, 9)
    ]
    assert listing.files[0].url == f"{server.url}/corpus/en/part-005.jsonl"
    assert {request.method for request in server.requests} == {"HEAD"}


def test_the_number_may_name_a_folder_and_come_before_a_signature(tmp_path: Path, server: Server) -> None:
    server.files |= {f"/c/{number}/data.jsonl": LINE for number in range(2)}
    template = f"{server.url}/c/{{index}}/data.jsonl?sig=SECRET"
    listing = list_source(job(tmp_path, url=UrlSource(template=template, count=2)))
    assert names(listing) == ["0/data.jsonl", "1/data.jsonl"]
    assert "SECRET" not in listing.source
    assert "sig=SECRET" in (listing.files[0].url or "")


def test_a_server_without_head_is_asked_for_one_byte(tmp_path: Path, server: Server) -> None:
    server.files["/a.jsonl"] = LINE * 9
    server.behaviours["/a.jsonl"] = [status(405)]
    listing = list_source(job(tmp_path, url=UrlSource(template=f"{server.url}/a.jsonl")))
    assert listing.files[0].size == len(LINE) * 9
    assert server.requests[-1].headers["range"] == "bytes=0-0"


def test_numbers_that_are_gone_are_named(tmp_path: Path, server: Server) -> None:
    server.files |= {f"/{number}.jsonl": LINE for number in range(10) if number % 2}
    source = UrlSource(template=f"{server.url}/{{index}}.jsonl", count=10)
    message = r"source\.url: 5 of 10 files not in the store: .*/0\.jsonl, .* and 2 more; correct"
    with pytest.raises(HpcgenError, match=message):
        list_source(job(tmp_path, url=source))


def test_a_refusing_server_ends_planning(tmp_path: Path, server: Server) -> None:
    server.behaviours["/0.jsonl"] = [status(401)]
    with pytest.raises(
        HpcgenError, match=r"/0\.jsonl: the server denies access \(HTTP 401 Unauthorized\); set data"
    ):
        list_source(job(tmp_path, url=UrlSource(template=f"{server.url}/{{index}}.jsonl", count=1)))


# a directory


def test_a_directory_in_the_order_of_names(tmp_path: Path) -> None:
    source = tmp_path / "in"
    for name in (
        "chunk10/a.jsonl",
        "chunk2/a.jsonl",
        "chunk1/a.jsonl",
        "Z.jsonl",
        ".cache/x.jsonl",
        "chunk1/.x",
    ):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(LINE)
    (source / "link.jsonl").symlink_to(source / "Z.jsonl")
    (source / "elsewhere").symlink_to(tmp_path)
    (source / "dangling.jsonl").symlink_to(source / "none")
    listing = list_source(job(tmp_path, directory=str(source)))
    assert names(listing) == ["Z.jsonl", "chunk1/a.jsonl", "chunk10/a.jsonl", "chunk2/a.jsonl", "link.jsonl"]
    stamp = (source / "Z.jsonl").stat().st_mtime_ns
    assert listing.files[0] == ManifestFile(
        name="Z.jsonl", split="corpus", size=len(LINE), modified_ns=stamp, path=str(source / "Z.jsonl")
    )
    assert {file.sha256 for file in with_hashes(listing.files)} == {SHA256}
    (source / "Z.jsonl").write_bytes(LINE * 2)
    with pytest.raises(
        HpcgenError, match=r"/Z\.jsonl changed while it was read; plan again when no process writes"
    ):
        with_hashes(listing.files)


def test_outputs_of_the_stages_are_not_a_source(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINE)
    (tmp_path / "corpus" / "concat").mkdir(parents=True)
    (tmp_path / "corpus" / "concat" / "out.jsonl").write_bytes(LINE)
    assert names(list_source(job(tmp_path, directory=str(tmp_path)))) == ["a.jsonl"]
    with pytest.raises(
        HpcgenError,
        match=r"is also data\.corpus\.directory, so the stages would read their own output; set",
    ):
        list_source(job(tmp_path, directory=str(tmp_path / "corpus")))


def test_a_path_that_is_not_a_directory(tmp_path: Path) -> None:
    with pytest.raises(
        HpcgenError,
        match=r"data\.corpus\.source\.directory = .*/none does not exist; set it to the directory",
    ):
        list_source(job(tmp_path, directory=str(tmp_path / "none")))
    (tmp_path / "file").write_text("")
    with pytest.raises(HpcgenError, match=r"/file is not a directory"):
        list_source(job(tmp_path, directory=str(tmp_path / "file")))


# a list of files


def write_list(tmp_path: Path, *lines: object) -> CorpusJob:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (tmp_path / "list.jsonl").write_text(text + "\n")
    return job(tmp_path, manifest=str(tmp_path / "list.jsonl"))


def test_a_list_of_files(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_bytes(LINE)
    corpus = write_list(
        tmp_path,
        {"url": "https://store.example/c/b%20b.jsonl.zst", "size": 5, "sha256": "AB" * 32},
        {"path": "data/a.jsonl", "size": len(LINE)},
        "",
        {"name": "c/z.jsonl", "path": str(tmp_path / "data" / "a.jsonl")},
    )
    listing = list_source(corpus)
    assert names(listing) == ["b b.jsonl.zst", "data/a.jsonl", "c/z.jsonl"]
    assert listing.files[0].sha256 == "ab" * 32
    assert listing.files[1].path == str(tmp_path / "data" / "a.jsonl")
    assert listing.files[1].modified_ns == (tmp_path / "data" / "a.jsonl").stat().st_mtime_ns
    assert listing.source.endswith("list.jsonl of files at store.example")


def test_a_manifest_can_be_a_source(tmp_path: Path) -> None:
    files = [
        ManifestFile(name="t/a.jsonl", split="train", size=3, sha256="0" * 64, url="https://a.example/a"),
        ManifestFile(name="v/b.jsonl", split="valid", size=4, url="https://a.example/b"),
    ]
    write_manifest(Manifest("hub x", files), tmp_path / "list.jsonl")
    listing = list_source(job(tmp_path, manifest=str(tmp_path / "list.jsonl")))
    assert [(file.name, file.split, file.sha256) for file in listing.files] == [
        ("t/a.jsonl", "corpus", "0" * 64),
        ("v/b.jsonl", "corpus", None),
    ]


def test_every_wrong_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINE)
    corpus = write_list(
        tmp_path,
        {"url": "https://a.example/a.jsonl"},
        {"name": "x"},
        {"url": "https://a.example/a", "path": "a.jsonl"},
        {"url": "ftp://a.example/a.jsonl"},
        {"url": "https://me:pw@a.example/a.jsonl"},
        {"url": "https://a.example/a b"},
        {"url": "https://a.example/a", "sha256": "abc"},
        {"path": "none.jsonl"},
        {"path": "a.jsonl", "size": 5},
        {"url": "https://a.example/a", "checksum": "x"},
        {"url": 5},
        "not json",
    )
    with pytest.raises(ConfigErrors) as error:
        list_source(corpus)
    reasons = [message.partition("list.jsonl:")[2] for message in error.value.messages]
    assert [reason.partition(":")[0] for reason in reasons] == [str(number) for number in range(2, 13)]
    for reason, expected in zip(
        reasons,
        (
            "neither url nor path is set; set exactly one of them",
            "both url and path are set; set exactly one of them",
            "'ftp://a.example/a.jsonl' does not start with https://, http://, s3://, gs://, az:// or file://",
            "contains a password; use data.corpus.source.token_variable",
            "contains a space",
            "sha256 = 'abc' is not a SHA-256; write 64 hexadecimal digits",
            "none.jsonl: No such file or directory",
            "a.jsonl, which has 14 bytes",
            "unknown field `checksum` (valid keys: name, url or path, size, sha256)",
            "Expected `str | null`, got `int`",
            "JSON is malformed",
        ),
        strict=True,
    ):
        assert expected in reason


def test_a_token_for_several_servers_is_refused(tmp_path: Path) -> None:
    corpus = write_list(tmp_path, {"url": "https://a.example/a.jsonl"}, {"url": "https://b.example/b.jsonl"})
    assert len(list_source(corpus).files) == 2
    source = SourceConfig(manifest=str(tmp_path / "list.jsonl"), token_variable="PLANTED")
    corpus = CorpusJob(
        corpus=CorpusConfig(directory=str(tmp_path / "corpus"), source=source), tokenizer=corpus.tokenizer
    )
    with pytest.raises(
        HpcgenError, match=r"the URLs are on 2 servers \(a\.example, b\.example\), and each would get the"
    ):
        list_source(corpus)


def test_an_empty_list(tmp_path: Path) -> None:
    with pytest.raises(HpcgenError, match="the list is empty; write one JSON object per line"):
        list_source(write_list(tmp_path, ""))
    with pytest.raises(HpcgenError, match=r"cannot read data\.corpus\.source\.manifest = .*: No such file"):
        list_source(job(tmp_path, manifest=str(tmp_path / "none")))


# before an array starts


def left(corpus: CorpusJob, manifest: Manifest, *stages: str) -> dict[str, list[Unit]]:
    """The units of these stages that are not done."""
    return {
        stage: [units(stage, corpus, manifest)[index] for index in pending(stage, corpus, manifest).indices]
        for stage in stages
    }


@pytest.mark.process
def test_the_first_and_the_last_missing_file_are_asked_for(tmp_path: Path, server: Server) -> None:
    server.files |= {f"/{number}.jsonl": LINE for number in range(5)}
    corpus = job(tmp_path, url=UrlSource(template=f"{server.url}/{{index}}.jsonl", count=5))
    manifest = Manifest("test", list_source(corpus).files)
    server.requests.clear()
    check_source(left(corpus, manifest, "download"), corpus)
    assert [request.path for request in server.requests] == ["/0.jsonl", "/4.jsonl"]

    assert run_task("download", corpus, manifest, task_id=0, num_tasks=4, workers=1).errors == ()  # 0 and 4
    server.requests.clear()
    check_source(left(corpus, manifest, "download"), corpus)
    assert [request.path for request in server.requests] == ["/1.jsonl", "/3.jsonl"]

    del server.files["/3.jsonl"]
    with pytest.raises(
        HpcgenError,
        match=r"/3\.jsonl: the server does not have this file \(HTTP 404 Not Found\); set another",
    ):
        check_source(left(corpus, manifest, "download"), corpus)

    server.files["/3.jsonl"] = LINE
    assert run_task("download", corpus, manifest, workers=1).errors == ()
    server.requests.clear()
    server.files.clear()
    check_source(left(corpus, manifest, "download"), corpus)  # nothing is missing
    assert server.requests == []


def test_local_files_need_no_server(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a", "b", "c"):
        (tmp_path / "in" / f"{name}.jsonl").write_bytes(LINE)
    corpus = job(tmp_path, directory=str(tmp_path / "in"))
    manifest = Manifest("test", list_source(corpus).files)
    check_source(left(corpus, manifest, "download", "prepare"), corpus)
    assert os.listdir(tmp_path) == ["in"]  # noqa: PTH208
    (tmp_path / "in" / "b.jsonl").write_bytes(LINE * 2)
    with pytest.raises(
        HpcgenError, match=r"in/b\.jsonl has changed since the corpus was planned; restore it, or plan"
    ):
        check_source(left(corpus, manifest, "prepare"), corpus)
    (tmp_path / "in" / "c.jsonl").unlink()
    with pytest.raises(
        HpcgenError, match=r"in/c\.jsonl does not exist; it existed when the corpus was planned"
    ):
        check_source(left(corpus, manifest, "download", "prepare"), corpus)
    check_source(left(corpus, manifest, "tokenize"), corpus)  # which reads none of them


def test_a_password_in_a_list_is_not_shown(tmp_path: Path) -> None:
    for url in ("https://me:hf_x@a.example/a.jsonl", "https://a.example:x/?sig=hf_x", "https://me:hf_x@[/a"):
        with pytest.raises(ConfigErrors) as error:
            list_source(write_list(tmp_path, {"url": url}))
        assert "hf_x" not in str(error.value)


def test_a_password_in_the_address_of_the_hub_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://me:hf_x@hub.example")
    with pytest.raises(HpcgenError, match=r"HF_ENDPOINT = https://hub\.example contains a password") as error:
        list_repository(HubSource(repo_id=REPOSITORY), None)
    assert "hf_x" not in str(error.value)


_GOOD_INFO = b'{"id": "owner/corpus", "sha": "2d0accdd58c5c5a2b5c2b5a2c5d8e7f6a1b2c3d4", "siblings": []}'
_JSON = "application/json"


@pytest.mark.parametrize(
    ("kind", "body", "headers"),
    [
        ("text/html", b"<!DOCTYPE html>\n<title>Sign in to the proxy</title>", {}),
        ("text/html; charset=utf-8", b"", {}),
        (_JSON, b'{"id": "owner/cor', {}),
        *(
            (_JSON, body, {})
            for body in (b"null", b"[]", b"[1]", b"{}", b"5", b'"a"', b'{"id": "owner/corpus"}')
        ),
        (_JSON, b'{"id": 1, "sha": 5, "siblings": [{}]}', {}),
        (_JSON, b'{"id": "owner/corpus", "sha": "2d", "siblings": 3}', {}),
        ("application/octet-stream", b"\x00\xff\xfe" * 99, {}),
        (_JSON, b"not gzip at all", {"Content-Encoding": "gzip"}),
        (_JSON, b"\xff\xfe{\x00}\x00", {}),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_hub_that_answers_with_something_else_is_described(
    server: Server, monkeypatch: pytest.MonkeyPatch, kind: str, body: bytes, headers: dict[str, str]
) -> None:
    """The answer is that of a proxy, a login page or another service. The token and queries are not shown."""
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    server.usually = lambda handler, content: handler.answer(200, {"Content-Type": kind, **headers}, body)
    with pytest.raises(HpcgenError) as error:
        list_repository(HubSource(repo_id="owner/corpus"), "HF_TOKEN", QUICK)
    message = str(error.value)
    url = f"{server.url}/api/datasets/owner/corpus/revision/main"
    begins = f"owner/corpus on {server.url}: the answer is not from a hub. {url} answers HTTP 200 ({kind}): "
    assert message.startswith(begins)
    assert "; check HF_ENDPOINT, and whether a proxy or a login page answers in its place" in message
    assert "hf_secret" not in message
    assert len(message) < 500


def test_a_redirect_to_a_login_page_is_described_by_where_it_led(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def login(handler: Handler, content: bytes) -> None:
        if handler.file == "/login":
            handler.answer(200, {"Content-Type": "text/html"}, b"<html>Sign in</html>")
        else:
            handler.answer(302, {"Location": f"{server.url}/login?next=secret"})

    monkeypatch.setenv("HF_ENDPOINT", server.url)
    server.usually = login
    with pytest.raises(HpcgenError) as error:
        list_repository(HubSource(repo_id="owner/corpus"), None, QUICK)
    assert f"{server.url}/login?... answers HTTP 200 (text/html): '<html>Sign in</html>'" in str(error.value)


@pytest.mark.parametrize(
    "body",
    [
        *(b"<html>", b"null", b"5", b"[5]", b"[null]", b"[{}]", b'{"error": "x"}'),
        *(
            b'[{"type": "file", "path": 5, "oid": "a", "size": 1}]',
            b'[{"type": "file", "path": "a", "size": "x"}]',
        ),
        b'[{"type": "file", "path": "a", "oid": "a", "size": 1, "lfs": {"size": 1}}]',
    ],
)
def test_a_listing_of_another_shape_is_described(
    server: Server, monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    def answer(handler: Handler, content: bytes) -> None:
        handler.answer(200, {"Content-Type": _JSON}, _GOOD_INFO if "/revision/" in handler.path else body)

    monkeypatch.setenv("HF_ENDPOINT", server.url)
    server.usually = answer
    with pytest.raises(HpcgenError, match="the answer is not from a hub"):
        list_repository(HubSource(repo_id="owner/corpus"), None, QUICK)
