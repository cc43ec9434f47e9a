"""Facts for resuming a run: how its last job was submitted, and why the run may not start again."""

from __future__ import annotations

from pathlib import Path

from hpcgen.config.stages import has_attempts
from hpcgen.errors import HpcgenError
from hpcgen.runs.attempts import read_attempts
from hpcgen.runs.control import LOCAL, RunJobs
from hpcgen.runs.failed import failed_text
from hpcgen.runs.submissions import read_submission
from hpcgen.slurm.submission import Submission
from trainer.contract.files.run_directory import RunDirectory
from trainer.contract.files.shared_files import foreign_link
from trainer.contract.record import record


@record
class LastJob:
    """The last job that trained, or ran the program, and how it was submitted."""

    job: str
    submission: Submission

    @property
    def is_local(self) -> bool:
        """True if it ran on this machine, without Slurm."""
        return self.job.startswith(LOCAL)


def last_job(run_dir: Path) -> LastJob:
    """The last job of a run that says how it was submitted.

    Raises:
        HpcgenError: there is none, or another user submitted it.
    """
    jobs = [each.job for each in read_attempts(run_dir) if has_attempts(each.stage)]
    hint = "submit the run with its run file: hpcgen submit train -c run.yaml"
    if not jobs:
        raise HpcgenError("no job of the run has trained yet", hint, where=run_dir)
    try:
        submission = read_submission(run_dir, jobs[-1])
    except PermissionError as error:
        raise HpcgenError(f"job {jobs[-1]} is not yours: {error.strerror}", hint, where=run_dir) from error
    if submission is None:
        reason = f"job {jobs[-1]} does not say how it was submitted, as jobs of hpcgen 0.2.0"
        raise HpcgenError(reason, hint, where=run_dir)
    return LastJob(jobs[-1], submission)


def require_no_job(jobs: RunJobs) -> None:
    """Refuses a run that a job trains, or is to train.

    Raises:
        HpcgenError: there is one.
    """
    queued = next((job for job in (*jobs.own, *jobs.others) if job.trains), None)
    if queued is not None:
        reason = f"job {queued.job} of {queued.user} {queued.in_words()}"
        raise HpcgenError(
            f"nothing to resume: {reason}", "stop it first with hpcgen stop", where=jobs.directory
        )
    if (local := jobs.local_training) is not None:
        reason = f"{local.job} runs on this machine"
        raise HpcgenError(
            f"nothing to resume: {reason}", "stop it first with hpcgen stop", where=jobs.directory
        )


def is_done(run_dir: Path) -> bool:
    """True if the run says that it is done."""
    return (run_dir / RunDirectory.DONE).is_file()


def failure(run_dir: Path) -> str:
    """Why another attempt would fail in the same way; empty if no attempt said so."""
    path = run_dir / RunDirectory.FAILED
    if foreign_link(path, run_dir) is not None:
        return f"{path} is a link that another user placed"
    text = failed_text(run_dir)
    return "" if text is None else text or f"{path} exists"
