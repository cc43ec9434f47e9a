"""The job of `hpcgen tune`: submitted, found again in the queue, and the results of its trials."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from hpcgen.errors import HpcgenError
from hpcgen.files import make_directory, write_text
from hpcgen.run_plan.plan import Plan
from hpcgen.run_plan.trials import STAGE as STAGE
from hpcgen.run_plan.trials import Candidate
from hpcgen.slurm import sbatch
from hpcgen.slurm.cluster_check import RESULT_DELAY_S, end_of
from hpcgen.slurm.job_files import job_directory
from trainer.contract.config import ConfigError, from_dict
from trainer.contract.files.regular_file import read_text
from trainer.contract.trials import DIRECTORY, TrialResult, result_path

JOB = "job"
"""File with the ID of the job that was submitted last, next to the results."""


def read_results(plan: Plan, candidates: Sequence[Candidate]) -> dict[str, TrialResult]:
    """The results so far, by the key of their trial.

    Raises:
        HpcgenError: a result cannot be read.
    """
    found = {}
    for candidate in candidates:
        path = result_path(plan.config.paths.run_dir, candidate.trial.key)
        try:
            found[candidate.trial.key] = from_dict(TrialResult, json.loads(read_text(path)), str(path))
        except FileNotFoundError:
            continue
        except (ValueError, ConfigError) as error:
            hint = "remove it to measure the layout again"
            raise HpcgenError(f"is no result of this version ({error})", hint, where=path) from error
    return found


def wait_for_results(plan: Plan, candidates: Sequence[Candidate]) -> None:
    """Waits until all results of a job that has ended are visible here, as on NFS, at most RESULT_DELAY_S."""
    deadline = time.monotonic() + RESULT_DELAY_S
    while len(read_results(plan, candidates)) < len(candidates) and time.monotonic() < deadline:
        time.sleep(0.5)


def forget_failures(plan: Plan, candidates: Sequence[Candidate]) -> None:
    """Deletes the results of trials that came to no measurement, so that a job repeats them."""
    for key, result in read_results(plan, candidates).items():
        if result.status != "measured":
            result_path(plan.config.paths.run_dir, key).unlink(missing_ok=True)


def submit(plan: Plan, script: str) -> str:
    """Submits the job and remembers it. Returns its ID.

    Raises:
        HpcgenError: see `sbatch.submit_script`.
    """
    run_dir, share = Path(plan.config.paths.run_dir), plan.config.share
    for directory in (run_dir, run_dir / DIRECTORY):
        make_directory(directory, share)
    job_id = sbatch.submit_script(plan, STAGE, script)
    write_text(run_dir / DIRECTORY / JOB, f"{job_id}\n", mode=0o644)
    return job_id


def submitted_job(plan: Plan) -> str | None:
    """The job that was submitted last, if it waits or runs."""
    job_id = _last_job(plan)
    return job_id if job_id and sbatch.state_of(job_id) is not None else None


def _last_job(plan: Plan) -> str:
    """The ID of the job that was submitted last; empty for none."""
    try:
        job_id = read_text(Path(plan.config.paths.run_dir) / DIRECTORY / JOB).strip()
    except (FileNotFoundError, ValueError):
        return ""
    return job_id if job_id.isdecimal() else ""


def end_of_log(plan: Plan) -> str:
    """The last lines of the log of the last job."""
    return end_of(Path(plan.config.paths.run_dir) / f"{STAGE}-{_last_job(plan)}.log")


def logs(plan: Plan) -> Path:
    """The directory with the logs of the trials of the last job."""
    return job_directory(Path(plan.config.paths.run_dir), _last_job(plan))


def calibration(plan: Plan) -> Path | None:
    """The file with what the job has measured for predictions; None if there is none."""
    path = str(plan.stages[STAGE].values["calibration"])
    return Path(path) if path and Path(path).exists() else None
