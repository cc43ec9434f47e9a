"""A directory as a source: the files below it, sorted by name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from hpcgen.data.listed_files import UNSPLIT, Listing, ManifestFile
from hpcgen.data.workers import cores
from hpcgen.errors import HpcgenError, Problem
from hpcgen.text import few
from trainer.contract.files.hashing import rest_sha256
from trainer.contract.files.regular_file import open_regular

KEY = "data.corpus.source.directory"


def directory_problem(directory: Path, *, exclude: Path) -> Problem | None:
    """The reason why `directory` cannot be listed; None if there is none. `exclude` is the corpus's own directory."""
    if os.path.realpath(directory) == os.path.realpath(exclude):
        reason = "is also data.corpus.directory, so the stages would read their own output"
        return Problem(KEY, reason, "set data.corpus.directory to another directory")
    if not directory.is_dir():
        reason = "is not a directory" if directory.exists() else "does not exist"
        return Problem(KEY, reason, "set it to the directory of the files")
    return None


def list_directory(directory: Path, *, exclude: Path) -> Listing:
    """Lists the files below `directory`, sorted by relative name as with `LC_ALL=C sort`.

    Links to files are included. Links to directories are not followed, and are named in the result. Names that start
    with "." are excluded with everything below them, and so is `exclude`, the corpus's own directory.

    Raises:
        HpcgenError: the directory is missing, unreadable, or the corpus's own.
    """
    if problem := directory_problem(directory, exclude=exclude):
        raise HpcgenError(f"{KEY} = {directory} {problem.reason}", problem.hint)
    links = list[str]()
    try:
        files = sorted(_walk(directory, "", os.path.realpath(exclude), links), key=lambda file: file.name)
    except OSError as error:
        raise HpcgenError(f"cannot read {error.filename}: {error.strerror}") from error
    if links and not files:
        raise HpcgenError(
            f"{directory} contains no files, only links to directories or to nothing: {few(links)}",
            f"set {KEY} to the directory that has the files",
        )
    return Listing(f"directory {directory}", files, sorted(links))


def with_hashes(files: Sequence[ManifestFile]) -> list[ManifestFile]:
    """Adds the SHA-256 of local files that have none. Hashes as many files at once as there are cores.

    Raises:
        HpcgenError: a file cannot be read, or changes while it is read.
    """
    with ThreadPoolExecutor(cores()) as threads:  # hashing releases the GIL
        return list(threads.map(_with_hash, files))


def _walk(directory: str | Path, prefix: str, exclude: str, links: list[str]) -> Iterator[ManifestFile]:
    """Yields the files below `directory`. Appends the links that lead to no file to `links`."""
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                if os.path.realpath(entry.path) != exclude:
                    yield from _walk(entry.path, f"{prefix}{entry.name}/", exclude, links)
            elif entry.is_file():
                status = entry.stat()
                yield ManifestFile(
                    name=prefix + entry.name,
                    split=UNSPLIT,
                    size=status.st_size,
                    modified_ns=status.st_mtime_ns,
                    path=entry.path,
                )
            elif entry.is_symlink():
                links.append(prefix + entry.name)


def _with_hash(file: ManifestFile) -> ManifestFile:
    if file.path is None or file.sha256 is not None:
        return file
    try:
        with open_regular(Path(file.path), buffering=0) as content:
            digest, _ = rest_sha256(content)
            status = os.fstat(content.fileno())
    except OSError as error:
        raise HpcgenError(f"cannot read {file.path}: {error.strerror}") from error
    if (status.st_size, status.st_mtime_ns) != (file.size, file.modified_ns):
        raise HpcgenError(
            f"{file.path} changed while it was read", "plan again when no process writes to the corpus"
        )
    return msgspec.structs.replace(file, sha256=digest)
