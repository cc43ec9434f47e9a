"""Reads the trainer configuration of a run's newest job or latest attempt, as plain data."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpcgen.config.stages import TRAINER_FILE
from hpcgen.slurm.job_files import ARRAY_TASK, JOBS
from trainer.contract.files.regular_file import read_text
from trainer.contract.files.run_directory import RunDirectory


def read_run_config(run_dir: Path) -> tuple[dict[str, Any], Path | None]:
    """Returns the run's newest configuration and the file it is from; ({}, None) if there is none.

    The configuration of a job is in `jobs/JOBID/trainer.json`. A run started by hand may have it next to its results.
    The configuration is not validated, because the run may be older or newer than this version of hpcgen.
    """
    found = [*_job_files(run_dir / JOBS), *run_dir.glob("*.json")]
    for path in sorted(found, key=_modified, reverse=True):
        if config := _read(path):
            return config, path
    return {}, None


def read_trained_config(run_dir: Path) -> dict[str, Any]:
    """Returns the configuration of the latest attempt that trained. A newer job may have failed early or had no work.

    If the trainer did not record this configuration, returns the newest one; empty if there is none.
    """
    return _read(run_dir / RunDirectory.TRAINED_WITH) or read_run_config(run_dir)[0]


def _job_files(jobs: Path) -> Iterator[Path]:
    """The configurations of jobs. Tasks of an array, of which there may be thousands, have none."""
    try:
        names = os.listdir(jobs)  # noqa: PTH208 # without a stat for each
    except OSError:
        return
    for name in names:
        if not ARRAY_TASK.fullmatch(name) and os.access(path := jobs / name / TRAINER_FILE, os.R_OK):
            yield path


def _read(path: Path) -> dict[str, Any]:
    """Reads a trainer configuration; empty if `path` is missing or is not a trainer configuration."""
    try:
        config = json.loads(read_text(path))
        text = json.dumps(config, ensure_ascii=False).encode()  # refuses unpaired surrogates
    except (OSError, ValueError, RecursionError):
        return {}
    # No path contains a NUL, and the functions for paths raise ValueErrors for it.
    is_config = (
        isinstance(config, dict)
        and b"\\u0000" not in text
        and all(isinstance(config.get(key), dict) for key in ("model", "training"))
    )
    return config if is_config else {}


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # removed meanwhile
        return 0.0
