"""Who may read what a run writes: `share` of the run file, as a umask and as modes of directories."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from hpcgen.errors import HpcgenError

Share = Literal["private", "group"]

_UMASKS: dict[Share, int] = {"private": 0o077, "group": 0o007}
_DIRECTORY_MODES: dict[Share, int] = {"private": 0o700, "group": 0o2770}
"""setgid: what is made below has the group of the directory, and not the one that its maker happens to be in."""


@contextlib.contextmanager
def shared_as(share: Share) -> Iterator[None]:
    """The umask that `share` stands for, for this process and those that it starts meanwhile."""
    before = os.umask(_UMASKS[share])
    try:
        yield
    finally:
        os.umask(before)


def make_directory(directory: Path, share: Share) -> None:
    """Makes a directory with the mode that `share` stands for; one that is there stays as it is.

    Raises:
        HpcgenError: it cannot be made.
    """
    with shared_as(share):
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            directory.mkdir()
            directory.chmod(_DIRECTORY_MODES[share])
        except FileExistsError:
            return
        except OSError as error:
            raise HpcgenError(f"{directory}: cannot be made ({error.strerror})") from error
