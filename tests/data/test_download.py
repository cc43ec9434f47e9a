"""The stage download against a web server that misbehaves: the complete file, or one clear error and no file."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path

import pytest
import zstandard

from hpcgen.config.corpus import CorpusConfig, CorpusJob, SourceConfig, UrlSource
from hpcgen.config.tokenizer import TokenizerConfig
from hpcgen.data import http, part
from hpcgen.data.download import Wanted, download, fetched
from hpcgen.data.first_bytes import unexpected_content
from hpcgen.data.http import RetryPolicy, Web, authorization, retry_after_s
from hpcgen.data.manifest import Manifest, ManifestFile
from hpcgen.data.progress import Step
from hpcgen.data.record import read_record
from hpcgen.data.task import Context, run_task
from hpcgen.data.unit import units
from hpcgen.errors import HpcgenError
from hpcgen.files import host_tag, publish
from tests.http_server import (
    Behaviour,
    Handler,
    Server,
    chunked,
    cut,
    endless,
    http_server,
    no_ranges,
    other_length,
    redirect,
    short_chunks,
    short_range,
    stall,
    status,
    trickle,
    web_page,
    without_length,
    wrong_range,
)

QUICK = RetryPolicy(
    attempts=4,
    first_wait_s=0.01,
    longest_wait_s=0.02,
    longest_retry_after_s=0.3,
    connect_timeout_s=20,
    read_timeout_s=20,
)
IMPATIENT = replace(QUICK, read_timeout_s=0.3)
TOKEN = "hf_planted0secret0value0that0must0not0leak"
LINES = b"".join(b'{"text": "line %d of the corpus"}\n' % number for number in range(9000))
CONTENT = zstandard.compress(random.Random(7).randbytes(300_000))
SHA256 = hashlib.sha256(CONTENT).hexdigest()
PATH = "/corpus/part.jsonl.zst"


@pytest.fixture
def server() -> Iterator[Server]:
    with http_server() as running:
        running.files[PATH] = CONTENT
        yield running


@pytest.fixture
def web() -> Iterator[Web]:
    with Web(QUICK) as clients:
        yield clients


def wanted(server: Server, *, size: int | None = len(CONTENT), sha256: str | None = SHA256) -> Wanted:
    return Wanted(name="part.jsonl.zst", url=server.url + PATH, size=size, sha256=sha256)


def fetch(
    what: Wanted,
    target: Path,
    web: Web,
    headers: dict[str, str],
    advance: Callable[[int], None] = lambda n: None,
) -> tuple[int, str]:
    """As the stage does it, without a record; size and hash."""
    with fetched(what, target, web, headers, advance) as content:
        publish(content.file, target)
        return content.size, content.sha256


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir()) if directory.exists() else []


@pytest.mark.parametrize(
    "behaviours",
    [
        pytest.param([], id="well"),
        pytest.param([status(503), status(500), status(502)], id="busy"),
        pytest.param([status(429, {"Retry-After": "0.05"})], id="asked to wait"),
        pytest.param([cut(100_000), cut(50_000), cut(1)], id="cut, resumed"),
        pytest.param([cut(100_000), no_ranges], id="cut, then no ranges"),
        pytest.param([cut(100_000), wrong_range], id="cut, then another range"),
        pytest.param([cut(100_000), status(416, {"Content-Range": "bytes */5"})], id="cut, then 416"),
        pytest.param([cut(0)], id="headers alone"),
        pytest.param([chunked], id="in chunks, no length"),
        pytest.param([lambda handler, content: handler.drop()], id="no answer"),
    ],
)
@pytest.mark.parametrize("is_known", [True, False], ids=["known", "unknown"])
def test_the_complete_file_arrives(
    tmp_path: Path, server: Server, web: Web, behaviours: list[Behaviour], is_known: bool
) -> None:
    server.behaviours[PATH] = list(behaviours)
    steps: list[int] = []
    target = tmp_path / "sub" / "part.jsonl.zst"
    what = wanted(server) if is_known else wanted(server, size=None, sha256=None)
    content = fetch(what, target, web, {}, steps.append)
    assert target.read_bytes() == CONTENT
    assert content == (len(CONTENT), SHA256)
    assert sum(steps) == len(CONTENT)
    assert names(target.parent) == ["part.jsonl.zst"]


@pytest.mark.parametrize(
    "behaviour", [stall(70_000, 60), trickle(0.01)], ids=["stalled", "a byte now and then"]
)
def test_a_stalled_connection_is_closed(tmp_path: Path, server: Server, behaviour: Behaviour) -> None:
    server.behaviours[PATH] = [behaviour]
    with Web(IMPATIENT) as web:
        fetch(wanted(server), tmp_path / "x.jsonl.zst", web, {})
    assert (tmp_path / "x.jsonl.zst").read_bytes() == CONTENT
    assert len(server.asked(PATH)) >= 2


def test_existing_files_are_not_fetched_again(tmp_path: Path, server: Server, web: Web) -> None:
    server.behaviours[PATH] = [cut(100_000), cut(100_000)]
    fetch(wanted(server), tmp_path / "x.jsonl.zst", web, {})
    ranges = [request.headers.get("range") for request in server.asked(PATH)]
    assert ranges == [None, "bytes=100000-", "bytes=200000-"]
    assert [request.headers.get("if-range") for request in server.asked(PATH)][1:] == [server.etag(PATH)] * 2


def test_content_that_changed_between_two_requests_is_never_mixed(
    tmp_path: Path, server: Server, web: Web
) -> None:
    new = zstandard.compress(random.Random(8).randbytes(300_000))

    def changes(handler: object, content: bytes) -> None:
        cut(100_000)(handler, content)  # type: ignore[arg-type]
        server.files[PATH] = new

    server.behaviours[PATH] = [changes]
    fetch(wanted(server, size=None, sha256=None), tmp_path / "x.jsonl.zst", web, {})
    assert (tmp_path / "x.jsonl.zst").read_bytes() == new
    assert server.asked(PATH)[1].headers["range"] == "bytes=100000-"


def test_without_a_validator_and_a_hash_it_starts_again(tmp_path: Path, server: Server, web: Web) -> None:
    server.etags[PATH] = None
    server.behaviours[PATH] = [cut(100_000)]
    fetch(wanted(server, sha256=None), tmp_path / "x.jsonl.zst", web, {})
    assert [request.headers.get("range") for request in server.asked(PATH)] == [None, None]


def test_a_weak_etag_does_not_resume(tmp_path: Path, server: Server, web: Web) -> None:
    server.etags[PATH] = 'W/"weak"'
    server.behaviours[PATH] = [cut(100_000)]
    fetch(wanted(server, sha256=None), tmp_path / "x.jsonl.zst", web, {})
    assert [request.headers.get("range") for request in server.asked(PATH)] == [None, None]


@pytest.mark.parametrize(
    ("behaviours", "message"),
    [
        (
            [status(404)],
            r"part\.jsonl\.zst: the server does not have this file \(HTTP 404 Not Found\); set another source",
        ),
        (
            [status(403)],
            r"the server denies access \(HTTP 403 Forbidden\); set data\.corpus\.source\.token_var",
        ),
        ([status(400)], r"the server answers HTTP 400 Bad Request"),
        (
            [status(503)] * 4,
            r"answers HTTP 503 Service Unavailable \(after 4 attempts in 0 s\); the downloaded part",
        ),
        ([web_page] * 3, r"is a web page \(HTML\), not data; open it in a browser"),
        (
            [redirect("file:///etc/passwd")],
            r"part\.jsonl\.zst: redirects to an unsupported protocol \(file\)",
        ),
        ([redirect("javascript:alert(1)")], r"redirects to an unsupported protocol \(javascript\)"),
        ([redirect(PATH)] * 12, r"[Rr]edirect"),
    ],
)
def test_an_unavailable_file_is_one_error(
    tmp_path: Path, server: Server, web: Web, behaviours: list[Behaviour], message: str
) -> None:
    server.behaviours[PATH] = list(behaviours)
    with pytest.raises(HpcgenError, match=message):
        fetch(wanted(server), tmp_path / "x.jsonl.zst", web, {})
    assert names(tmp_path) == []


def test_a_refused_request_is_not_repeated(tmp_path: Path, server: Server, web: Web) -> None:
    server.files.clear()
    with pytest.raises(HpcgenError, match="does not have this file"):
        fetch(wanted(server), tmp_path / "x.jsonl.zst", web, {})
    assert len(server.asked(PATH)) == 1


def test_another_size_than_the_manifest_says(tmp_path: Path, server: Server, web: Web) -> None:
    with pytest.raises(
        HpcgenError, match=r"the file has changed: it has 300,\d+ bytes, but the manifest has 5; run hpcgen"
    ):
        fetch(wanted(server, size=5), tmp_path / "x.jsonl.zst", web, {})
    server.behaviours[PATH] = [without_length] * 3
    with pytest.raises(HpcgenError, match=r"more than the 5 bytes of the manifest"):
        fetch(wanted(server, size=5), tmp_path / "x.jsonl.zst", web, {})
    server.behaviours[PATH] = [without_length] * 4
    with pytest.raises(
        HpcgenError, match=r"the body ended after 300,\d+ of 999,999 bytes \(after 4 attempts"
    ):
        fetch(wanted(server, size=999_999), tmp_path / "x.jsonl.zst", web, {})


def test_another_hash_than_the_manifest_says_is_tried_again(tmp_path: Path, server: Server, web: Web) -> None:
    damaged = CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])
    server.behaviours[PATH] = [lambda handler, content: handler.answer(200, {}, damaged)]
    fetch(wanted(server), tmp_path / "x.jsonl.zst", web, {})
    assert (tmp_path / "x.jsonl.zst").read_bytes() == CONTENT
    server.files[PATH] = damaged
    server.requests.clear()
    with pytest.raises(HpcgenError, match=rf"damaged or has changed: .* but the manifest has {SHA256}"):
        fetch(wanted(server), tmp_path / "y.jsonl.zst", web, {})
    assert names(tmp_path) == ["x.jsonl.zst"]
    assert len(server.asked(PATH)) == 3


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(web_page, id="a web page"),
        pytest.param(lambda handler, content: handler.answer(200, {}, b""), id="empty"),
        pytest.param(
            lambda handler, content: handler.answer(
                200, {"Content-Encoding": "gzip"}, gzip.compress(content)
            ),
            id="gzip",
        ),
    ],
)
def test_two_wrong_answers_do_not_end_a_file(
    tmp_path: Path, server: Server, web: Web, wrong: Behaviour, is_known: bool
) -> None:
    server.behaviours[PATH] = [wrong, wrong]
    what = wanted(server) if is_known else wanted(server, size=None, sha256=None)
    fetch(what, tmp_path / "x.jsonl.zst", web, {})
    assert (tmp_path / "x.jsonl.zst").read_bytes() == CONTENT


def at_line(number: int) -> int:
    """The place in LINES where that line begins: a file that ends there looks complete to its readers."""
    return len(b"".join(LINES.splitlines(keepends=True)[:number]))


BROKEN_OFF = {
    "with a length": cut(at_line(1000)),
    "in chunks": short_chunks(at_line(1000), ends=False),
}
SHORTER = {
    "a range of a total": short_range(at_line(2000), names_total=True),
    "a range of no total": short_range(at_line(2000), names_total=False),
    "an empty range of a total": short_range(at_line(2000), names_total=True, sends=False),
    "an empty range of no total": short_range(at_line(2000), names_total=False, sends=False),
    "another length": other_length(at_line(3000)),
    "chunks that end": short_chunks(at_line(3000), ends=True),
}
UNDETECTABLE = {("in chunks", "another length"), ("in chunks", "chunks that end")}
"""One complete response is shorter than the file, and no other states its length."""


@pytest.mark.parametrize("etag", ['"one"', None], ids=["etag", "no etag"])
@pytest.mark.parametrize("shorter", SHORTER)
@pytest.mark.parametrize("broken_off", BROKEN_OFF)
@pytest.mark.parametrize("is_resumed", [False, True], ids=["one task", "two tasks"])
def test_a_shorter_response_is_not_mistaken_for_the_complete_file(
    tmp_path: Path,
    server: Server,
    web: Web,
    broken_off: str,
    shorter: str,
    etag: str | None,
    is_resumed: bool,
) -> None:
    """With neither size nor hash in the manifest, the length that the server stated before counts."""
    server.files["/a.jsonl"] = LINES
    server.etags["/a.jsonl"] = etag
    what = Wanted(name="a.jsonl", url=f"{server.url}/a.jsonl", size=None, sha256=None)
    target, answers = tmp_path / "a.jsonl", [BROKEN_OFF[broken_off], SHORTER[shorter]]
    if is_resumed:
        server.behaviours["/a.jsonl"] = answers[:1]
        with (
            Web(replace(QUICK, attempts=1)) as once,
            pytest.raises(HpcgenError, match="the connection broke"),
        ):
            fetch(what, target, once, {})
        become_another_process()
        answers = answers[1:]
    server.behaviours["/a.jsonl"] = answers
    fetch(what, target, web, {})
    is_whole = target.read_bytes() == LINES
    assert is_whole != ((broken_off, shorter) in UNDETECTABLE)


@pytest.mark.parametrize(
    "shorter", [name for name in SHORTER if "range" in name and "empty" not in name] + ["another length"]
)
def test_a_server_that_sends_partial_responses_yields_the_complete_file_or_none(
    tmp_path: Path, server: Server, web: Web, shorter: str
) -> None:
    server.files["/a.jsonl"] = LINES
    server.behaviours["/a.jsonl"] = [cut(at_line(1000)), *[SHORTER[shorter], cut(at_line(500))] * 30]
    what = Wanted(name="a.jsonl", url=f"{server.url}/a.jsonl", size=None, sha256=None)
    with contextlib.suppress(HpcgenError):
        fetch(what, tmp_path / "a.jsonl", web, {})
    assert not (tmp_path / "a.jsonl").exists() or (tmp_path / "a.jsonl").read_bytes() == LINES


def test_content_that_became_shorter_is_taken_when_two_answers_agree(
    tmp_path: Path, server: Server, web: Web
) -> None:
    server.files["/a.jsonl"] = LINES
    server.etags["/a.jsonl"] = None
    server.behaviours["/a.jsonl"] = [cut(at_line(1000)), *[other_length(at_line(3000))] * 2]
    what = Wanted(name="a.jsonl", url=f"{server.url}/a.jsonl", size=None, sha256=None)
    fetch(what, tmp_path / "a.jsonl", web, {})
    assert (tmp_path / "a.jsonl").read_bytes() == LINES[: at_line(3000)]


def test_a_body_without_an_end_leaves_room_on_the_disk(
    tmp_path: Path, server: Server, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulates a disk of 4 MB, of which the body may take half."""
    monkeypatch.setattr("hpcgen.data.download._SPACE_CHECK_BYTES", 1 << 16)
    most = 0

    def statvfs(path: object) -> os.statvfs_result:
        nonlocal most
        used = sum(file.stat().st_size for file in tmp_path.iterdir())
        most = max(most, used)
        return os.statvfs_result((1, 1, 0, 0, max(0, 4_000_000 - used), 0, 0, 0, 0, 255))

    monkeypatch.setattr(os, "statvfs", statvfs)
    server.behaviours["/a.jsonl"] = [endless]
    what = Wanted(name="a.jsonl", url=f"{server.url}/a.jsonl", size=None, sha256=None)
    with pytest.raises(
        HpcgenError, match=r"received so far, but the total is unknown and the file system of .* has"
    ):
        fetch(what, tmp_path / "a.jsonl", web, {})
    assert most < 3_500_000
    assert names(tmp_path) == []
    server.behaviours["/a.jsonl"] = [
        lambda handler, content: handler.answer(200, {"Content-Length": "5000000000000"}, LINES)
    ]
    with pytest.raises(
        HpcgenError, match=r"the file has 5\.0 TB, but the file system of .* has 4\.0 MB left"
    ):
        fetch(what, tmp_path / "a.jsonl", web, {})
    assert names(tmp_path) == []


