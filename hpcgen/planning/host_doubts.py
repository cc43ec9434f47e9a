"""Warnings about facts of a profile that this machine, usually a login node, contradicts."""

from __future__ import annotations

import grp
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from hpcgen.config.cluster import ClusterConfig
from hpcgen.errors import Problem

NETWORK_FILE_SYSTEMS = frozenset((
    "afs", "beegfs", "ceph", "cifs", "daos", "fuse.glusterfs", "fuse.juicefs", "fuse.sshfs", "gpfs", "lustre", "nfs",
    "nfs4", "orangefs", "panfs", "pvfs2", "smb3", "vast", "wekafs",
))  # fmt: skip
"""Types of file systems that nodes share, as in /proc/mounts."""
MOUNTS = Path("/proc/self/mounts")


def host_doubts(cluster: ClusterConfig) -> Iterator[Problem]:
    """Yields groups that this machine does not have, and a scratch directory that is on shared storage here."""
    for index, group in enumerate(cluster.trusted_groups):
        try:
            grp.getgrnam(group)
        except KeyError:
            reason = "is not a group of this machine, so templates that it may write to are refused"
            yield Problem(f"trusted_groups[{index}]", reason, "correct the name (getent group)", "cluster")
    mounts = MOUNTS.read_text(encoding="utf-8", errors="replace") if MOUNTS.exists() else ""
    kind = file_system(cluster.scratch, mounts)
    if kind in NETWORK_FILE_SYSTEMS:
        reason = f"is on a shared file system ({kind}), where caches of all nodes would be in one place"
        yield Problem("scratch", reason, "use a directory on a disk of each node, such as /tmp", "cluster")


def file_system(path: str, mounts: str) -> str:
    """The type of the file system with a path, from the text of /proc/mounts; "" if it is unknown."""
    rows = (line.split() for line in mounts.splitlines())
    found = [(row[1], row[2]) for row in rows if len(row) > 2 and PurePosixPath(path).is_relative_to(row[1])]
    # of two mounts at one place, the later one counts
    return max(reversed(found), key=lambda each: len(each[0]), default=("", ""))[1]
