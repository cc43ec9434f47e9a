"""A web server on this machine that misbehaves on request, and a hub that answers like Hugging Face's."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

Behaviour = Callable[["Handler", bytes], None]
"""Answers one request for a file with this content."""


@dataclass(frozen=True)
class Request:
    """A request of a client."""

    method: str
    path: str
    """With the query."""
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes = b""


@dataclass
class Server:
    """The server's files and behavior. Tests change them while it runs."""

    files: dict[str, bytes] = field(default_factory=dict)
    """Path without a query -> content."""
    behaviours: dict[str, list[Behaviour]] = field(default_factory=dict)
    """Path -> how its next answers go, one for each request; then, and without any, `usually`."""
    usually: Behaviour | None = None
    """None means `serve`."""
    requests: list[Request] = field(default_factory=list)
    etags: dict[str, str | None] = field(default_factory=dict)
    """Path -> ETag, where it is not the hash of the content; None for no ETag."""
    url: str = ""

    def asked(self, path: str) -> list[Request]:
        """The requests for one path, in order."""
        return [request for request in self.requests if urlsplit(request.path).path == path]

    def etag(self, path: str) -> str | None:
        default = f'"{hashlib.sha256(self.files[path]).hexdigest()[:16]}"'
        return self.etags.get(path, default)


@contextlib.contextmanager
def http_server() -> Iterator[Server]:
    """A server for the time of a test."""
    state = Server()
    web = _WebServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"state": state}))
    state.url = f"http://127.0.0.1:{web.server_port}"
    thread = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        web.shutdown()
        web.server_close()