def test_one_byte_at_a_time_is_not_progress(tmp_path: Path, server: Server, web: Web) -> None:
    server.behaviours[PATH] = [cut(1)] * 20
    with pytest.raises(HpcgenError, match=r"the connection broke .*after 4 attempts"):
        fetch(wanted(server), tmp_path / "x.jsonl.zst", web, {})


def test_a_body_of_unknown_length_is_refused(tmp_path: Path, server: Server, web: Web) -> None:
    server.behaviours[PATH] = [without_length, without_length]
    fetch(wanted(server, size=None), tmp_path / "x.jsonl.zst", web, {})  # the hash tells
    with pytest.raises(HpcgenError, match="neither the server nor the manifest states its size"):
        fetch(wanted(server, size=None, sha256=None), tmp_path / "y.jsonl.zst", web, {})
    assert names(tmp_path) == ["x.jsonl.zst"]


def test_a_body_that_is_encoded_all_the_same_is_refused(tmp_path: Path, server: Server, web: Web) -> None:
    encoded = [lambda handler, content: handler.answer(200, {"Content-Encoding": "br"}, content)]
    server.behaviours[PATH] = encoded * 3
    with pytest.raises(HpcgenError, match=r"sends the file with Content-Encoding: br, although"):
        fetch(wanted(server), tmp_path / "x.jsonl.zst", web, {})


