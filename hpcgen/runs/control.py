"""Stopping and canceling a run: finds its jobs, and asks Slurm or the local process. Only for the user's own jobs."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from hpcgen.config.stages import has_attempts
from hpcgen.errors import HpcgenError
from hpcgen.runs.attempts import JobAttempt, read_attempts, read_job
from hpcgen.runs.files import require_run_directory, users_of
from hpcgen.runs.slurm import QueuedJob, ask_cluster, ask_queue
from hpcgen.runs.state import process_is_gone
from hpcgen.slurm.job_files import job_directory
from hpcgen.slurm.run_directory import STOP_FILE, hold
from hpcgen.text import counted
from trainer.contract.files.run_directory import RunDirectory, publish
from trainer.contract.files.shared_files import require_own, user
from trainer.contract.record import record

HOLD = "hold"
"""Name of the file in the job's directory. With it, its script does not requeue itself (templates/lib/attempts.sh)."""
LOCAL = "local-"
"""Beginning of the name of a job on this machine."""
POLL_S = 0.5
SLURM_S = 10.0
"""Time between two questions to Slurm while a job is to stop."""
CLOCKS_S = 300.0
"""Most by which the clocks of nodes may differ."""


@record(kw_only=True)
class RunJobs:
    """The jobs of a run that wait or run."""

    directory: Path
    own: tuple[QueuedJob, ...]
    """The user's own, those that wait first."""
    others: tuple[QueuedJob, ...]
    """Jobs of other users."""
    local: tuple[JobAttempt, ...]
    """Jobs that `hpcgen submit --launcher local` runs on this machine."""
    has_started: bool
    """False if no job of the run has ever started."""

    @property
    def training(self) -> QueuedJob | None:
        """The user's job that trains or runs the program now; None if there is none."""
        return next((job for job in self.own if not job.waits and job.trains), None)

    @property
    def waiting(self) -> tuple[QueuedJob, ...]:
        """The user's jobs that would train."""
        return tuple(job for job in self.own if job.waits and job.trains)

    @property
    def local_training(self) -> JobAttempt | None:
        """The job on this machine that trains or runs the program now; None if there is none."""
        return next((job for job in self.local if has_attempts(job.stage)), None)

    def why_nothing_runs(self) -> str:
        """Why there is nothing to stop or cancel."""
        if self.others:
            owners = ", ".join(sorted({job.user for job in self.others}))
            return f"its {counted(len(self.others), 'job')} belong to {owners}, and only they can end them"
        for marker, words in (
            (RunDirectory.DONE, "it is done"),
            (RunDirectory.FAILED, "it has failed"),
            (RunDirectory.STOPPED, "it has stopped at a checkpoint"),
        ):
            if (self.directory / marker).is_file():
                return f"{words}, and no job of it waits or runs"
        return "no job of it waits or runs" if self.has_started else "no job of it has started, or waits"


def find_jobs(run_dir: Path) -> RunJobs:
    """The jobs of a run, from one squeue.

    Raises:
        HpcgenError: the directory cannot be read, Slurm does not answer, or the run is on another cluster.
    """
    require_run_directory(run_dir)
    attempts = read_attempts(run_dir)
    queue = ask_queue(users_of(run_dir))
    is_local = bool(attempts) and all(attempt.job.startswith(LOCAL) for attempt in attempts)
    if queue.problem and not is_local:
        hint = "run this on a login node of the cluster, or try again when Slurm answers"
        raise HpcgenError(f"the jobs of the run are unknown: {queue.problem}", hint, where=run_dir)
    jobs = sorted(queue.of_run(run_dir), key=lambda job: not job.waits)
    if not queue.problem:
        _require_this_cluster(run_dir, attempts, jobs)
    me = user(os.geteuid())
    return RunJobs(
        directory=run_dir,
        own=tuple(job for job in jobs if job.user == me),
        others=tuple(job for job in jobs if job.user != me),
        local=tuple(attempt for attempt in attempts if _runs_here(attempt, run_dir)),
        has_started=bool(attempts),
    )


def _require_this_cluster(run_dir: Path, attempts: Sequence[JobAttempt], jobs: Sequence[QueuedJob]) -> None:
    """Refuses a run whose last job may run or wait on another cluster, which this one knows nothing of.

    Raises:
        HpcgenError: it may.
    """
    trained = [each for each in attempts if has_attempts(each.stage) and not each.job.startswith(LOCAL)]
    if not trained or any(job.job == trained[-1].job for job in jobs):
        return
    last = trained[-1]
    if last.ended is not None and last.verdict != "requeued":
        return
    here = ask_cluster() if last.cluster else ""
    if here and here != last.cluster:
        hint = f"run this on {last.cluster}; if it does not go on there, submit the run with its run file"
        reason = f"job {last.job} of cluster {last.cluster} may go on, and this is cluster {here}"
        raise HpcgenError(reason, hint, where=run_dir)


def ask_to_stop(run_dir: Path, job: str) -> bool:
    """Asks a running job to save and to leave for good. Cancels one that has not begun, and returns False.

    Raises:
        HpcgenError: Slurm refuses, the job's program cannot save, or the job's directory is not the user's.
    """
    if not job_directory(run_dir, job).is_dir():
        cancel([job])
        return False
    _require_saves(run_dir, job)
    _write(run_dir, job, HOLD)
    _call("scancel", "--batch", "--signal=USR2", job)
    return True


