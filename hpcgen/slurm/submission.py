"""The record of a submission in each job, with which hpcgen resume submits the run again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpcgen.config.shown import is_private
from trainer.contract.record import record

if TYPE_CHECKING:
    from hpcgen.run_plan.plan import Plan
    from hpcgen.run_plan.stage import StagePlan

SUBMISSION = "submission.json"
"""Name of the file in the directory of a job."""


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


def _may_be_secret(override: str) -> bool:
    key, _, value = override.partition("=")
    return is_private(key) or "://" in value
