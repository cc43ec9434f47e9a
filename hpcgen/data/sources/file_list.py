"""A list of files as a source: one JSON object per line, written by a user or by hpcgen itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

from hpcgen.data.listed_files import UNSPLIT, Listing, ManifestFile
from hpcgen.data.urls import redacted, url_problem
from hpcgen.errors import ConfigErrors, FilePlace, HpcgenError, Problem
from hpcgen.text import counted, few
from trainer.contract.files.regular_file import read_bytes

_KEYS = "name, url or path, size, sha256"
_MAX_MESSAGES = 20


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """One file. `split` and `modified_ns`, which hpcgen's own manifests have, are ignored and recomputed."""

    name: str | None = None
    url: str | None = None
    path: str | None = None
    size: int | None = None
    sha256: str | None = None
    split: str | None = None
    modified_ns: int | None = None
    version: str | None = None


def read_file_list(path: Path, *, has_token: bool = False) -> Listing:
    """Reads the files of a list, in order. Paths are relative to the list's directory.

    With a token, all URLs must be on one server, because the token is sent with each request.

    Raises:
        ConfigErrors: lines are invalid (all of them are listed).
        HpcgenError: the list is unreadable or empty, or the token would go to several servers.
    """
    try:
        lines = read_bytes(path).splitlines()
    except OSError as error:
        raise HpcgenError(f"cannot read data.corpus.source.manifest = {path}: {error.strerror}") from error
    files, mistakes = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip() or (number == 1 and _is_header(line)):
            continue
        try:
            files.append(_file(msgspec.json.decode(line, type=_Line), path.parent))
        except (HpcgenError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            known = f" (valid keys: {_KEYS})" if isinstance(error, msgspec.ValidationError) else ""
            mistakes.append(Problem("", f"{error}{known}", where=FilePlace(path, number)))
    if mistakes:
        rest = len(mistakes) - _MAX_MESSAGES
        more = [Problem("", counted(rest, "more invalid line"), where=str(path))] if rest > 0 else []
        raise ConfigErrors(mistakes[:_MAX_MESSAGES] + more)
    if not files:
        raise HpcgenError(
            "the list is empty", f"write one JSON object per line with the keys {_KEYS}", where=path
        )
    servers = list(dict.fromkeys(_servers(files)))
    if has_token and len(servers) > 1:
        raise HpcgenError(
            f"the URLs are on {len(servers)} servers ({few(servers)}), and each would get the token of "
            "data.corpus.source.token_variable",
            "use one list per server",
            where=path,
        )
    return Listing(f"list {path}" + (f" of files at {few(servers)}" if servers else ""), files)


def _is_header(line: bytes) -> bool:
    """Returns whether `line` is the first line of an hpcgen manifest."""
    try:
        document: Any = msgspec.json.decode(line)
    except msgspec.MsgspecError:
        return False
    return isinstance(document, dict) and "hpcgen_manifest" in document


def _servers(files: list[ManifestFile]) -> Iterator[str]:
    for file in files:
        if file.url is not None:
            yield urlsplit(file.url).netloc


def _file(line: _Line, folder: Path) -> ManifestFile:
    if (line.url is None) == (line.path is None):
        raise HpcgenError(
            "both url and path are set" if line.url else "neither url nor path is set",
            "set exactly one of them",
        )
    sha256 = line.sha256 and line.sha256.lower()
    if sha256 is not None and not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise HpcgenError(f"sha256 = {line.sha256!r} is not a SHA-256", "write 64 hexadecimal digits")
    if line.size is not None and line.size < 0:
        raise HpcgenError(f"size = {line.size} is negative")
    if line.url is not None:
        if problem := url_problem(line.url, f"url = {redacted(line.url)!r}"):
            raise HpcgenError(problem)
        name = line.name or unquote(urlsplit(line.url).path).rpartition("/")[2]
        return ManifestFile(
            name=name, split=UNSPLIT, size=line.size, sha256=sha256, url=line.url, version=line.version
        )
    assert line.path is not None
    path = folder / line.path
    name = line.name or (path.name if Path(line.path).is_absolute() else line.path)
    status = _status(path)
    if line.size not in (None, status.st_size):
        raise HpcgenError(
            f"size = {line.size:,} does not match {path}, which has {status.st_size:,} bytes",
            "correct or remove it",
        )
    return ManifestFile(
        name=name,
        split=UNSPLIT,
        size=status.st_size,
        sha256=sha256,
        modified_ns=status.st_mtime_ns,
        path=str(path),
    )


def _status(path: Path) -> Any:
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        raise HpcgenError(str(getattr(error, "strerror", None) or error), where=path) from error
    if not path.is_file():
        raise HpcgenError(f"{path} is not a file")
    return status
