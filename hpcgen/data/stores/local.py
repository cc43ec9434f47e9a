"""The file system as a store: files that are copied into the corpus's directory, for example from an archive."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote, unquote, urlsplit

from hpcgen.config.corpus import FILE_SCHEMES
from hpcgen.data.stores.base import Body, FileNotInStore, Listed, StartOver, Stat, Store, Wanted, glob_pattern
from hpcgen.errors import HpcgenError
from hpcgen.files import Share
from trainer.contract.files.regular_file import open_regular

_BLOCK = 1 << 20


class Local(Store):
    """Files of this machine, as file:///absolute/path."""

    schemes = FILE_SCHEMES

    def list(self, pattern: str) -> Iterator[Listed]:
        """Lists the files that match, sorted by path."""
        found = glob.iglob(glob_pattern(_path(pattern)), recursive=True)  # noqa: PTH207 (any directory)
        for path in sorted(found):
            if Path(path).is_file():
                url = f"file://{quote(path)}"
                yield Listed(url=url, stat=self.stat(url))

    def stat(self, url: str) -> Stat:
        """Size of a file, and its modification time as its version."""
        with _opened(url) as file:
            return _stat(file)

    @contextmanager
    def read(self, file: Wanted, start: int, version: str | None) -> Iterator[Body]:
        """Opens a file."""
        with _opened(file.url) as source:
            now = _stat(source)
            begin = start if version == now.version else 0
            source.seek(begin)
            yield Body(blocks=_blocks(source, now), start=begin or None, total=now.size, version=now.version)


def refuse_in_shared_corpus(urls: Iterable[str], share: Share) -> None:
    """Refuses files of this machine in a corpus of a group.

    Anyone who can edit its manifest could name private files of the user who downloads, and then read the copies.

    Raises:
        HpcgenError: `urls` has such a file.
    """
    own = next((url for url in urls if share == "group" and urlsplit(url).scheme in Local.schemes), None)
    if own is not None:
        raise HpcgenError(
            f"{own} is not copied into a corpus with share: group, whose manifest others can edit",
            "set data.corpus.source.directory instead, or copy the file by hand",
        )


def _path(url: str) -> str:
    return unquote(urlsplit(url).path)


@contextmanager
def _opened(url: str) -> Iterator[BinaryIO]:
    path = _path(url)
    try:
        with open_regular(Path(path), buffering=0) as file:
            yield file
    except FileNotFoundError as error:
        raise FileNotInStore(f"{path} does not exist", "correct the source, and plan again") from error
    except OSError as error:
        raise HpcgenError(f"cannot read {path}: {error.strerror}") from error


def _stat(file: BinaryIO) -> Stat:
    status = os.fstat(file.fileno())
    return Stat(size=status.st_size, version=f"{status.st_mtime_ns:x}-{status.st_size:x}")


def _blocks(file: BinaryIO, before: Stat) -> Iterator[bytes]:
    while block := file.read(_BLOCK):
        yield block
    if _stat(file) != before:
        raise StartOver("the file changed while it was read")
