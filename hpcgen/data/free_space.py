"""Free space: of the file system, and under the Lustre quotas of the user, the group and the directory's project."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_TIMEOUT_S = 20.0
_ROW = re.compile(
    r"(\[?\d+\]?\*?)\s+(\d+)\s+(\d+)\s+\S+\s+(\[?\d+\]?\*?)\s+(\d+)\s+(\d+)\s+\S+\s*$", re.MULTILINE
)
"""Columns: kbytes quota limit grace, files quota limit grace. The name of the file system may be on a separate line.
An asterisk marks a value above its quota; brackets mark an inexact value."""


@dataclass(frozen=True)
class FreeSpace:
    """Remaining bytes and files under one limit."""

    name: str
    """Name of the limit, for messages."""
    bytes: int | None
    """None if there is no limit."""
    files: int | None


def bytes_left(directory: Path) -> tuple[int, str]:
    """Bytes that can still be written below `directory`, and the name of the limit that is reached first."""
    return min((free.bytes, free.name) for free in limits(directory) if free.bytes is not None)


def limits(directory: Path) -> tuple[FreeSpace, ...]:
    """Every limit that applies below `directory`: the file system's, then the quotas."""
    return (_file_system(directory), *quotas(_existing(directory), os.geteuid()))


def quotas(directory: Path, user_id: int) -> Iterator[FreeSpace]:
    """Yields the space left under each quota on `directory`; nothing without lfs, outside Lustre, and for root.

    The program lfs reports them.
    """
    if shutil.which("lfs") is None or user_id == 0:
        return
    status = directory.stat()
    # New files in a set-gid directory get its group.
    group = status.st_gid if status.st_mode & stat.S_ISGID else os.getegid()
    owners = [("user", "-u", str(user_id)), ("group", "-g", str(group))]
    if (project := _project(directory)) is not None:
        owners.append(("project", "-p", project))
    for kind, option, number in owners:
        row = _ROW.search(_lfs("quota", option, number, str(directory)))
        if row is None:
            continue
        used_kib, soft_kib, hard_kib, used_files, soft_files, hard_files = (
            int(column.strip("[]*")) for column in row.groups()
        )
        left_kib, left_files = _left(used_kib, soft_kib, hard_kib), _left(used_files, soft_files, hard_files)
        yield FreeSpace(f"the quota of {kind} {number}", left_kib and left_kib * 1024, left_files)


def _file_system(directory: Path) -> FreeSpace:
    status = os.statvfs(_existing(directory))
    # File systems without an inode table (btrfs, some NFS servers) report 0 inodes.
    return FreeSpace(
        f"the file system of {directory}",
        status.f_bavail * status.f_frsize,
        status.f_favail if status.f_files else None,
    )


def _existing(directory: Path) -> Path:
    return next(path for path in (directory, *directory.parents) if path.exists())


def _project(directory: Path) -> str | None:
    """Project ID of a directory, from `lfs project -d`, which prints the ID, flags and path."""
    match = re.match(r"\s*(\d+)\s", _lfs("project", "-d", str(directory)))
    return match[1] if match and match[1] != "0" else None


def _left(used: int, soft: int, hard: int) -> int | None:
    limit = hard or soft
    return max(0, limit - used) if limit else None


def _lfs(*arguments: str) -> str:
    """Output of lfs; empty if it fails, as on other file systems and without quotas."""
    try:
        done = subprocess.run(
            ["lfs", *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