@pytest.mark.parametrize(("age_s", "is_used"), [(3600, True), (5, False)])
def test_a_time_of_change_resumes_when_it_is_old_enough(
    tmp_path: Path, server: Server, web: Web, age_s: int, is_used: bool
) -> None:
    headers = {"Last-Modified": formatdate(time.time() - age_s, usegmt=True)}

    def dated_and_cut(handler: Handler, content: bytes) -> None:
        handler.answer(200, headers | {"Content-Length": str(len(content))}, content[:100_000])
        handler.drop()

    server.etags[PATH] = None
    server.behaviours[PATH] = [dated_and_cut]
    fetch(wanted(server, sha256=None), tmp_path / "x.jsonl.zst", web, {})
    assert server.asked(PATH)[1].headers.get("if-range") == (headers["Last-Modified"] if is_used else None)
    assert (tmp_path / "x.jsonl.zst").read_bytes() == CONTENT


def test_progress_resets_the_count_of_tries(tmp_path: Path, server: Server, web: Web) -> None:
    server.behaviours[PATH] = [cut(20_000)] * 12  # three times as many as the attempts in a row
    fetch(wanted(server), tmp_path / "x.jsonl.zst", web, {})
    assert len(server.asked(PATH)) == 13


def test_a_server_that_always_breaks_at_the_same_place_is_given_up(
    tmp_path: Path, server: Server, web: Web
) -> None:
    server.etags[PATH] = None
    server.behaviours[PATH] = [cut(20_000)] * 9
    with pytest.raises(HpcgenError, match="the connection broke"):
        fetch(wanted(server, sha256=None), tmp_path / "x.jsonl.zst", web, {})
    assert len(server.asked(PATH)) == 4


