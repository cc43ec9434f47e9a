"""The files of a corpus, and checks of their names and URLs when the corpus is planned and when its manifest is read.

A name becomes a path below the corpus's directory, and a URL is downloaded, so neither may come unchecked from a list
that somebody else can write.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from hpcgen.config.corpus import SPLITS, WHOLE
from hpcgen.data.suffixes import MORE_SUFFIXES, SUFFIXES, extracted_name
from hpcgen.data.urls import url_problem
from hpcgen.errors import Problem
from hpcgen.text import counted, few

_LONGEST_SEGMENT = 200
"""Maximum bytes of a path segment. File systems allow 255, but private files and records have longer names."""


class ManifestFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One file of a corpus. It has either a `url`, or the `path` of a local file."""

    name: str
    """Relative path with forward slashes; unique in the corpus."""
    split: str
    """train, valid or test if data.corpus.splits assigns files to splits, otherwise "corpus"."""
    size: int | None = None
    """Size in bytes; None if the source does not state it."""
    sha256: str | None = None
    """SHA-256 of the content in hexadecimal; None if the source does not state it."""
    modified_ns: int | None = None
    """Modification time of the file at `path` (ns), to detect changes after planning."""
    url: str | None = None
    version: str | None = None
    """Version of the file at `url` (ETag, generation); None if the store does not state it."""
    path: str | None = None


@dataclass(frozen=True)
class Listing:
    """The files that a source lists, in order."""

    source: str
    """Description of the source, for messages."""
    files: Sequence[ManifestFile]
    left_out_links: Sequence[str] = ()
    """Names of symbolic links that are not listed, because they lead to a directory or are broken."""


UNSPLIT = WHOLE
"""Split of files before `hpcgen.data.selection` assigns them."""


def problems(files: Sequence[ManifestFile]) -> Iterator[Problem]:
    """Yields the mistakes in a list of files, one of each kind."""
    for is_wrong, reason, hint in _FILE_CHECKS:
        if wrong := [repr(file.name) for file in files if is_wrong(file)]:
            yield Problem("", f"{counted(len(wrong), 'file')} {reason}: {few(wrong)}", hint)
    folders = {folder for file in files for folder in _folders(file.name)}
    if both := [file.name for file in files if file.name in folders]:
        reason = f"file names that are also directories of other files: {few(both)}"
        yield Problem("", reason, "exclude them with data.corpus.include")
    if twice := _repeated(file.name for file in files):
        yield Problem("", f"duplicate file names: {few(twice)}", "give each file its own name")
    elif same := _repeated(extracted_name(file.name) for file in files):
        reason = f"file names that would be duplicates after extraction: {few(same)}"
        yield Problem("", reason, "exclude one of the two files with data.corpus.include")


def _folders(name: str) -> Iterator[str]:
    """Yields the parent directories of a name: for a/b/c.jsonl, a/b and a."""
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
        or name.endswith(".record.json")  # hpcgen's own records have this suffix
    )


def _unknown_suffix(file: ManifestFile) -> bool:
    return not file.name.endswith(SUFFIXES + MORE_SUFFIXES)


def _negative(file: ManifestFile) -> bool:
    return file.size is not None and file.size < 0


def _invalid_hash(file: ManifestFile) -> bool:
    return file.sha256 is not None and re.fullmatch(r"[0-9a-f]{64}", file.sha256) is None


def _unknown_split(file: ManifestFile) -> bool:
    return file.split not in (*SPLITS, WHOLE)


def _invalid_location(file: ManifestFile) -> bool:
    if file.path is not None:
        return file.url is not None or not file.path.startswith("/") or "\0" in file.path
    return file.url is None or url_problem(file.url, "") is not None


def _repeated(names: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


_FILE_CHECKS: tuple[tuple[Callable[[ManifestFile], bool], str, str], ...] = (
    (
        _unsafe,
        "with an unsafe name (it must be relative, printable, not too long, and without '..' or '\\')",
        "correct the source",
    ),
    (
        _unknown_suffix,
        "with a name that does not end in .jsonl or .json, optionally followed by .zst or .gz, or in .parquet",
        "exclude them with data.corpus.include",
    ),
    (_negative, "with a negative size", "correct the source"),
    (_invalid_hash, "with a SHA-256 that is not 64 hexadecimal digits", "correct the source"),
    (_unknown_split, f"in a split other than {', '.join((*SPLITS, WHOLE))}", "correct data.corpus.splits"),
    (
        _invalid_location,
        "without exactly one of a valid URL and an absolute path",
        "give each file one of them",
    ),
)
"""Checks of a single file: predicate, reason, and hint."""