def _require_saves(run_dir: Path, job: str) -> None:
    """Refuses a job that takes no request to stop.

    Raises:
        HpcgenError: it is one.
    """
    attempt = last_attempt(run_dir, job)
    if attempt is not None and attempt.events[0].get("asks") == "":
        hint = "set program.stop in the run file; hpcgen cancel ends it at once"
        raise HpcgenError(f"job {job} goes on: its program cannot be asked to save", hint)


def _write(run_dir: Path, job: str, name: str) -> None:
    """Writes an empty file into the job's directory.

    Raises:
        HpcgenError: it cannot be written, or the directory is not the user's.
    """
    directory = job_directory(run_dir, job)
    try:
        publish(hold(directory, run_dir) / name, "")
    except OSError as error:
        where = Path(error.filename or directory)
        raise HpcgenError(f"cannot be written: {error.strerror}", where=where) from error


def withdraw(run_dir: Path, job: str) -> None:
    """Forgets the request to stop. Another cluster may have a job with the same number in this run."""
    with contextlib.suppress(OSError):
        (job_directory(run_dir, job) / HOLD).unlink()


def last_attempt(run_dir: Path, job: str) -> JobAttempt | None:
    """The attempt of a job that began last. A job of another cluster may have the same number, and more restarts."""
    return max(read_job(job_directory(run_dir, job)), key=lambda attempt: attempt.began, default=None)


def cancel(jobs: Iterable[str]) -> None:
    """Cancels jobs in this order, so that those that wait do not take the place of those that run.

    Raises:
        HpcgenError: Slurm refuses.
    """
    _call("scancel", *jobs)


def ask_local_to_stop(run_dir: Path, job: str) -> None:
    """Asks a job on this machine to save and stop. Asking again changes nothing.

    Raises:
        HpcgenError: the job's program cannot save, or the job's directory is not the user's.
    """
    _require_saves(run_dir, job)
    _write(run_dir, job, STOP_FILE)


def end_local(attempt: JobAttempt) -> None:
    """Ends a job on this machine. Training has 30 seconds to save.

    Raises:
        HpcgenError: the process belongs to another user.
    """
    pid = attempt.events[0]["pid"]
    try:
        os.kill(int(pid), signal.SIGTERM)
    except ProcessLookupError:
        return
    except PermissionError as error:
        raise HpcgenError(f"process {pid} of {attempt.job} belongs to another user") from error


def _runs_here(attempt: JobAttempt, directory: Path) -> bool:
    """True if the user's own process on this machine runs the job. Others can write events for jobs of their own."""
    start = attempt.events[0]
    pid = start.get("pid", "")
    if not attempt.job.startswith(LOCAL) or attempt.ended is not None or not pid.isdecimal():
        return False
    if start.get("host") != socket.gethostname() or process_is_gone(start.get("host"), pid):
        return False
    try:
        require_own(job_directory(directory, attempt.job).stat(), directory)
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:
        return False
    started = time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")
    return started <= attempt.began + 2  # a later process with the same number is another one


def _call(program: str, *arguments: str) -> None:
    try:
        done = subprocess.run((program, *arguments), capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise HpcgenError(f"{program}: no such program", "run this on a login node of the cluster") from error
    if done.returncode:
        raise HpcgenError(f"{program} failed: {done.stderr.strip() or f'status {done.returncode}'}")


Step = Literal["asked", "taken", "ended", "canceled", "lost"]
"""Fate of a request to stop. asked: the job's script has not taken it yet. canceled: the job was in the
queue again, as one of hpcgen 0.2.0, which knows no `hold`. lost: it ended without an event, because it was killed."""


def follow_stop(run_dir: Path, job: str, asked: float) -> Iterator[Step]:
    """Yields what has become of a request to stop, twice a second, until the job has ended.

    `asked` is the time of the request.

    Raises:
        HpcgenError: Slurm refuses to cancel a job that is in the queue again.
    """
    looked = asked
    step: Step = "asked"
    while True:
        attempt = last_attempt(run_dir, job)
        events = attempt.events if attempt is not None else ()
        # the clock of the node may be behind that of this machine
        if any(event["event"] == "stop" and event["time"] >= asked - CLOCKS_S for event in events):
            step = "taken"
        if attempt is not None and attempt.ended is not None and attempt.verdict != "requeued":
            if step == "taken":
                yield step  # also if it has taken the request and ended since the last look
            yield "ended"
            return
        yield step
        time.sleep(POLL_S)
        if job.startswith(LOCAL):
            is_gone = attempt is None or not _runs_here(attempt, run_dir)
            if is_gone and last_attempt(run_dir, job) == attempt:  # it has not written its end meanwhile
                yield "lost"
                return
        elif time.time() > looked + SLURM_S:  # each question costs the controller
            looked = time.time()
            queue = ask_queue([os.geteuid()])
            found = queue.find(job)
            if found is not None and found.waits:
                cancel([job])
                yield "canceled"
                return
            if (
                not queue.problem
                and (found is None or found.is_over)
                and last_attempt(run_dir, job) == attempt
            ):
                yield "lost"
                return
