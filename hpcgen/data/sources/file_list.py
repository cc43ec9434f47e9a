"""A list of files as a source: a JSON object per line, written by a user or by hpcgen itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

from hpcgen.data.listed_files import url_reason
from hpcgen.data.manifest import ManifestFile
from hpcgen.data.sources.listing import UNSPLIT, Listing
from hpcgen.errors import ConfigErrors, HpcgenError, Mistake
from hpcgen.text import few

_KEYS = "name, url or path, size, sha256"
_MOST_MESSAGES = 20


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """A file. What hpcgen's own manifests hold besides is decided anew."""

    name: str | None = None
    url: str | None = None
    path: str | None = None
    size: int | None = None
    sha256: str | None = None
    split: str | None = None
    modified_ns: int | None = None


def read_file_list(path: Path, *, has_token: bool = False) -> Listing:
    """The files of a list, in its order. Relative paths start at the list's folder.

    With a token, all addresses must be of one server: the token goes to each of them.

    Raises:
        ConfigErrors: everything that is wrong with its lines.
        HpcgenError: it cannot be read or is empty; the token would go to several servers.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise HpcgenError(f"cannot read data.corpus.source.manifest = {path}: {error.strerror}") from error
    files, messages = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip() or (number == 1 and _is_header(line)):
            continue
        try:
            files.append(_file(msgspec.json.decode(line, type=_Line), path.parent))
        except (HpcgenError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            known = f" (its keys are {_KEYS})" if isinstance(error, msgspec.ValidationError) else ""
            messages.append(Mistake.at(f"{path}:{number}", f"{error}{known}"))
    if messages:
        rest = len(messages) - _MOST_MESSAGES
        raise ConfigErrors(
            messages[:_MOST_MESSAGES]
            + ([Mistake.at(str(path), f"{rest:,} more lines are wrong")] if rest > 0 else [])
        )
    if not files:
        raise HpcgenError(f"{path}: lists no file", f"write a JSON object per line: {_KEYS}")
    servers = list(dict.fromkeys(_servers(files)))
    if has_token and len(servers) > 1:
        raise HpcgenError(
            f"{path}: names {len(servers)} servers ({few(servers)}), and each would be sent the token of "
            "data.corpus.source.token_variable",
            "use one list for each server",
        )
    return Listing(f"list {path}" + (f" of files at {few(servers)}" if servers else ""), files)


def _is_header(line: bytes) -> bool:
    """Whether it is the first line of a manifest of hpcgen."""
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
            "names url and path" if line.url else "names neither url nor path", "give one of them"
        )
    sha256 = line.sha256 and line.sha256.lower()
    if sha256 is not None and not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise HpcgenError(f"sha256 = {line.sha256!r} is not one", "write 64 hexadecimal digits")
    if line.size is not None and line.size < 0:
        raise HpcgenError(f"size = {line.size} is below 0")
    if line.url is not None:
        if reason := url_reason(line.url):
            from hpcgen.data.http import shown  # here: lists of local files need no web client

            raise HpcgenError(f"url = {shown(line.url)!r} {reason}")
        name = line.name or unquote(urlsplit(line.url).path).rpartition("/")[2]
        return ManifestFile(name=name, split=UNSPLIT, size=line.size, sha256=sha256, url=line.url)
    assert line.path is not None
    path = folder / line.path
    name = line.name or (path.name if Path(line.path).is_absolute() else line.path)
    status = _status(path)
    if line.size not in (None, status.st_size):
        raise HpcgenError(f"{path} has {status.st_size:,} bytes, and {line.size:,} here")
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
        raise HpcgenError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if not path.is_file():
        raise HpcgenError(f"{path}: is not a file")
    return status
