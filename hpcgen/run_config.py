"""The trainer's configuration that a run's directory holds, as plain data: that of the newest job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_run_config(run_dir: Path) -> tuple[dict[str, Any], Path | None]:
    """The newest configuration that a job of the run was given, and its file; empty and None without any.

    A job's lies in `jobs/JOBID/trainer.json`; a run that was started by hand may have one beside its results.
    It is read as it is: a checkpoint or a report may be older or newer than what this version would accept.
    """
    found = [*run_dir.glob("jobs/*/trainer.json"), *run_dir.glob("*.json")]
    for path in sorted(found, key=_modified, reverse=True):
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(config, dict) and all(
            isinstance(config.get(key), dict) for key in ("model", "training")
        ):
            return config, path
    return {}, None


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # gone meanwhile
        return 0.0