FIRST_BYTES: dict[str, tuple[str, bytes, str | None]] = {
    "lines": ("a.jsonl", LINES, None),
    "lines after a byte-order mark": ("a.jsonl", b"\xef\xbb\xbf\n " + LINES, None),
    "gz": ("a.jsonl.gz", gzip.compress(LINES), None),
    "zst": ("a.jsonl.zst", zstandard.compress(LINES), None),
    "zst with a skippable frame": ("a.jsonl.zst", b"\x50\x2a\x4d\x18\x04\0\0\0", None),
    "lines named zst": ("a.jsonl.zst", LINES, "not .zst data (it starts with 7b 22 74 65)"),
    "zst named gz": ("a.jsonl.gz", zstandard.compress(LINES), ".zst data, but the name does not end in .zst"),
    "gz named jsonl": ("a.jsonl", gzip.compress(LINES), ".gz data, but the name does not end in .gz"),
    "html": ("a.jsonl", b"  \n<html>", "a web page"),
    "nothing": ("a.jsonl", b"", "empty"),
    "lfs": ("a.jsonl.zst", b"version https://git-lfs.github.com/spec/v1\noid sha256:4d", "a Git LFS pointer"),
}


@pytest.mark.parametrize(("name", "content", "reason"), FIRST_BYTES.values(), ids=FIRST_BYTES)
def test_the_first_bytes_identify_the_content(name: str, content: bytes, reason: str | None) -> None:
    found = unexpected_content(name, content[:512])
    assert found == reason if reason is None else (found or "").startswith(reason)


