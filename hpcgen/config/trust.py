"""Ownership and permission checks for files of a site: whoever writes a template or a profile runs code in our jobs."""

from __future__ import annotations

import grp
import os
import stat
from collections.abc import Collection
from pathlib import Path

from hpcgen.errors import HpcgenError


def require_trusted(
    path: Path, trusted_groups: Collection[str] | None = None, *, sticky_is_safe: bool = False
) -> None:
    """Refuse a file of a site, or a directory of such files, that strangers could change.

    World-writable is refused, also with a sticky bit, since anybody could add a file; with `sticky_is_safe` the bit
    is enough. Group-writable is accepted when root or the present user owns it (a umask of 002 makes such files), or
    when the group is one of the profile's `trusted_groups`, which is None for the profile itself. The directories
    above it are checked by `require_safe_parents`.
    """
    status = path.stat()
    is_sticky = stat.S_ISDIR(status.st_mode) and bool(status.st_mode & stat.S_ISVTX)
    if is_sticky and sticky_is_safe:
        return
    if status.st_mode & stat.S_IWOTH:
        raise HpcgenError(f"{path}: everybody can write to it, so it is not trusted", f"chmod o-w {path}")
    if status.st_mode & stat.S_IWGRP and status.st_uid not in (0, os.geteuid()):
        group = _group_name(status.st_gid)
        if group not in (trusted_groups or ()):
            hint = f"chmod g-w {path}"
            if trusted_groups is not None:
                hint += f", or add {group} to trusted_groups in the cluster profile"
            reason = f"the group {group} can write to it, and another user (id {status.st_uid}) owns it"
            raise HpcgenError(f"{path}: {reason}", hint)


def require_safe_parents(directory: Path) -> None:
    """Refuse a directory that strangers could replace: below a world-writable one without sticky bit."""
    for parent in directory.resolve().parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise HpcgenError(
                f"{directory}: everybody can write to {parent}, and so replace what is in it",
                f"chmod o-w {parent}",
            )


def require_trusted_file(path: Path, *, looked_up: bool) -> None:
    """Refuse a cluster profile or a node type that strangers could change or put there.

    `looked_up` is whether a name led to the file: then nobody may add files to its directory, and below the
    working directory, where the path is relative, file and directory must belong to root or the present user.
    Somebody who enters a directory has not chosen what is in it; a path in a run file is a choice.

    No group is trusted here: `trusted_groups` is a key of the very file that is judged.
    """
    for directory in dict.fromkeys((path.absolute().parent, path.resolve().parent)):
        require_safe_parents(directory)
        require_trusted(directory, sticky_is_safe=not looked_up)
    require_trusted(path)
    if looked_up and not path.is_absolute():
        for place in (path, path.parent):
            owner = place.stat().st_uid
            if owner not in (0, os.geteuid()):
                reason = (
                    f"another user (id {owner}) owns it, and it is used only because it is in this directory"
                )
                hint = "copy it to ~/.config/hpcgen, or give a profile's path: cluster: ./clusters/NAME.yaml"
                raise HpcgenError(f"{place}: {reason}", hint)


def _group_name(group_id: int) -> str:
    try:
        return grp.getgrgid(group_id).gr_name
    except KeyError:
        return str(group_id)
