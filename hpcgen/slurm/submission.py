"""The record of a submission in each job, so that hpcgen resume can submit the run again."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpcgen.config.shown import is_private
from hpcgen.slurm.job_files import ARRAY_TASK, JOBS, job_directory
from trainer.contract.files.regular_file import open_regular
from trainer.contract.files.shared_files import foreign_link, require_own
from trainer.contract.record import record

if TYPE_CHECKING:
    from hpcgen.run_plan.plan import Plan
    from hpcgen.run_plan.stage import StagePlan

SUBMISSION = "submission.json"
"""Name of the file in the directory of a job."""
_MOST_BYTES = 1 << 20


@record(kw_only=True)
class Submission:
    """The command that rendered or submitted a job."""

    stage: str
    run_file: str
    """Path of the run file."""
    sha256: str
    """Hash of the run file at that time."""
    overrides: tuple[str, ...]
    """Values of --set, without those that may be secret."""
    withheld: tuple[str, ...]
    """Keys of --set whose values may be secret."""
    templates: tuple[str, ...]
    """Directories of site templates."""
    secrets: tuple[str, ...] = ()
    """Names of the variables that are secrets. Empty in records of earlier versions."""


def submission_file(plan: Plan, stage: StagePlan, templates: Sequence[Path] = ()) -> dict[str, str]:
    """The record as a job file; none for stages that are not resumed, and without a run file."""
    run = plan.run
    if not stage.kind.has_attempts or run.file is None:
        return {}
    private = [each for each in run.overrides if _may_be_secret(each)]
    submission = Submission(
        stage=stage.name,
        run_file=str(run.file),
        sha256=run.sha256,
        overrides=tuple(each for each in run.overrides if each not in private),
        withheld=tuple(each.partition("=")[0] for each in private),
        templates=tuple(str(path.absolute()) for path in templates if (path / "slurm").is_dir()),
        secrets=stage.secrets,
    )
    return {SUBMISSION: f"{json.dumps(dataclasses.asdict(submission))}\n"}


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


def _may_be_secret(override: str) -> bool:
    key, _, value = override.partition("=")
    return is_private(key) or "://" in value