def test_plain_lines_that_the_server_calls_a_web_page_are_taken(
    tmp_path: Path, server: Server, web: Web
) -> None:
    server.files["/a.jsonl"] = LINES
    server.behaviours["/a.jsonl"] = [
        lambda handler, content: handler.answer(200, {"Content-Type": "text/html"}, content),
        *[lambda handler, content: handler.answer(200, {"Content-Type": "text/html"}, b"Please sign in")] * 3,
    ]
    what = Wanted(name="a.jsonl", url=f"{server.url}/a.jsonl", size=None, sha256=None)
    fetch(what, tmp_path / "a.jsonl", web, {})
    with pytest.raises(HpcgenError, match="is a web page"):
        fetch(what, tmp_path / "b.jsonl", web, {})
    assert names(tmp_path) == ["a.jsonl"]


# waiting


def test_retry_after_is_seconds_or_a_date() -> None:
    assert retry_after_s({"Retry-After": "120"}) == 120
    now = 1_800_000_000
    date = {"Retry-After": formatdate(now + 90, usegmt=True), "Date": formatdate(now, usegmt=True)}
    assert retry_after_s(date) == 90
    assert retry_after_s({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}) == 0
    assert retry_after_s({"Retry-After": "soon"}) is None
    assert retry_after_s({}) is None
    assert retry_after_s({"RateLimit": '"resolvers";r=0;t=55'}) == 55
    assert retry_after_s({"RateLimit": '"resolvers";r=7;t=55'}) is None


def test_waits_are_random_below_a_bound_that_doubles() -> None:
    patience = RetryPolicy(first_wait_s=1, longest_wait_s=5)
    for failures, bound in ((1, 1), (2, 2), (3, 4), (4, 5), (50, 5)):
        waits = [patience.wait_s(failures, None) for _ in range(200)]
        assert min(waits) < bound / 5
        assert bound * 0.8 < max(waits) <= bound
    assert 30 <= patience.wait_s(1, 30) <= 31
    assert patience.wait_s(1, 1e6) <= patience.longest_retry_after_s + 1


def test_a_requested_delay_applies_to_every_thread(tmp_path: Path, server: Server, web: Web) -> None:
    server.behaviours[PATH] = [status(429, {"Retry-After": "0.25"})]
    moments: list[float] = []

    def note(handler: object, content: bytes) -> None:
        moments.append(time.monotonic())
        no_ranges(handler, content)  # type: ignore[arg-type]

    server.files["/other.jsonl"] = LINES
    server.behaviours["/other.jsonl"] = [note]
    started = time.monotonic()
    fetch(wanted(server), tmp_path / "x.jsonl.zst", web, {})
    # a second transfer, which begins while the first one is being held off, would have to wait as well
    web.pause(server.url + PATH, 0.2)
    fetch(
        Wanted(name="o.jsonl", url=f"{server.url}/other.jsonl", size=None, sha256=None),
        tmp_path / "o",
        web,
        {},
    )
    assert moments[0] - started >= 0.25 + 0.2


# tokens


