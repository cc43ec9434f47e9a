"""The trainer's configuration that a run's directory holds, as plain data: of the newest job, or of what trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainer.contract.run_directory import RunDirectory


def read_run_config(run_dir: Path) -> tuple[dict[str, Any], Path | None]:
    """The newest configuration that a job of the run was given, and its file; empty and None without any.

    A job's lies in `jobs/JOBID/trainer.json`; a run that was started by hand may have one beside its results.
    It is read as it is: a checkpoint or a report may be older or newer than what this version would accept.
    """
    found = [*run_dir.glob("jobs/*/trainer.json"), *run_dir.glob("*.json")]
    for path in sorted(found, key=_modified, reverse=True):
        if config := _read(path):
            return config, path
    return {}, None


def read_trained_config(run_dir: Path) -> dict[str, Any]:
    """The configuration of the newest attempt that trained; a newer job may have been refused, or had nothing to do.

    A run of a trainer that did not record it has the newest configuration instead, and one without any is empty.
    """
    return _read(run_dir / RunDirectory.TRAINED_WITH) or read_run_config(run_dir)[0]


def _read(path: Path) -> dict[str, Any]:
    """A trainer's configuration; empty where `path` is not there, or is something else."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    is_config = isinstance(config, dict) and all(
        isinstance(config.get(key), dict) for key in ("model", "training")
    )
    return config if is_config else {}


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # gone meanwhile
        return 0.0
