"""URLs of files: which of them hpcgen can read, and how messages show them."""

from __future__ import annotations

import functools
from urllib.parse import urlsplit, urlunsplit

from hpcgen.config.corpus import SCHEMES
from hpcgen.text import one_of


def redacted(url: str) -> str:
    """`url` for messages: without a password, and without its query, which may contain a signature."""
    try:
        parts = urlsplit(url)
    except ValueError:  # not a URL, so the end of a password is unknown
        return url.partition("?")[0].rpartition("@")[2]
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", "")) + ("?..." if parts.query else "")


def url_reason(url: str) -> str | None:
    """Reason why `url` cannot be downloaded, worded to follow the URL; None if it can."""
    if not url.isprintable() or " " in url or "\\" in url:
        return "contains a space or another character that is invalid in a URL"
    if not url.startswith(("https://", "http://")) and not {"?", "#"}.isdisjoint(url):
        return "contains ? or #, which a name has as %3F or %23"
    return _server_reason("/".join(url.split("/", 3)[:3]))


@functools.lru_cache(maxsize=256)
def _server_reason(address: str) -> str | None:
    """`url_reason` for the part of a URL before its path, which thousands of files share."""
    try:
        parts = urlsplit(address)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        return f"is not a valid URL ({error})"
    if parts.scheme not in SCHEMES or not (host or parts.scheme == "file"):
        return f"does not start with {one_of([f'{scheme}://' for scheme in SCHEMES])}"
    if "@" in parts.netloc:
        return "contains a password; use data.corpus.source.token_variable"
    return None