def test_the_token_stays_with_the_server_it_is_for(
    tmp_path: Path, server: Server, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED", TOKEN)
    headers = authorization(server.url + PATH, "PLANTED")
    with http_server() as storage:
        storage.files[PATH] = CONTENT
        server.behaviours[PATH] = [redirect(f"{storage.url}{PATH}?X-Amz-Signature=signed")]
        fetch(wanted(server), tmp_path / "x.jsonl.zst", web, headers)
        assert server.asked(PATH)[0].headers["authorization"] == f"Bearer {TOKEN}"
        assert [request.headers.get("authorization") for request in storage.requests] == [None]


def test_a_token_is_needed_and_goes_encrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PLANTED", raising=False)
    with pytest.raises(HpcgenError, match=r"\$PLANTED is empty or not set; export PLANTED"):
        authorization("https://hub.example/x", "PLANTED")
    monkeypatch.setenv("PLANTED", TOKEN + "\n")
    assert authorization("https://hub.example/x", "PLANTED") == {"Authorization": f"Bearer {TOKEN}"}
    assert authorization("https://hub.example/x", None) == {}
    with pytest.raises(HpcgenError, match="without encryption") as plain:
        authorization("http://hub.example/x?sig=SECRET", "PLANTED")
    monkeypatch.setenv("PLANTED", TOKEN + "\r\nX-Evil: 1")
    with pytest.raises(HpcgenError, match="invalid in a token") as broken:
        authorization("https://hub.example/x", "PLANTED")
    assert "planted0secret" not in str(plain.value) + str(broken.value)
    assert "SECRET" not in str(plain.value)


@pytest.mark.parametrize(
    "target",
    [
        "http://[",
        "http://h:port/?sig=hf_x",
        "ftp://h/?sig=hf_x",
        "//h\x01/?sig=hf_x",
        "/corpus/part.jsonl.zst?sig=hf_x",
    ],
)
def test_no_message_shows_a_signature(
    target: str, tmp_path: Path, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither hpcgen's messages nor those of the web client, which quotes the address of a redirect."""
    caplog.set_level("INFO")
    signed = PATH + "?sig=hf_x"
    server.behaviours[PATH] = server.behaviours[signed] = [redirect(target), *[status(403)] * 9]
    with Web(QUICK) as web, pytest.raises(HpcgenError) as error:
        fetch(replace(wanted(server), url=server.url + signed), tmp_path / "x", web, {})
    assert "hf_x" not in f"{error.value} {error.value.__cause__} {caplog.text}"


def test_addresses_are_shown_without_what_they_keep_secret() -> None:
    assert http.redacted("https://me:pw@[store/a?sig=abc") == "[store/a"
    assert (
        http.redacted("https://me:pw@store.example/c/a.zst?sig=abc#x") == "https://store.example/c/a.zst?..."
    )


# the stage: records, kills, copies


def corpus_job(tmp_path: Path, server: Server, token_variable: str | None = None) -> CorpusJob:
    source = SourceConfig(url=UrlSource(template=f"{server.url}/x"), token_variable=token_variable)
    return CorpusJob(
        corpus=CorpusConfig(directory=str(tmp_path / "corpus"), source=source, download_connections=4),
        tokenizer=TokenizerConfig(kind="bytes"),
    )


def manifest_of(server: Server, files: dict[str, bytes], *, with_hash: bool = True) -> Manifest:
    server.files |= {f"/{name}": content for name, content in files.items()}
    listed = [
        ManifestFile(
            name=name,
            split="corpus",
            size=len(content),
            sha256=hashlib.sha256(content).hexdigest() if with_hash else None,
            url=f"{server.url}/{name}",
        )
        for name, content in files.items()
    ]
    return Manifest("test", listed)


@pytest.mark.process
def test_a_task_downloads_what_is_missing_and_records_it(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED", TOKEN)
    job = corpus_job(tmp_path, server, "PLANTED")
    files = {f"train/{number}.jsonl": LINES[: 1000 * number + 33] for number in range(9)}
    manifest = manifest_of(server, files)
    report = run_task("download", job, manifest)
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
    assert run_task("download", job, manifest).done_before == 9
    assert server.requests == []

    damaged = job.directory / "download" / "train/3.jsonl"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert run_task("download", job, manifest).errors == ()
    assert [request.path for request in server.requests] == ["/train/3.jsonl"]
    assert damaged.read_bytes() == files["train/3.jsonl"]


@pytest.mark.process
def test_one_file_that_is_gone_does_not_keep_the_others_back(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED", TOKEN)
    job = corpus_job(tmp_path, server, "PLANTED")
    manifest = manifest_of(server, {"a.jsonl": LINES, "b.jsonl": LINES, "c.jsonl": LINES})
    del server.files["/b.jsonl"]
    report = run_task("download", job, manifest)
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
def test_an_existing_file_with_the_right_hash_is_kept(tmp_path: Path, server: Server) -> None:
    job = corpus_job(tmp_path, server)
    manifest = manifest_of(server, {"a.jsonl": LINES, "b.jsonl": LINES})
    place = job.directory / "download"
    place.mkdir(parents=True)
    (place / "a.jsonl").write_bytes(LINES)
    (place / "b.jsonl").write_bytes(LINES[:-1] + b" ")
    assert run_task("download", job, manifest).errors == ()
    assert [request.path for request in server.requests] == ["/b.jsonl"]
    assert (place / "b.jsonl").read_bytes() == LINES


@pytest.mark.process
def test_only_web_addresses_are_fetched(tmp_path: Path, server: Server) -> None:
    job = corpus_job(tmp_path, server)
    manifest = Manifest("test", [ManifestFile(name="p.jsonl", split="corpus", url="file:///etc/passwd")])
    [error] = run_task("download", job, manifest).errors
    assert "has no http or https URL" in error
    assert names(job.directory / "download") == []


PROGRAM = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from hpcgen.data import part
    from hpcgen.data.download import Wanted, fetched
    from hpcgen.data.http import RetryPolicy, Web
    from hpcgen.files import host_tag, publish
    part.SYNC_INTERVAL = 50_000
    url, target, size = sys.argv[1:]
    wanted = Wanted(name="part.jsonl.zst", url=url, size=int(size), sha256=None)
    with fetched(wanted, Path(target), Web(RetryPolicy(read_timeout_s=30)), {}) as content:
        publish(content.file, Path(target))
    """
)


def start(server: Server, target: Path) -> subprocess.Popen[bytes]:
    arguments = [server.url + PATH, str(target), str(len(CONTENT))]
    return subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments])


def killed_after(num_bytes: int, server: Server, target: Path) -> int:
    """Kills a download that has noted so many bytes; how many it noted."""
    process, noted, deadline = start(server, target), 0, time.monotonic() + 30
    while noted < num_bytes and time.monotonic() < deadline:
        for path in target.parent.glob(".*.part.json"):
            noted = json.loads(path.read_bytes())["size"]
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert noted >= num_bytes
    return noted


@pytest.mark.process
def test_after_a_kill_the_download_continues_where_it_was(tmp_path: Path, server: Server, web: Web) -> None:
    server.behaviours[PATH] = [stall(200_000, 20), stall(0, 20)]
    server.etags[PATH] = '"stalled"'
    target = tmp_path / "part.jsonl.zst"
    kept = killed_after(150_000, server, target)
    assert len(names(tmp_path)) == 2
    assert not target.exists()
    # killed again, before anything new came: the beginning is kept once, not twice
    server.behaviours[PATH] = [stall(0, 20)]
    second = start(server, target)
    old = names(tmp_path)
    while len(server.asked(PATH)) < 2 or names(tmp_path) == old:
        assert second.poll() is None
        time.sleep(0.005)
    second.kill()
    second.wait()
    assert len(names(tmp_path)) == 2
    server.behaviours.clear()
    steps: list[int] = []
    fetch(wanted(server, sha256=None), target, web, {}, steps.append)
    assert server.requests[-1].headers["range"] == f"bytes={kept}-"
    assert target.read_bytes() == CONTENT
    assert sum(steps) == len(CONTENT)
    assert names(tmp_path) == ["part.jsonl.zst"]


@pytest.mark.process
def test_leftovers_of_other_content_are_discarded(tmp_path: Path, server: Server, web: Web) -> None:
    server.behaviours[PATH] = [stall(200_000, 20)]
    target = tmp_path / "part.jsonl.zst"
    kept = killed_after(150_000, server, target)
    server.files[PATH] = zstandard.compress(random.Random(9).randbytes(300_000))  # with another ETag
    server.behaviours.clear()
    fetch(wanted(server, size=None, sha256=None), target, web, {})
    assert server.requests[-1].headers["range"] == f"bytes={kept}-"
    assert target.read_bytes() == server.files[PATH]
    assert names(tmp_path) == ["part.jsonl.zst"]


@pytest.mark.process
def test_random_kills_and_copies_end_in_the_same_file(tmp_path: Path, server: Server) -> None:
    server.etags[PATH] = '"one"'
    target = tmp_path / "part.jsonl.zst"
    random_numbers = random.Random(11)
    for _ in range(2):
        server.behaviours[PATH] = [cut(random_numbers.randrange(10_000, 90_000)) for _ in range(3)]
        runs = [start(server, target) for _ in range(2)]
        time.sleep(random_numbers.uniform(0.15, 0.5))
        for run in runs:
            run.kill()
            run.wait()
        assert not target.exists() or target.read_bytes() == CONTENT
    server.behaviours.clear()
    runs = [start(server, target) for _ in range(3)]
    assert [run.wait() for run in runs] == [0] * 3
    assert target.read_bytes() == CONTENT
    assert [name for name in names(tmp_path) if not name.startswith(".")] == ["part.jsonl.zst"]


def become_another_process() -> None:
    """Clears the cache of folder scans, so that the next scan is that of a new process."""
    part._leftover_parts.cache_clear()


def test_two_processes_never_write_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where every lock seems free, as on a file system that keeps locks to each node."""
    monkeypatch.setattr("fcntl.flock", lambda file, operation: None)
    monkeypatch.setattr("socket.gethostname", lambda: "node-1")
    with part.partial_file(tmp_path / "x", "http://a") as first:
        first.write(b"first")
        first.save_state()
        monkeypatch.setattr("socket.gethostname", lambda: "node-2")
        become_another_process()
        with part.partial_file(tmp_path / "x", "http://a") as second:
            assert second.size == 5  # copied
            second.write(b" and second")
            first.write(b", still")
            publish(second.file, tmp_path / "x")
        assert (tmp_path / "x").read_bytes() == b"first and second"
        publish(first.file, tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == b"first, still"
    assert names(tmp_path) == ["x"]


def test_leftovers_of_killed_processes_are_removed(tmp_path: Path) -> None:
    host = host_tag()
    for name in ("x", "done", "waiting"):
        (tmp_path / f".{name}.{host}00000000.part").write_bytes(b"of this host")
        (tmp_path / f".{name}.{host}00000000.part.json").write_bytes(b"{}")
        (tmp_path / f".{name}.0123456700000000.part").write_bytes(b"of another host")
    (tmp_path / "done").write_bytes(b"by another process")
    with part.partial_file(tmp_path / "x", "http://a") as mine:
        mine.write(b"content")
        publish(mine.file, tmp_path / "x")
    of_another = [f".{name}.0123456700000000.part" for name in ("done", "waiting", "x")]
    to_go_on_with = [f".waiting.{host}00000000.part", f".waiting.{host}00000000.part.json"]
    assert names(tmp_path) == sorted([*of_another, *to_go_on_with, "done", "x"])
    for name in of_another:
        os.utime(tmp_path / name, (0, 0))  # not written to for a long time
    become_another_process()
    with part.partial_file(tmp_path / "x", "http://a"):
        pass
    assert names(tmp_path) == sorted([of_another[1], *to_go_on_with, "done", "x"])


def test_a_folder_is_scanned_once_for_any_number_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scandir, looks = os.scandir, list[object]()

    def counting(path: object) -> object:
        looks.append(path)
        return scandir(path)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "scandir", counting)
    for number in range(5):
        target = tmp_path / "flat" / f"{number}.jsonl"
        with contextlib.suppress(HpcgenError), part.partial_file(target, "http://a") as broken:
            broken.write(b"half")
            raise HpcgenError("the server breaks off")
        with part.partial_file(target, "http://a") as whole:
            assert whole.size == 4  # its own part is known without a look
            publish(whole.file, target)
    assert len(looks) == 1
    monkeypatch.undo()
    assert names(tmp_path / "flat") == [f"{number}.jsonl" for number in range(5)]


def test_a_part_whose_owner_starts_again_while_it_is_copied_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with part.partial_file(tmp_path / "x", "http://a") as owner:
        owner.write(b"old content")
        owner.save_state()
        reads = part._read_state

        def restarted_after_the_first_look(path: Path) -> object:
            note = reads(path)
            if owner.size == len(b"old content"):
                owner.restart()
            return note

        monkeypatch.setattr(part, "_read_state", restarted_after_the_first_look)
        become_another_process()
        with part.partial_file(tmp_path / "x", "http://a") as copy:
            assert copy.size == 0


@pytest.mark.process
def test_a_full_disk_publishes_nothing(tmp_path: Path, server: Server) -> None:
    program = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000,) * 2)\n" + PROGRAM
    environment = os.environ | {"PYTHONPATH": str(Path.cwd())}
    arguments = [server.url + PATH, str(tmp_path / "x.jsonl.zst"), str(len(CONTENT))]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "File too large" in done.stderr
    assert names(tmp_path) == []


def test_download_itself_says_what_could_not_be_written(tmp_path: Path, server: Server) -> None:
    job = corpus_job(tmp_path, server)
    job.directory.mkdir()
    (job.directory / "download").write_text("a file in the way")
    [unit] = units("download", job, manifest_of(server, {"a.jsonl": LINES}))
    with pytest.raises(HpcgenError, match=r"cannot write .*download/a\.jsonl: "):
        download(unit, job, Context(configuration="c"))


def test_progress_never_exceeds_the_total(tmp_path: Path, server: Server) -> None:
    job = corpus_job(tmp_path, server)
    manifest = manifest_of(server, {"a.jsonl": LINES})
    server.behaviours["/a.jsonl"] = [cut(100_000), no_ranges]
    [unit] = units("download", job, manifest)
    steps: list[Step] = []
    with Web(QUICK) as web:
        record = download(unit, job, Context(configuration="c", advance=steps.append), web)
    assert sum(step.bytes for step in steps) == len(LINES) == record.outputs[0].size
