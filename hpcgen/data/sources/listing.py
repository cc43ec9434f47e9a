"""What a source holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from hpcgen.config.corpus import WHOLE
from hpcgen.data.manifest import ManifestFile

UNSPLIT = WHOLE
"""The split of files before `hpcgen.data.selection` says which they belong to."""


@dataclass(frozen=True)
class Listing:
    """The files of a source, in order."""

    source: str
    """Where they come from, for people."""
    files: Sequence[ManifestFile]


def url_reason(url: str) -> str | None:
    """Why a file cannot be fetched from `url`, in words that follow it; None when it can."""
    if not url.isprintable() or " " in url or "\\" in url:
        return "holds a space or another character that no address has"
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        return f"is no address ({error})"
    if parts.scheme not in ("https", "http") or not host:
        return "does not begin with https:// or http://"
    if "@" in parts.netloc:
        return "holds a password; use data.corpus.source.token_variable"
    return None
