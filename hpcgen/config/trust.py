"""Ownership and permission checks for site files, because templates and profiles determine what users' jobs run."""

from __future__ import annotations

import grp
import os
import stat
from collections.abc import Collection
from pathlib import Path

from hpcgen.errors import FilePlace, HpcgenError
from hpcgen.files import to_protect


def require_trusted(
    path: Path, trusted_groups: Collection[str] | None = None, *, sticky_is_safe: bool = False
) -> None:
    """Refuses a site's file or directory that other users could change.

    World-writable paths are refused. A sticky bit makes a directory acceptable only with `sticky_is_safe`, because
    anyone could still add files. Group-writable paths are accepted if root or the current user owns them, as with a
    umask of 002, or if the group is in the profile's `trusted_groups` (None for the profile itself).
    `require_safe_parents` checks the directories above.
    """
    status = path.stat()
    is_sticky = stat.S_ISDIR(status.st_mode) and bool(status.st_mode & stat.S_ISVTX)
    if is_sticky and sticky_is_safe:
        return
    if status.st_mode & stat.S_IWOTH:
        reason = "not trusted, because all users can write to it"
        raise HpcgenError(reason, to_protect(path, "o-w"), where=FilePlace(path))
    if status.st_mode & stat.S_IWGRP and status.st_uid not in (0, os.geteuid()):
        group = _group_name(status.st_gid)
        if group not in (trusted_groups or ()):
            hint = to_protect(path, "g-w")
            if trusted_groups is not None:
                hint += f", or add {group} to trusted_groups in the cluster profile"
            reason = f"not trusted, because another user (id {status.st_uid}) owns it and group {group} can write to it"
            raise HpcgenError(reason, hint, where=FilePlace(path))


def require_safe_parents(directory: Path) -> None:
    """Refuses a directory that other users could replace, below a world-writable directory without sticky bit.

    A link to it could be replaced like the directory itself.
    """
    for parent in dict.fromkeys((*directory.absolute().parents, *directory.resolve().parents)):
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise HpcgenError(
                f"not trusted, because all users can write to {parent} and could replace it",
                to_protect(parent, "o-w"),
                where=FilePlace(directory),
            )


def require_own_place(directory: Path) -> None:
    """Refuses a directory found by name that a stranger may have added to one that others can write to, such as /tmp.

    It must belong to root, the current user, or the owner of the directory above.
    """
    above, owner = directory.parent.stat(), directory.stat().st_uid
    is_open = above.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if is_open and owner not in (0, os.geteuid(), above.st_uid):
        reason = f"not trusted, because another user (id {owner}) owns it and others can write to {directory.parent}"
        raise HpcgenError(reason, to_protect(directory.parent, "go-w"), where=FilePlace(directory))


def require_trusted_file(path: Path, *, looked_up: bool) -> None:
    """Refuses a cluster profile or a node type that other users could change or add.

    `looked_up` is True if the file was found by name. In that case other users must not be able to add files to its
    directory. If it was found below the working directory (a relative path), file and directory must also belong to
    root or the current user, because users do not choose the content of a directory by entering it. A path in a run
    file is an explicit choice.

    No group is trusted here, because `trusted_groups` is a key of the file being checked.
    """
    for directory in dict.fromkeys((path.absolute().parent, path.resolve().parent)):
        require_safe_parents(directory)
        require_trusted(directory, sticky_is_safe=not looked_up)
    require_trusted(path)
    if looked_up:
        require_own_place(path.absolute().parent)
    if looked_up and not path.is_absolute():
        for place in (path, path.parent):
            owner = place.stat().st_uid
            if owner not in (0, os.geteuid()):
                reason = (
                    f"not trusted, because another user (id {owner}) owns it, and it was found only by name"
                )
                hint = "copy it to ~/.config/hpcgen, or refer to a profile by its path: cluster: ./clusters/NAME.yaml"
                raise HpcgenError(reason, hint, where=FilePlace(place))


def _group_name(group_id: int) -> str:
    try:
        return grp.getgrgid(group_id).gr_name
    except KeyError:
        return str(group_id)
