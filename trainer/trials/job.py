"""The job of a trial, and the node of this rank."""

from __future__ import annotations

import os
import socket


def job_id() -> str:
    """ID of the job; empty outside of Slurm."""
    return os.environ.get("SLURM_JOB_ID", "")


def node_name() -> str:
    """Name of the node in Slurm, or else of the host."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
