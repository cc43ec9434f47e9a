"""Files in a directory that several users can write to: who made them, and links that others placed on the way to them.

With `share: group`, each member of the run's group can rename what is in the run directory and put something else in
its place. A file or link there therefore only counts as this user's own if its owner and mode say so when it is used.
"""

from __future__ import annotations

import errno
import os
import pwd
import stat
from pathlib import Path

from trainer.contract.files.regular_file import open_regular

JOB_DIRECTORY = "HPCGEN_JOB_DIR"
"""Variable with the directory of the job's own files. The script of a job sets it if a group shares the run."""


def read_configuration(path: Path) -> str:
    """The text of a configuration that the command line names. In the job's directory, it must be the job's own.

    A configuration can name code to run, so a configuration from another user would run that user's code as this user.

    Raises:
        OSError: it cannot be read, or others made it or can write to it.
        UnicodeDecodeError: it is not UTF-8.
    """
    with open_regular(path) as file:
        if os.environ.get(JOB_DIRECTORY) == str(path.parent):
            require_own(os.fstat(file.fileno()), path)
        return file.read().decode()


def require_own(status: os.stat_result, path: Path) -> None:
    """Refuses a file or directory that others made or can write to.

    Raises:
        OSError: EPERM, with `path` as its file name.
    """
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in (0, os.geteuid()) or mode & (stat.S_IWGRP | stat.S_IWOTH):
        reason = f"has owner {user(status.st_uid)} and mode {mode:o}: others made it or can write to it"
        raise PermissionError(errno.EPERM, reason, str(path))


def foreign_link(path: Path, root: Path) -> Path | None:
    """The first symbolic link of another user on the way from the directory `root` to `path`; None if there is none.
    `path` itself and parts of it that do not exist are checked, too. The path to `root` is the user's own choice.
    """
    found = root
    for name in path.relative_to(root).parts:
        found /= name
        try:
            status = found.lstat()
        except OSError:  # missing, and so is everything below it
            return None
        if stat.S_ISLNK(status.st_mode) and status.st_uid not in (0, os.geteuid()):
            return found
    return None


def refuse_foreign_link(path: Path, root: Path) -> None:
    """Refuses a path below the directory `root` with a symbolic link that another user placed.

    Raises:
        OSError: ELOOP, with the link as its file name.
    """
    if (link := foreign_link(path, root)) is not None:
        placed_by = user(link.lstat().st_uid)
        reason = (
            f"is a symbolic link that user {placed_by} placed; links of others are not followed: remove it"
        )
        raise OSError(errno.ELOOP, reason, str(link))


def user(number: int) -> str:
    """The name of the user with this number, or the number if it has no name."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)
