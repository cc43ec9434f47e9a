"""Finds run directories below a directory, without a look into checkpoints, corpora or the jobs of a run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from hpcgen.slurm.job_files import JOBS, RUNNING, SLURM_JOB
from trainer.contract.files.run_directory import RunDirectory
from trainer.contract.record import record

MANIFEST = "manifest.jsonl"
"""File of a corpus, which has no runs in it but may have thousands of files."""
_MARKS = {RunDirectory.METRICS, RunDirectory.TRAINED_WITH, RUNNING}
"""Files that only a run directory has."""
_JOB = re.compile(rf"{SLURM_JOB.pattern}|local-\w+")


@record(kw_only=True)
class FoundRuns:
    """The run directories below a directory."""

    directories: tuple[Path, ...]
    """In the order of their paths."""
    closed: int
    """Number of directories that this user may not read."""


def find_runs(root: Path, depth: int) -> FoundRuns:
    """Finds run directories that are `root` itself or at most `depth` levels below it. Follows no links.

    Raises:
        OSError: `root` cannot be read.
    """
    found: list[Path] = []
    closed, level = 0, [str(root)]
    for left in range(depth, -1, -1):
        below: list[str] = []
        for directory in level:
            try:
                files, directories = _entries(directory)
            except (PermissionError, FileNotFoundError):
                if directory == str(root):
                    raise
                closed += 1
                continue
            if is_run(directory, files, directories):
                found.append(Path(directory))
            elif left and MANIFEST not in files:
                below += (f"{directory}/{name}" for name in directories if not name.startswith("."))
        level = below
    return FoundRuns(directories=tuple(sorted(found)), closed=closed)


def is_run(directory: str, files: Iterable[str], directories: Iterable[str]) -> bool:
    """True if a directory with these entries is that of a run."""
    if not _MARKS.isdisjoint(files):
        return True
    if JOBS not in directories:
        return False
    try:
        with os.scandir(f"{directory}/{JOBS}") as jobs:
            return any(_JOB.fullmatch(job.name) for job in jobs)
    except OSError:
        return False


def has_job(directory: Path, job: str) -> bool:
    """True if a job, or a task of this array, has run in a run directory."""
    jobs = directory / JOBS
    if os.access(jobs / job, os.F_OK):
        return True
    try:
        with os.scandir(jobs) as entries:
            return any(entry.name.partition("_")[0] == job for entry in entries)
    except OSError:
        return False


def _entries(directory: str) -> tuple[set[str], list[str]]:
    """Names of the files and of the directories in a directory."""
    files: set[str] = set()
    directories: list[str] = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                directories.append(entry.name)
            else:
                files.add(entry.name)
    return files, directories
