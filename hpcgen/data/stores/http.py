"""Web servers as a store. Only this module, hpcgen.data.http and http_headers deal with HTTP: ranges, validators,
encodings and statuses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hpcgen.config.corpus import WEB_SCHEMES
from hpcgen.data.http_headers import authorization, content_total, content_validator, range_start
from hpcgen.data.retries import RetryPolicy
from hpcgen.data.stores.base import Body, Listed, NotTheFile, StartOver, Stat, Store, Wanted
from hpcgen.data.urls import redacted
from hpcgen.errors import HpcgenError

if TYPE_CHECKING:
    import httpx2

    from hpcgen.data.http import Web

_NO_HEAD = (400, 403, 405, 501)
"""Statuses from servers that support only GET."""


class Http(Store):
    """Files on web servers, with a token for those that need one."""

    schemes = WEB_SCHEMES
    modules = dict.fromkeys(WEB_SCHEMES, "hpcgen.data.http")

    def __init__(
        self, policy: RetryPolicy, token_variable: str | None = None, web: Web | None = None
    ) -> None:
        from hpcgen.data.http import Web  # needs httpx2, which only an extra installs

        super().__init__(policy, token_variable)
        self._web = web or Web(policy)

    def close(self) -> None:
        """Closes the open connections."""
        self._web.close()

    def list(self, pattern: str) -> Iterator[Listed]:
        """Always refuses, because web servers do not list their files.

        Raises:
            HpcgenError: always.
        """
        raise HpcgenError(
            f"{redacted(pattern)}: a web server cannot list its files",
            "number them with {index}, or write a list (data.corpus.source.manifest)",
        )

    def stat(self, url: str) -> Stat:
        """Asks for the headers of a file, or for its first byte if the server does not support that."""
        headers = self._headers(url)
        with self._web.request("HEAD", url, headers, also=_NO_HEAD) as response:
            if response.status_code not in _NO_HEAD:
                return _stat(response)
        # If the server does not support ranges, the connection is closed without reading the rest.
        with self._web.request("GET", url, {**headers, "Range": "bytes=0-0"}, also=(416,)) as response:
            return _stat(response)

    @contextmanager
    def read(self, file: Wanted, start: int, version: str | None) -> Iterator[Body]:
        """Requests a file, or its rest from `start` on."""
        headers = self._headers(file.url)
        if start:
            headers["Range"] = f"bytes={start}-"
            if version:
                headers["If-Range"] = version
        with self._web.request("GET", file.url, headers, also=(416,)) as response:
            total = content_total(response)
            if response.status_code == 416:  # there is nothing after `start`
                if total != start:
                    raise StartOver("the server has fewer bytes than were already downloaded")
                yield Body(blocks=(), start=start, total=total, version=version)
                return
            first = range_start(response)
            yield Body(
                blocks=_blocks(response, file),
                start=None if response.status_code != 206 else -1 if first is None else first,
                total=total,
                version=content_validator(response),
                content_type=response.headers.get("Content-Type", ""),
            )

    def _headers(self, url: str) -> dict[str, str]:
        return authorization(url, self.token_variable)


def _stat(response: httpx2.Response) -> Stat:
    """Size of the file. The version is left out: it may differ between the servers of one address."""
    return Stat(size=content_total(response))


def _blocks(response: httpx2.Response, file: Wanted) -> Iterator[bytes]:
    """Yields the body of a response, unless it is encoded or its completeness could not be checked."""
    headers = response.headers
    encoding = headers.get("Content-Encoding", "identity")
    # Some servers declare gzip for every .gz file.
    if encoding != "identity" and not ("gzip" in encoding and file.name.endswith(".gz")):
        raise NotTheFile(
            f"the server sends the file with Content-Encoding: {encoding}, although the request forbids it",
            "correct the server, or download the files by other means and use their directory as the source",
        )
    ends = "Content-Length" in headers or "Transfer-Encoding" in headers or response.status_code == 206
    if not ends and file.size is None and file.sha256 is None:
        raise HpcgenError(
            f"{redacted(file.url)}: neither the server nor the manifest states its size, so a truncated file "
            "would go unnoticed",
            "list the files with their size or sha256 (data.corpus.source.manifest)",
        )
    yield from response.iter_raw()
