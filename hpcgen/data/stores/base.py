"""Base class of the stores from which files are downloaded: web servers, object stores and file systems."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar

from hpcgen.data.retries import RetryPolicy, TransientError
from hpcgen.errors import HpcgenError


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Entry of a file in the manifest."""

    name: str
    url: str
    size: int | None
    sha256: str | None
    version: str | None = None
    """Version when the corpus was planned; None if unknown."""


@dataclass(frozen=True, kw_only=True)
class Stat:
    """Size and version of a file in a store."""

    size: int | None
    """Size in bytes; None if the store does not state it."""
    version: str | None = None
    """Changes with the content (ETag, generation); None if the store does not state it."""


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A file in a listing."""

    url: str
    stat: Stat


@dataclass(frozen=True, kw_only=True)
class Body:
    """Content that a store sends."""

    blocks: Iterable[bytes]
    """The content, to be read once. Raises TransientError if the connection breaks."""
    start: int | None
    """Offset of the first byte in the file. None: the content is the complete file."""
    total: int | None
    """Size of the complete file; None if the store does not state it."""
    version: str | None
    """Version of the content; None if the store does not state it."""
    content_type: str = ""


class FileNotInStore(HpcgenError):
    """The store does not have the file."""


class StartOver(TransientError):
    """The download cannot continue after the bytes that are already there. It must start over."""


class NotTheFile(Exception):
    """A store sends content other than the file, perhaps temporarily."""

    def __init__(self, reason: str, hint: str) -> None:
        super().__init__(reason)
        self.reason, self.hint = reason, hint


class Store(ABC):
    """Reads files with URLs of its schemes. A process opens one for many files.

    A store does not deal with partial files, hashes or free space. Its methods try once; the caller retries them with
    `policy`.
    """

    schemes: ClassVar[tuple[str, ...]]
    """Schemes of its URLs."""
    modules: ClassVar[Mapping[str, str]] = {}
    """Scheme -> module that reading its URLs imports and that only an extra installs."""

    def __init__(self, policy: RetryPolicy, token_variable: str | None = None) -> None:
        self.policy = policy
        """How the caller retries."""
        self.token_variable = token_variable
        """Name of the environment variable with a token for web servers."""

    @abstractmethod
    def list(self, pattern: str) -> Iterator[Listed]:
        """Lists the files whose URLs match `pattern`. * stands for any part of a name, ** for any directories.

        Raises:
            HpcgenError: the store cannot list its files, or denies access.
            TransientError: the store is busy or unreachable.
        """

    @abstractmethod
    def stat(self, url: str) -> Stat:
        """Asks for the size and the version of a file.

        Raises:
            FileNotInStore: the store does not have it.
            HpcgenError: the store denies access.
            TransientError: the store is busy or unreachable.
        """

    @abstractmethod
    def read(self, file: Wanted, start: int, version: str | None) -> AbstractContextManager[Body]:
        """Opens a file at the offset `start`, if it still has `version`; otherwise at its beginning.

        Raises:
            StartOver: the content at `start` does not continue what has been read.
            NotTheFile: the content is certainly not that of the file.
            HpcgenError: see `stat`.
            TransientError: the store is busy or unreachable.
        """

    def close(self) -> None:  # noqa: B027 (not every store has connections)
        """Closes the open connections."""

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def glob_pattern(path: str) -> str:
    """The pattern for glob functions: * is the only special character in the pattern of a URL."""
    return re.sub(r"([?[])", r"[\1]", path)