class _WebServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that disconnect, as tests require, are not an error; anything else is."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    state: Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = self.rfile.read(int(headers.get("content-length", 0)))
        self.state.requests.append(Request(self.command, self.path, headers, body))
        planned = self.state.behaviours.get(path)
        behaviour = planned.pop(0) if planned else self.state.usually or serve
        with contextlib.suppress(ConnectionError):
            behaviour(self, self.state.files.get(path, b""))

    do_HEAD = do_POST = do_GET  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: tests look at `requests`."""

    @property
    def file(self) -> str:
        return unquote(urlsplit(self.path).path)

    def answer(self, status: int, headers: Mapping[str, str], body: bytes = b"") -> None:
        """Sends an answer whose length is that of `body`, unless `headers` say otherwise."""
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | dict(headers)).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
            self.wfile.flush()

    def drop(self) -> None:
        """Ends the connection."""
        self.close_connection = True


def serve(handler: Handler, content: bytes) -> None:
    """As a good server does: ranges, If-Range, ETag, 404 and 416."""
    if handler.file not in handler.state.files:
        handler.answer(404, {}, b"no such file")
        return
    etag = handler.state.etag(handler.file)
    headers = {"Accept-Ranges": "bytes"} | ({"ETag": etag} if etag else {})
    wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", handler.headers.get("Range", ""))
    if wanted is None or handler.headers.get("If-Range", etag) != etag:
        handler.answer(200, headers, content)
        return
    first = int(wanted[1])
    end = min(int(wanted[2]) + 1 if wanted[2] else len(content), len(content))
    if first >= len(content):
        handler.answer(416, {"Content-Range": f"bytes */{len(content)}"})
        return
    headers["Content-Range"] = f"bytes {first}-{end - 1}/{len(content)}"
    handler.answer(206, headers, content[first:end])


def status(code: int, headers: Mapping[str, str] | None = None) -> Behaviour:
    """An answer without the file."""
    return lambda handler, content: handler.answer(code, headers or {}, b"busy")


def redirect(url: str) -> Behaviour:
    """To another address."""
    return lambda handler, content: handler.answer(302, {"Location": url})


def cut(after: int) -> Behaviour:
    """The body ends after this many bytes from the requested start, although its length says more."""
    return stall(after, 0)


def stall(after: int, seconds: float) -> Behaviour:
    """The body stops after so many bytes from where it was asked for; the connection stays open for a while."""

    def behaviour(handler: Handler, content: bytes) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range", ""))
        first = int(wanted[1]) if wanted else 0
        etag = handler.state.etag(handler.file)
        headers = {"Content-Length": str(len(content) - first)} | ({"ETag": etag} if etag else {})
        if wanted:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        handler.answer(206 if wanted else 200, headers, content[first : first + after])
        time.sleep(seconds)
        handler.drop()

    return behaviour


def trickle(pause_s: float) -> Behaviour:
    """A byte now and then."""

    def behaviour(handler: Handler, content: bytes) -> None:
        handler.answer(200, {"Content-Length": str(len(content))})
        for byte in content:
            handler.wfile.write(bytes([byte]))
            time.sleep(pause_s)

    return behaviour


def no_ranges(handler: Handler, content: bytes) -> None:
    """The complete file, whatever range was requested, and no ETag."""
    handler.answer(200, {}, content)


def wrong_range(handler: Handler, content: bytes) -> None:
    """Another range than was asked for."""
    handler.answer(206, {"Content-Range": f"bytes 1-{len(content) - 1}/{len(content)}"}, content[1:])


def short_range(length: int, *, names_total: bool, sends: bool = True) -> Behaviour:
    """At most `length` bytes from where it was asked for, as a server may choose (RFC 9110, 15.3.7)."""

    def behaviour(handler: Handler, content: bytes) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range", ""))
        if wanted is None or int(wanted[1]) >= len(content):
            serve(handler, content)
            return
        first, etag = int(wanted[1]), handler.state.etag(handler.file)
        body = content[first : first + length]
        total = len(content) if names_total else "*"
        headers = {"Content-Range": f"bytes {first}-{first + len(body) - 1}/{total}"}
        handler.answer(206, headers | ({"ETag": etag} if etag else {}), body if sends else b"")

    return behaviour


def short_chunks(length: int, *, ends: bool) -> Behaviour:
    """The first `length` bytes in chunks; with `ends`, as if that were all, as a proxy does that loses its server."""

    def behaviour(handler: Handler, content: bytes) -> None:
        etag = handler.state.etag(handler.file)
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        if etag:
            handler.send_header("ETag", etag)
        handler.end_headers()
        handler.wfile.write(b"%x\r\n%s\r\n" % (length, content[:length]) + (b"0\r\n\r\n" if ends else b""))
        handler.drop()

    return behaviour


def other_length(length: int) -> Behaviour:
    """The first `length` bytes, as if that were all of the same content."""

    def behaviour(handler: Handler, content: bytes) -> None:
        etag = handler.state.etag(handler.file)
        handler.answer(200, {"ETag": etag} if etag else {}, content[:length])

    return behaviour


def endless(handler: Handler, content: bytes) -> None:
    """A body in chunks that continues until the client has enough."""
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    block = b'{"text": "and on"}\n' * 4096
    while True:
        handler.wfile.write(b"%x\r\n%s\r\n" % (len(block), block))


def without_length(handler: Handler, content: bytes) -> None:
    """A body that ends with the connection."""
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(content)
    handler.drop()


def chunked(handler: Handler, content: bytes) -> None:
    """A body in chunks, which ends without a stated length."""
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    handler.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(content), content))


def web_page(handler: Handler, content: bytes) -> None:
    """A login page with status 200."""
    handler.answer(
        200, {"Content-Type": "text/html; charset=utf-8"}, b"<!DOCTYPE html><html>Sign in</html>" * 9
    )


@dataclass
class Hub:
    """Dataset repositories behind the interface that huggingface_hub talks to."""

    server: Server
    files: dict[str, bytes] = field(default_factory=dict)
    """Files of owner/corpus at the commit COMMIT."""
    refusal: tuple[int, str] | None = None
    """Status and X-Error-Code of every answer of the interface."""
    page_size: int = 1000
    token: str | None = None
    """Token that requests must carry, unless it is None."""
    entries: list[dict[str, Any]] = field(default_factory=list)
    """The listing, made from `files` at the first request."""


COMMIT = "2d0accdd58c5c5a2b5c2b5a2c5d8e7f6a1b2c3d4"
REPOSITORY = "owner/corpus"


@contextlib.contextmanager
def fake_hub(server: Server, storage: Server | None = None) -> Iterator[Hub]:
    """A hub on `server`; with `storage`, files come from there by a redirect, as from a content network."""
    hub = Hub(server)

    server.usually = lambda handler, content: _hub_answer(hub, handler, storage)
    yield hub


def _hub_answer(hub: Hub, handler: Handler, storage: Server | None) -> None:
    parts = urlsplit(handler.path)
    path, query = unquote(parts.path), parse_qs(parts.query)
    if hub.refusal is not None and path.startswith("/api/"):
        code, error = hub.refusal
        handler.answer(code, {"X-Error-Code": error, "X-Error-Message": error} if error else {})
    elif hub.token is not None and handler.headers.get("Authorization") != f"Bearer {hub.token}":
        handler.answer(401, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"})
    elif re.fullmatch(rf"/api/datasets/{REPOSITORY}/revision/(main|v1|{COMMIT})", path):
        _json(handler, {"id": REPOSITORY, "sha": COMMIT, "siblings": []})
    elif path.startswith(f"/api/datasets/{REPOSITORY}/revision/"):
        handler.answer(404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
    elif path == f"/api/datasets/{REPOSITORY}/tree/{COMMIT}":
        _tree(hub, handler, path, int(query.get("cursor", ["0"])[0]))
    elif match := re.fullmatch(rf"/datasets/{REPOSITORY}/resolve/{COMMIT}/(.+)", path):
        if storage is not None:
            handler.answer(302, {"Location": f"{storage.url}/{match[1]}?X-Amz-Signature=signed"})
        else:
            hub.server.files[path] = hub.files[match[1]]
            serve(handler, hub.files[match[1]])
    else:
        handler.answer(404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})


def _tree(hub: Hub, handler: Handler, path: str, first: int) -> None:
    """A page of the listing, folders included, and where the next page is."""
    if not hub.entries:
        hub.entries = _entries(hub.files)
    page = hub.entries[first : first + hub.page_size]
    rest = first + hub.page_size < len(hub.entries)
    link = f'<{hub.server.url}{path}?recursive=true&cursor={first + hub.page_size}>; rel="next"'
    _json(handler, page, {"Link": link} if rest else {})


def _entries(files: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """Folders, then files; the hub promises no order."""
    folders = sorted({"/".join(name.split("/")[:-1]) for name in files} - {""})
    entries: list[dict[str, Any]] = [
        {"type": "directory", "path": folder, "oid": "0" * 40, "size": 0} for folder in folders
    ]
    for name, content in files.items():
        entry: dict[str, Any] = {"type": "file", "path": name, "oid": "1" * 40, "size": len(content)}
        if name.endswith((".zst", ".jsonl")):
            oid = hashlib.sha256(content).hexdigest()
            entry["lfs"] = {"oid": oid, "size": len(content), "pointerSize": 134}
        entries.append(entry)
    return entries


def _json(handler: Handler, document: Any, headers: Mapping[str, str] | None = None) -> None:
    handler.answer(
        200, {"Content-Type": "application/json"} | dict(headers or {}), json.dumps(document).encode()
    )
