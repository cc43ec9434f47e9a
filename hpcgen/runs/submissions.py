"""Reads how the jobs of a run were submitted."""

from __future__ import annotations

import json
import os
from pathlib import Path

from hpcgen.slurm.job_files import ARRAY_TASK, JOBS, job_directory
from hpcgen.slurm.submission import SUBMISSION, Submission
from trainer.contract.files.regular_file import open_regular
from trainer.contract.files.shared_files import foreign_link, require_own

_MOST_BYTES = 1 << 20


def read_submission(run_dir: Path, job: str) -> Submission | None:
    """The record of a job; None if it has none, as jobs of hpcgen 0.2.0.

    Raises:
        PermissionError: others made it or can write to it. It could name their code.
    """
    path = job_directory(run_dir, job) / SUBMISSION
    try:
        with open_regular(path) as file:
            require_own(os.fstat(file.fileno()), path)
            values = json.loads(file.read())
        texts = (values[name] for name in ("stage", "run_file", "sha256"))
        stage, run_file, sha256 = map(str, texts)
        overrides, withheld, templates = (
            tuple(map(str, values[name])) for name in ("overrides", "withheld", "templates")
        )
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, KeyError):
        return None
    return Submission(
        stage=stage,
        run_file=run_file,
        sha256=sha256,
        overrides=overrides,
        withheld=withheld,
        templates=templates,
    )


def secret_names(run_dir: Path) -> frozenset[str]:
    """Names of the variables that are secrets, as all jobs of a run recorded them, whoever submitted the jobs."""
    jobs = run_dir / JOBS
    names: set[str] = set()
    if foreign_link(jobs, run_dir) is None:
        for job in _job_names(jobs):
            names |= _recorded_secrets(jobs / job / SUBMISSION)
    return frozenset(names)


def _job_names(jobs: Path) -> list[str]:
    """Names of the directories of jobs. Tasks of arrays, of which there may be ten thousand, have no record."""
    try:
        return [name for name in os.listdir(jobs) if not ARRAY_TASK.fullmatch(name)]  # noqa: PTH208
    except OSError:
        return []


def _recorded_secrets(path: Path) -> set[str]:
    try:
        with open_regular(path) as file:
            found = json.loads(file.read(_MOST_BYTES))["secrets"]
        return {name for name in found if isinstance(name, str)}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return set()
