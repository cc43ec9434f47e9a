"""URLs of files: which of them hpcgen can read, and how messages show them."""

from __future__ import annotations

import functools
from dataclasses import replace
from urllib.parse import urlsplit, urlunsplit

from hpcgen.config.corpus import SCHEMES
from hpcgen.errors import Problem
from hpcgen.text import one_of


def redacted(url: str) -> str:
    """`url` for messages: without a password, and without its query, which may contain a signature."""
    try:
        parts = urlsplit(url)
    except ValueError:  # not a URL, so the end of a password is unknown
        return url.partition("?")[0].rpartition("@")[2]
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", "")) + ("?..." if parts.query else "")


def url_problem(url: str, subject: str) -> Problem | None:
    """Why `url`, which the message calls `subject`, cannot be downloaded; None if it can."""
    if not url.isprintable() or " " in url or "\\" in url:
        found: Problem | None = Problem("", "contains a space or another character that is invalid in a URL")
    elif not url.startswith(("https://", "http://")) and not {"?", "#"}.isdisjoint(url):
        found = Problem("", "contains ? or #, which a name has as %3F or %23")
    else:
        found = _server_problem("/".join(url.split("/", 3)[:3]))
    return found and replace(found, subject=subject)


@functools.lru_cache(maxsize=256)
def _server_problem(address: str) -> Problem | None:
    """The problem of the part of a URL before its path, which thousands of files share."""
    try:
        parts = urlsplit(address)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        return Problem("", f"is not a valid URL ({error})")
    if parts.scheme not in SCHEMES or not (host or parts.scheme == "file"):
        return Problem("", f"does not start with {one_of([f'{scheme}://' for scheme in SCHEMES])}")
    if "@" in parts.netloc:
        return Problem("", "contains a password", "use data.corpus.source.token_variable")
    return None
