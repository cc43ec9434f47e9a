"""Download of a file from a web server that misbehaves: the complete file arrives, or an error says why."""

from __future__ import annotations

import contextlib
import gzip
import os
import random
import time
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path

import pytest
import zstandard

from hpcgen.data.first_bytes import unexpected_content
from hpcgen.data.http import Web
from hpcgen.data.stores.base import Wanted
from hpcgen.errors import HpcgenError
from tests.data.downloads import (
    CONTENT,
    LINES,
    PATH,
    QUICK,
    SHA256,
    become_another_process,
    fetch,
    names,
    wanted,
)
from tests.http_server import (
    Behaviour,
    Handler,
    Server,
    chunked,
    cut,
    endless,
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

IMPATIENT = replace(QUICK, attempts=100, read_timeout_s=0.3)
"""The server shares a busy machine with the client, so other connections stall too."""


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
    content = fetch(what, target, web, steps.append)
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
        fetch(wanted(server), tmp_path / "x.jsonl.zst", web)
    assert (tmp_path / "x.jsonl.zst").read_bytes() == CONTENT
    assert len(server.asked(PATH)) >= 2


def test_existing_files_are_not_fetched_again(tmp_path: Path, server: Server, web: Web) -> None:
    server.behaviours[PATH] = [cut(100_000), cut(100_000)]
    fetch(wanted(server), tmp_path / "x.jsonl.zst", web)
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
    fetch(wanted(server, size=None, sha256=None), tmp_path / "x.jsonl.zst", web)
    assert (tmp_path / "x.jsonl.zst").read_bytes() == new
    assert server.asked(PATH)[1].headers["range"] == "bytes=100000-"


def test_without_a_validator_and_a_hash_it_starts_again(tmp_path: Path, server: Server, web: Web) -> None:
    server.etags[PATH] = None
    server.behaviours[PATH] = [cut(100_000)]
    fetch(wanted(server, sha256=None), tmp_path / "x.jsonl.zst", web)
    assert [request.headers.get("range") for request in server.asked(PATH)] == [None, None]


def test_a_weak_etag_does_not_resume(tmp_path: Path, server: Server, web: Web) -> None:
    server.etags[PATH] = 'W/"weak"'
    server.behaviours[PATH] = [cut(100_000)]
    fetch(wanted(server, sha256=None), tmp_path / "x.jsonl.zst", web)
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
        fetch(wanted(server), tmp_path / "x.jsonl.zst", web)
    assert names(tmp_path) == []


def test_a_refused_request_is_not_repeated(tmp_path: Path, server: Server, web: Web) -> None:
    server.files.clear()
    with pytest.raises(HpcgenError, match="does not have this file"):
        fetch(wanted(server), tmp_path / "x.jsonl.zst", web)
    assert len(server.asked(PATH)) == 1


def test_another_size_than_the_manifest_says(tmp_path: Path, server: Server, web: Web) -> None:
    with pytest.raises(
        HpcgenError, match=r"the file has changed: it has 300,\d+ bytes, but the manifest has 5; run hpcgen"
    ):
        fetch(wanted(server, size=5), tmp_path / "x.jsonl.zst", web)
    server.behaviours[PATH] = [without_length] * 3
    with pytest.raises(HpcgenError, match=r"more than the 5 bytes of the manifest"):
        fetch(wanted(server, size=5), tmp_path / "x.jsonl.zst", web)
    server.behaviours[PATH] = [without_length] * 4
    with pytest.raises(
        HpcgenError, match=r"the body ended after 300,\d+ of 999,999 bytes \(after 4 attempts"
    ):
        fetch(wanted(server, size=999_999), tmp_path / "x.jsonl.zst", web)


def test_another_hash_than_the_manifest_says_is_tried_again(tmp_path: Path, server: Server, web: Web) -> None:
    damaged = CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])
    server.behaviours[PATH] = [lambda handler, content: handler.answer(200, {}, damaged)]
    fetch(wanted(server), tmp_path / "x.jsonl.zst", web)
    assert (tmp_path / "x.jsonl.zst").read_bytes() == CONTENT
    server.files[PATH] = damaged
    server.requests.clear()
    with pytest.raises(HpcgenError, match=rf"damaged or has changed: .* but the manifest has {SHA256}"):
        fetch(wanted(server), tmp_path / "y.jsonl.zst", web)
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
    fetch(what, tmp_path / "x.jsonl.zst", web)
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
            fetch(what, target, once)
        become_another_process()
        answers = answers[1:]
    server.behaviours["/a.jsonl"] = answers
    fetch(what, target, web)
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
        fetch(what, tmp_path / "a.jsonl", web)
    assert not (tmp_path / "a.jsonl").exists() or (tmp_path / "a.jsonl").read_bytes() == LINES


