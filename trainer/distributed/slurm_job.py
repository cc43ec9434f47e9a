"""The Slurm job of this process, and its node."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping


def job_id() -> str:
    """ID of the job; empty outside of Slurm."""
    return os.environ.get("SLURM_JOB_ID", "")


def restart_count() -> int:
    """Number of times that the job was requeued."""
    count = os.environ.get("SLURM_RESTART_COUNT", "")
    return int(count) if count.isdecimal() else 0


def node_name(environ: Mapping[str, str] = os.environ) -> str:
    """Name of the node in Slurm, or else of the host."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()
