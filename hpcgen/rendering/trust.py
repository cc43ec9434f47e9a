"""Whom a site's template directory may belong to: whoever can write a template runs commands in our jobs."""

from __future__ import annotations

import grp
import os
import stat
from collections.abc import Collection
from pathlib import Path

from hpcgen.errors import HpcgenError


def require_trusted(path: Path, trusted_groups: Collection[str]) -> None:
    """Refuse a template, or a directory of templates, that strangers could change.

    World-writable is refused, also with a sticky bit, since anybody could add a template. Group-writable is
    accepted when root or the present user owns it (a umask of 002 makes such files), or when the group is one
    of the profile's `trusted_groups`. The directories above it are `require_safe_parents`' matter.
    """
    status = path.stat()
    if status.st_mode & stat.S_IWOTH:
        raise HpcgenError(
            f"{path}: everybody can write to it, so its commands are not trusted", f"chmod o-w {path}"
        )
    if status.st_mode & stat.S_IWGRP and status.st_uid not in (0, os.geteuid()):
        group = _group_name(status.st_gid)
        if group not in trusted_groups:
            raise HpcgenError(
                f"{path}: the group {group} can write to it, and another user (id {status.st_uid}) owns it",
                f"chmod g-w {path}, or add {group} to trusted_groups in the cluster profile",
            )


def require_safe_parents(directory: Path) -> None:
    """Refuse a directory that strangers could replace: below a world-writable one without sticky bit."""
    for parent in directory.resolve().parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise HpcgenError(
                f"{directory}: everybody can write to {parent}, and so replace what is in it",
                f"chmod o-w {parent}",
            )


def _group_name(group_id: int) -> str:
    try:
        return grp.getgrgid(group_id).gr_name
    except KeyError:
        return str(group_id)
