"""Numbered files of a web server as a source, and what a server says of one file."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import unquote, urlsplit

from hpcgen.config.corpus import UrlSource
from hpcgen.data.http import Gone, Patience, Web, authorization, content_total, shown
from hpcgen.data.listed_files import url_reason
from hpcgen.data.manifest import ManifestFile
from hpcgen.data.sources.listing import UNSPLIT, Listing
from hpcgen.errors import HpcgenError
from hpcgen.text import counted, few

_CONNECTIONS = 32
PATIENCE = Patience(
    attempts=4, longest_wait_s=10, longest_retry_after_s=60, connect_timeout_s=10, read_timeout_s=30
)
"""For questions that a person waits for."""
_NO_HEAD = (400, 403, 405, 501)
"""What servers answer that know GET alone."""


def list_urls(source: UrlSource, token_variable: str | None) -> Listing:
    """The numbered files, in the order of their numbers, with the sizes that the server tells.

    Raises:
        HpcgenError: some of them are gone, or the server refuses us or does not answer.
    """
    urls = [source.template.format(index=source.first + number) for number in range(source.count)]
    if reason := url_reason(urls[0]):
        raise HpcgenError(f"data.corpus.source.url.template = {shown(source.template)} {reason}")
    headers = authorization(urls[0], token_variable)
    sizes: list[int | None] = []
    gone: list[str] = []

    def ask(url: str) -> int | Gone | None:
        try:
            return _size(web, url, headers)
        except Gone as error:
            return error

    with Web(PATIENCE, _CONNECTIONS) as web, ThreadPoolExecutor(_CONNECTIONS) as threads:
        try:
            for url, answer in zip(urls, threads.map(ask, urls), strict=True):
                if isinstance(answer, Gone):
                    gone.append(shown(url))
                else:
                    sizes.append(answer)
        except HpcgenError:
            threads.shutdown(wait=False, cancel_futures=True)
            raise
    if gone:
        raise HpcgenError(
            f"data.corpus.source.url: {len(gone):,} of {counted(len(urls), 'file')} gone (HTTP 404): {few(gone)}",
            "mend template, first or count, or name another source",
        )
    files = [
        ManifestFile(name=_name(source.template, url), split=UNSPLIT, size=size, url=url)
        for url, size in zip(urls, sizes, strict=True)
    ]
    return Listing(f"{shown(source.template)} from {source.first} on", files)


def probe(urls: Iterable[str], token_variable: str | None, patience: Patience = PATIENCE) -> None:
    """Asks for the first byte of each file.

    Raises:
        HpcgenError: one is gone, refused, or its server does not answer.
    """
    with Web(patience) as web:
        for url in urls:
            _first_byte(web, url, authorization(url, token_variable))


def _size(web: Web, url: str, headers: dict[str, str]) -> int | None:
    """Bytes of the file at `url`; None where the server does not say."""

    def once() -> int | None:
        with web.answer("HEAD", url, headers, also=_NO_HEAD) as response:
            if response.status_code in _NO_HEAD:
                raise _HeadRefused
            return content_total(response)

    try:
        return web.patiently(url, once)
    except _HeadRefused:
        return _first_byte(web, url, headers)


def _first_byte(web: Web, url: str, headers: dict[str, str]) -> int | None:
    """Bytes of the whole file, told with its first one; None where the server does not say."""

    def once() -> int | None:
        # closed without reading the rest, when the server knows no ranges
        with web.answer("GET", url, {**headers, "Range": "bytes=0-0"}, also=(416,)) as response:
            return content_total(response)

    return web.patiently(url, once)


def _name(template: str, url: str) -> str:
    """The part of the address that numbers change: from the folder that holds the number on."""
    folder = template.partition("{index")[0].rpartition("/")[0]
    return unquote(urlsplit(url).path.removeprefix(urlsplit(folder).path).lstrip("/"))


class _HeadRefused(Exception):
    """The server does not take HEAD."""
