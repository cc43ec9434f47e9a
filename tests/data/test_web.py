"""Requests to web servers: waits between tries, tokens, and addresses in messages."""

from __future__ import annotations

import time
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path

import pytest

from hpcgen.data.http import Web
from hpcgen.data.http_headers import authorization, retry_after_s
from hpcgen.data.retries import RetryPolicy
from hpcgen.data.stores.base import Wanted
from hpcgen.data.urls import redacted
from hpcgen.errors import HpcgenError
from tests.data.downloads import CONTENT, LINES, PATH, QUICK, TOKEN, fetch, wanted
from tests.http_server import Server, http_server, no_ranges, redirect, status

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
    fetch(wanted(server), tmp_path / "x.jsonl.zst", web)
    # a second transfer, which begins while the first one is being held off, would have to wait as well
    web.pause(server.url + PATH, 0.2)
    fetch(
        Wanted(name="o.jsonl", url=f"{server.url}/other.jsonl", size=None, sha256=None),
        tmp_path / "o",
        web,
    )
    assert moments[0] - started >= 0.25 + 0.2


# tokens


def test_the_token_stays_with_the_server_it_is_for(
    tmp_path: Path, server: Server, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED", TOKEN)
    with http_server() as storage:
        storage.files[PATH] = CONTENT
        server.behaviours[PATH] = [redirect(f"{storage.url}{PATH}?X-Amz-Signature=signed")]
        fetch(wanted(server), tmp_path / "x.jsonl.zst", web, token_variable="PLANTED")
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
        fetch(replace(wanted(server), url=server.url + signed), tmp_path / "x", web)
    assert "hf_x" not in f"{error.value} {error.value.__cause__} {caplog.text}"


def test_addresses_are_shown_without_what_they_keep_secret() -> None:
    assert redacted("https://me:pw@[store/a?sig=abc") == "[store/a"
    assert redacted("https://me:pw@store.example/c/a.zst?sig=abc#x") == "https://store.example/c/a.zst?..."
