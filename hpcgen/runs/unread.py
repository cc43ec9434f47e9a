"""Records of a run that cannot be read. Views leave them out, so they must say so."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from hpcgen.runs.attempts import JobAttempt, read_job
from hpcgen.slurm.job_files import ARRAY_TASK, EVENTS, JOBS
from trainer.contract.files.checkpoint_files import list_paths
from trainer.contract.files.regular_file import open_regular
from trainer.contract.files.run_directory import RunDirectory
from trainer.contract.files.shared_files import refuse_foreign_link


def unread_records(directory: Path, attempts: Iterable[JobAttempt] = ()) -> tuple[str, ...]:
    """Why the metrics and the events of jobs cannot be read, one sentence for each file. Jobs of `attempts`, which were
    read, are not looked at again.

    Tasks of arrays, of which there may be ten thousand, are not looked at.
    """
    known = {attempt.job for attempt in attempts}
    jobs = directory / JOBS
    found = [_metrics_problem(directory)]
    try:
        refuse_foreign_link(jobs, directory)
        names = sorted(os.listdir(jobs))  # noqa: PTH208 # without a stat for each
    except FileNotFoundError:
        names = []
    except OSError as error:
        names = []
        found.append(f"{jobs} cannot be read ({error.strerror}): the jobs of the run are not shown")
    found += (
        _events_problem(jobs / name) for name in names if name not in known and not ARRAY_TASK.fullmatch(name)
    )
    return tuple(filter(None, found))


def unread_logs(directory: Path) -> tuple[str, ...]:
    """Logs of jobs that this user may not read."""
    try:
        names = sorted(os.listdir(directory))  # noqa: PTH208 # without a stat for each
    except OSError as error:
        return (f"{directory} cannot be read ({error.strerror})",)
    logs = (directory / name for name in names if name.endswith(".log"))
    return tuple(f"{log} cannot be read" for log in logs if not os.access(log, os.R_OK))


def _metrics_problem(directory: Path) -> str:
    path = directory / RunDirectory.METRICS
    try:
        open_regular(path).close()
    except FileNotFoundError:
        return f"{path} is missing: figures leave out all steps" if _has_trained(directory) else ""
    except OSError as error:
        return f"{path} cannot be read ({error.strerror}): steps are not shown"
    return ""


def _has_trained(directory: Path) -> bool:
    try:
        return os.access(directory / RunDirectory.LAST_STEP, os.F_OK) or bool(
            list_paths(RunDirectory.at(directory).checkpoints)
        )
    except OSError:
        return False


def _events_problem(job: Path) -> str:
    path = job / EVENTS
    try:
        refuse_foreign_link(path, job)
        with open_regular(path) as file:
            is_damaged = bool(file.read(1)) and not read_job(job)
    except (FileNotFoundError, NotADirectoryError):  # it has not started, or is no job
        return ""
    except OSError as error:
        return f"{path} cannot be read ({error.strerror}): attempts of this job are not shown"
    return f"{path} is damaged: attempts of this job are not shown" if is_damaged else ""
