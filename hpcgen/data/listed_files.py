"""Checks of the names and addresses of a corpus's files, when a corpus is planned and when its list is read.

A name becomes a path below the corpus's directory, and an address is fetched, so neither may come unchecked from a
list that somebody else can write.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from hpcgen.config.corpus import SPLITS, WHOLE
from hpcgen.text import counted, few

if TYPE_CHECKING:
    from hpcgen.data.manifest import ManifestFile

SUFFIXES = (".jsonl", ".jsonl.zst", ".jsonl.gz")
"""Suffixes of the files that are taken where no patterns are given."""
_MORE_SUFFIXES = (".json", ".json.zst", ".json.gz")
"""JSON Lines have these names in some corpora (C4, Dolma); elsewhere they are one JSON document, so patterns decide."""
_LONGEST_SEGMENT = 200
"""Bytes: file systems take 255, and private files and records have longer names than the file itself."""


def extracted_name(name: str) -> str:
    """NAME without .zst or .gz."""
    return name.removesuffix(".zst") if name.endswith(".zst") else name.removesuffix(".gz")


def url_reason(url: str) -> str | None:
    """Why a file cannot be fetched from `url`, in words that follow it; None when it can."""
    if not url.isprintable() or " " in url or "\\" in url:
        return "holds a space or another character that no address has"
    return _server_reason("/".join(url.split("/", 3)[:3]))


@functools.lru_cache(maxsize=256)
def _server_reason(address: str) -> str | None:
    """`url_reason` of an address up to its path, which thousands of files share."""
    try:
        parts = urlsplit(address)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        return f"is no address ({error})"
    if parts.scheme not in ("https", "http") or not host:
        return "does not begin with https:// or http://"
    if "@" in parts.netloc:
        return "holds a password; use data.corpus.source.token_variable"
    return None


def problems(files: Sequence[ManifestFile]) -> Iterator[tuple[str, str]]:
    """The mistakes in a list of files: for each kind, the reason and a hint."""
    for is_wrong, reason, hint in _WRONG:
        if wrong := [repr(file.name) for file in files if is_wrong(file)]:
            yield f"{counted(len(wrong), 'file')} {reason}: {few(wrong)}", hint
    folders = {folder for file in files for folder in _folders(file.name)}
    if both := [file.name for file in files if file.name in folders]:
        yield (
            f"names of files that are folders of others: {few(both)}",
            "leave them out with data.corpus.include",
        )
    if twice := _repeated(file.name for file in files):
        yield f"names that stand for two files: {few(twice)}", "give each file its own name"
    elif same := _repeated(extracted_name(file.name) for file in files):
        yield (
            f"names that two files would have once they are extracted: {few(same)}",
            "leave one of the two out with data.corpus.include",
        )


def _folders(name: str) -> Iterator[str]:
    """a/b/c.jsonl: a and a/b."""
    while name := name.rpartition("/")[0]:
        yield name


def _unsafe(file: ManifestFile) -> bool:
    name, segments = file.name, file.name.split("/")
    return (
        not name.isprintable()
        or "\\" in name
        or not {"", ".", ".."}.isdisjoint(segments)
        or any(len(segment.encode(errors="surrogateescape")) > _LONGEST_SEGMENT for segment in segments)
        or re.match(r"[A-Za-z]:", name) is not None
        or name.endswith(".record.json")  # ours, beside a file that is made
    )


def _unknown_suffix(file: ManifestFile) -> bool:
    return not file.name.endswith(SUFFIXES + _MORE_SUFFIXES)


def _negative(file: ManifestFile) -> bool:
    return file.size is not None and file.size < 0


def _no_hash(file: ManifestFile) -> bool:
    return file.sha256 is not None and re.fullmatch(r"[0-9a-f]{64}", file.sha256) is None


def _unknown_split(file: ManifestFile) -> bool:
    return file.split not in (*SPLITS, WHOLE)


def _no_place(file: ManifestFile) -> bool:
    if file.path is not None:
        return file.url is not None or not file.path.startswith("/") or "\0" in file.path
    return file.url is None or url_reason(file.url) is not None


def _repeated(names: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


_WRONG: tuple[tuple[Callable[[ManifestFile], bool], str, str], ...] = (
    (
        _unsafe,
        "without a safe name (relative, printable, without '..' or '\\', not too long)",
        "correct the source",
    ),
    (
        _unknown_suffix,
        "with a name that does not end in .jsonl or .json, or .zst or .gz after it",
        "leave them out with data.corpus.include",
    ),
    (_negative, "of a size below 0", "correct the source"),
    (_no_hash, "whose SHA-256 is not 64 hexadecimal digits", "correct the source"),
    (_unknown_split, f"in a split other than {', '.join((*SPLITS, WHOLE))}", "correct data.corpus.splits"),
    (
        _no_place,
        "without either a valid http or https address or an absolute path",
        "give each file one of them",
    ),
)
"""Mistakes of a single file: a test for each, the reason, and a hint."""