def test_content_that_became_shorter_is_taken_when_two_answers_agree(
    tmp_path: Path, server: Server, web: Web
) -> None:
    server.files["/a.jsonl"] = LINES
    server.etags["/a.jsonl"] = None
    server.behaviours["/a.jsonl"] = [cut(at_line(1000)), *[other_length(at_line(3000))] * 2]
    what = Wanted(name="a.jsonl", url=f"{server.url}/a.jsonl", size=None, sha256=None)
    fetch(what, tmp_path / "a.jsonl", web)
    assert (tmp_path / "a.jsonl").read_bytes() == LINES[: at_line(3000)]


def test_a_body_without_an_end_leaves_room_on_the_disk(
    tmp_path: Path, server: Server, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulates a disk of 4 MB, of which the body may take half."""
    monkeypatch.setattr("hpcgen.data.transfer._SPACE_CHECK_BYTES", 1 << 16)
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
        fetch(what, tmp_path / "a.jsonl", web)
    assert most < 3_500_000
    assert names(tmp_path) == []
    server.behaviours["/a.jsonl"] = [
        lambda handler, content: handler.answer(200, {"Content-Length": "5000000000000"}, LINES)
    ]
    with pytest.raises(
        HpcgenError, match=r"the file has 5\.0 TB, but the file system of .* has 4\.0 MB left"
    ):
        fetch(what, tmp_path / "a.jsonl", web)
    assert names(tmp_path) == []


def test_one_byte_at_a_time_is_not_progress(tmp_path: Path, server: Server, web: Web) -> None:
    server.behaviours[PATH] = [cut(1)] * 20
    with pytest.raises(HpcgenError, match=r"the connection broke .*after 4 attempts"):
        fetch(wanted(server), tmp_path / "x.jsonl.zst", web)


def test_a_body_of_unknown_length_is_refused(tmp_path: Path, server: Server, web: Web) -> None:
    server.behaviours[PATH] = [without_length, without_length]
    fetch(wanted(server, size=None), tmp_path / "x.jsonl.zst", web)  # the hash tells
    with pytest.raises(HpcgenError, match="neither the server nor the manifest states its size"):
        fetch(wanted(server, size=None, sha256=None), tmp_path / "y.jsonl.zst", web)
    assert names(tmp_path) == ["x.jsonl.zst"]


def test_a_body_that_is_encoded_all_the_same_is_refused(tmp_path: Path, server: Server, web: Web) -> None:
    encoded = [lambda handler, content: handler.answer(200, {"Content-Encoding": "br"}, content)]
    server.behaviours[PATH] = encoded * 3
    with pytest.raises(HpcgenError, match=r"sends the file with Content-Encoding: br, although"):
        fetch(wanted(server), tmp_path / "x.jsonl.zst", web)


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
    fetch(wanted(server, sha256=None), tmp_path / "x.jsonl.zst", web)
    assert server.asked(PATH)[1].headers.get("if-range") == (headers["Last-Modified"] if is_used else None)
    assert (tmp_path / "x.jsonl.zst").read_bytes() == CONTENT


def test_progress_resets_the_count_of_tries(tmp_path: Path, server: Server, web: Web) -> None:
    server.behaviours[PATH] = [cut(20_000)] * 12  # three times as many as the attempts in a row
    fetch(wanted(server), tmp_path / "x.jsonl.zst", web)
    assert len(server.asked(PATH)) == 13


def test_a_server_that_always_breaks_at_the_same_place_is_given_up(
    tmp_path: Path, server: Server, web: Web
) -> None:
    server.etags[PATH] = None
    server.behaviours[PATH] = [cut(20_000)] * 9
    with pytest.raises(HpcgenError, match="the connection broke"):
        fetch(wanted(server, sha256=None), tmp_path / "x.jsonl.zst", web)
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
    fetch(what, tmp_path / "a.jsonl", web)
    with pytest.raises(HpcgenError, match="is a web page"):
        fetch(what, tmp_path / "b.jsonl", web)
    assert names(tmp_path) == ["a.jsonl"]
