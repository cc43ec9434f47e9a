"""Numbered files on a web server as a source, and availability checks of single files."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import unquote, urlsplit

from hpcgen.config.corpus import UrlSource
from hpcgen.data.http import FileNotOnServer, RetryPolicy, Web, authorization, content_total, redacted
from hpcgen.data.listed_files import ManifestFile, url_reason
from hpcgen.data.sources.listing import UNSPLIT, Listing
from hpcgen.errors import HpcgenError
from hpcgen.text import counted, few

_CONNECTIONS = 32
INTERACTIVE = RetryPolicy(
    attempts=4, longest_wait_s=10, longest_retry_after_s=60, connect_timeout_s=10, read_timeout_s=30
)
"""Retry policy for requests while the user waits."""
_NO_HEAD = (400, 403, 405, 501)
"""Statuses from servers that support only GET."""


def list_urls(source: UrlSource, token_variable: str | None) -> Listing:
    """Lists the numbered files in order, with the sizes that the server states.

    Raises:
        HpcgenError: some files are missing, or the server denies access or does not answer.
    """
    urls = [source.template.format(index=source.first + number) for number in range(source.count)]
    if reason := url_reason(urls[0]):
        raise HpcgenError(f"data.corpus.source.url.template = {redacted(source.template)} {reason}")
    headers = authorization(urls[0], token_variable)
    sizes: list[int | None] = []
    missing: list[str] = []

    def ask(url: str) -> int | FileNotOnServer | None:
        try:
            return _size(web, url, headers)
        except FileNotOnServer as error:
            return error

    with Web(INTERACTIVE, _CONNECTIONS) as web, ThreadPoolExecutor(_CONNECTIONS) as threads:
        try:
            for url, answer in zip(urls, threads.map(ask, urls), strict=True):
                if isinstance(answer, FileNotOnServer):
                    missing.append(redacted(url))
                else:
                    sizes.append(answer)
        except HpcgenError:
            threads.shutdown(wait=False, cancel_futures=True)
            raise
    if missing:
        raise HpcgenError(
            f"data.corpus.source.url: {len(missing):,} of {counted(len(urls), 'file')} not on the server "
            f"(HTTP 404): {few(missing)}",
            "correct template, first or count, or use another source",
        )
    files = [
        ManifestFile(name=_name(source.template, url), split=UNSPLIT, size=size, url=url)
        for url, size in zip(urls, sizes, strict=True)
    ]
    return Listing(f"{redacted(source.template)} from {source.first} on", files)


def probe(urls: Iterable[str], token_variable: str | None, policy: RetryPolicy = INTERACTIVE) -> None:
    """Requests the first byte of each file.

    Raises:
        HpcgenError: a file is missing, access is denied, or its server does not answer.
    """
    with Web(policy) as web:
        for url in urls:
            _first_byte(web, url, authorization(url, token_variable))


def _size(web: Web, url: str, headers: dict[str, str]) -> int | None:
    """Size of the file at `url` in bytes; None if the server does not state it."""

    def once() -> int | None:
        with web.request("HEAD", url, headers, also=_NO_HEAD) as response:
            if response.status_code in _NO_HEAD:
                raise _HeadRefused
            return content_total(response)

    try:
        return web.retry(url, once)
    except _HeadRefused:
        return _first_byte(web, url, headers)


def _first_byte(web: Web, url: str, headers: dict[str, str]) -> int | None:
    """Size of the file in bytes, from a request for its first byte; None if the server does not state it."""

    def once() -> int | None:
        # If the server does not support ranges, the connection is closed without reading the rest.
        with web.request("GET", url, {**headers, "Range": "bytes=0-0"}, also=(416,)) as response:
            return content_total(response)

    return web.retry(url, once)


def _name(template: str, url: str) -> str:
    """Returns the variable part of the URL: everything after the last slash before the first number."""
    folder = template.partition("{index")[0].rpartition("/")[0]
    return unquote(urlsplit(url).path.removeprefix(urlsplit(folder).path).lstrip("/"))


class _HeadRefused(Exception):
    """The server does not support HEAD."""
