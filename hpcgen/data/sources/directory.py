"""A directory as a source: the files below it, in the order of their names."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from hpcgen.data.manifest import ManifestFile
from hpcgen.data.sources.listing import UNSPLIT, Listing
from hpcgen.data.workers import cores
from hpcgen.errors import HpcgenError

_BLOCK = 1 << 20


def list_directory(directory: Path, *, besides: Path) -> Listing:
    """The files below `directory`, sorted by their relative names as `LC_ALL=C sort` does.

    Links to files are taken, links to directories are not followed, and names that start with "." are left out,
    with all below them. So is everything below `besides`, the corpus's own directory.

    Raises:
        HpcgenError: it is not there, cannot be read, or is the corpus's own directory.
    """
    if os.path.realpath(directory) == os.path.realpath(besides):
        raise HpcgenError(
            f"data.corpus.source.directory = {directory} is also data.corpus.directory",
            "let the stages write to another directory: they would take their own files for the corpus's",
        )
    if not directory.is_dir():
        reason = "is not a directory" if directory.exists() else "is not there"
        raise HpcgenError(
            f"data.corpus.source.directory = {directory} {reason}", "name the folder of the files"
        )
    try:
        files = sorted(_walk(directory, "", os.path.realpath(besides)), key=lambda file: file.name)
    except OSError as error:
        raise HpcgenError(f"cannot read {error.filename}: {error.strerror}") from error
    return Listing(f"directory {directory}", files)


def with_hashes(files: Sequence[ManifestFile]) -> list[ManifestFile]:
    """`files` with the SHA-256 of each that lies here and has none; as many at once as there are cores.

    Raises:
        HpcgenError: a file cannot be read, or changes while it is read.
    """
    with ThreadPoolExecutor(cores()) as threads:  # hashing lets other threads run
        return list(threads.map(_with_hash, files))


def _walk(directory: str | Path, prefix: str, besides: str) -> Iterator[ManifestFile]:
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                if os.path.realpath(entry.path) != besides:
                    yield from _walk(entry.path, f"{prefix}{entry.name}/", besides)
            elif entry.is_file():
                status = entry.stat()
                yield ManifestFile(
                    name=prefix + entry.name,
                    split=UNSPLIT,
                    size=status.st_size,
                    modified_ns=status.st_mtime_ns,
                    path=entry.path,
                )


def _with_hash(file: ManifestFile) -> ManifestFile:
    if file.path is None or file.sha256 is not None:
        return file
    digest = hashlib.sha256()
    try:
        with Path(file.path).open("rb", buffering=0) as content:
            while block := content.read(_BLOCK):
                digest.update(block)
            status = os.fstat(content.fileno())
    except OSError as error:
        raise HpcgenError(f"cannot read {file.path}: {error.strerror}") from error
    if (status.st_size, status.st_mtime_ns) != (file.size, file.modified_ns):
        raise HpcgenError(
            f"{file.path} changes while it is read", "plan when nothing writes to the corpus any more"
        )
    return msgspec.structs.replace(file, sha256=digest.hexdigest())
