"""Names of the files that job scripts write to a run directory (templates/lib). `RunDirectory` names the trainer's."""

from __future__ import annotations

import re
from pathlib import Path

RUNNING = "RUNNING"
"""File with the ID of the job that may write to the run directory."""
EXCLUDED = "excluded_nodes"
"""File with the nodes that jobs of the run avoid: a name and the Unix time until which it is avoided."""
JOBS = "jobs"
"""Directory with a directory for each job, named by its ID: 1234, 1234_5 for a task of an array, or local-..."""
EVENTS = "events.jsonl"
"""File with the events of a job, in its directory."""
NODE_REPORTS = "nodes-"
"""Beginning of the names of directories with the reports of node checks, in the directory of a job."""

ARRAY_TASK = re.compile(r"(\d+)_(\d+)")
"""ID of a task of an array. An array may have ten thousand of them."""
SLURM_JOB = re.compile(rf"\d+|{ARRAY_TASK.pattern}")
"""ID of a job of Slurm. Those of jobs on this machine begin with local-."""


def job_directory(run_dir: Path, job: str) -> Path:
    """The directory with the files of a job of a run."""
    return run_dir / JOBS / job
