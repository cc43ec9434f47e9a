"""The status of a run: what its directory says, and what Slurm knows about its jobs. Pure.

The directory decides. Slurm tells which jobs wait, and whether a job without a recorded end still runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from hpcgen.config.stages import STAGE_ROWS, has_attempts
from hpcgen.logs.failure import Failure
from hpcgen.redaction import redact
from hpcgen.runs.attempts import JobAttempt
from hpcgen.runs.files import ArrayFiles, Disk, RunFiles, SavedCheckpoints
from hpcgen.runs.latest import Latest
from hpcgen.runs.program import ProgramProgress
from hpcgen.runs.slurm import AccountedJob, Accounts, Queue, QueuedJob
from hpcgen.runs.state import SILENT_S, AttemptState, RunState
from trainer.contract.files.metrics_line import number_or_none
from trainer.contract.files.shared_files import user
from trainer.contract.record import record

TRAIN = next(name for name, row in STAGE_ROWS.items() if row.trains)
ACTIVE_S = 120.0
"""A run with a sign of activity within this time runs, even if Slurm does not show its job to this user."""
_ENDED = {
    "CANCELLED": "canceled",
    "PREEMPTED": "preempted",
    "TIMEOUT": "killed at its time limit",
    "DEADLINE": "killed at its deadline",
    "NODE_FAIL": "a node failed",
    "BOOT_FAIL": "a node did not start",
    "OUT_OF_MEMORY": "killed, because it used more memory than Slurm allows",
    "REVOKED": "revoked: it runs on another cluster",
    "FAILED": "its batch script was killed or failed",
    "COMPLETED": "it completed",
}
"""Slurm's state of a job that ended without a verdict -> what happened."""


@record(kw_only=True)
class AttemptStatus:
    """An attempt of a job that is no array. Times are Unix times in seconds."""

    job: str
    restart: int
    stage: str
    state: AttemptState
    reason: str
    """Why it ended, in the words of the job's script or of Slurm; "" for a running one."""
    began: float
    ended: float | None
    status: int | None
    """Exit status of its batch script."""
    nodes: str
    spares: tuple[str, ...]
    """Nodes that spare nodes replaced during the attempt."""
    restarts_in_job: int
    """How often the job started its ranks again after a crash, without a requeue."""
    asked_to_stop: bool
    """True if it was asked to save and stop, by a user or before the time limit."""
    failure: Failure | None = None
    """The cause in the logs of the last attempt that ended with a failure."""


@record(kw_only=True)
class JobStatus:
    """A job of the run that waits or runs, from Slurm. Times are Unix times in seconds."""

    job: str
    stage: str
    state: str
    """Slurm's state, such as PENDING."""
    words: str
    """The words for its state, such as `waits for resources`."""
    tasks: int
    """Number of tasks of an array; 0 for other jobs."""
    starts: float | None
    ends: float | None
    nodes: str


@record(kw_only=True)
class DataStage:
    """Progress of a data stage. An output is a file, or the several files that one input becomes."""

    stage: str
    outputs: int
    done: int
    running: int
    failed: int
    waiting: int
    remaining_s: float | None
    errors: tuple[str, ...]
    """Messages of failed outputs, at most MOST_ERRORS."""


@record(kw_only=True)
class ArrayStatus:
    """The tasks of the newest array of a data stage."""

    job: str
    stage: str
    done: int
    running: int
    waiting: int
    """Tasks in the queue; 0 if Slurm does not answer."""
    failed: int
    terminated: int
    """Tasks that Slurm ended: canceled, preempted, out of time."""
    killed: int
    """Tasks without a verdict that Slurm no longer knows."""
    unknown: int
    """Tasks without a verdict, if Slurm does not answer."""
    reasons: tuple[str, ...]
    """Why tasks failed, of a few."""


@record(kw_only=True)
class TrainingStatus:
    """Progress of the training. A figure is None if it is not known."""

    iteration: int | None
    train_iters: int | None
    loss: float | None
    tokens_per_s: float | None
    mfu: float | None
    step_time_s: float | None
    """Seconds per step, without saves and evaluations."""
    pace_s: float | None
    """Seconds per step with them, over the last lines of the attempt."""
    reported: float | None
    """When these figures were recorded (Unix time in seconds)."""
    ends: float | None
    """When the last iteration is expected at this pace, if the run goes on (Unix time in seconds)."""
    time_limit: float | None
    """When the job reaches its time limit, if that comes first (Unix time in seconds)."""


@record(kw_only=True)
class RunStatus:
    """The status of a run."""

    directory: str
    name: str
    owner: str
    state: RunState
    why: str
    """Reason for the state, in one line."""
    active: float | None
    """Last sign of activity (Unix time in seconds)."""
    training: TrainingStatus | None
    program: ProgramProgress | None
    """Progress of a program of the user."""
    data: tuple[DataStage, ...]
    arrays: tuple[ArrayStatus, ...]
    jobs: tuple[JobStatus, ...]
    attempts: tuple[AttemptStatus, ...]
    checkpoints: SavedCheckpoints | None
    excluded: dict[str, float]
    """Nodes that jobs avoid, and until when (Unix time in seconds)."""
    disk: Disk | None
    problems: tuple[str, ...]
    """Questions that could not be answered, and why."""


MOST_ERRORS = 3


def unsettled_jobs(runs: Iterable[RunFiles], queue: Queue) -> tuple[str, ...]:
    """Jobs with an attempt without an end that the controller does not know: only accounting tells why they ended."""
    if queue.problem:
        return ()
    last = (attempt for run in runs for attempt in _not_superseded(run.attempts))
    return tuple(
        attempt.job
        for attempt in last
        if attempt.ended is None and _is_slurms(attempt) and queue.find(attempt.job) is None
    )


def status_of(run: RunFiles, queue: Queue, accounts: Accounts, now: float) -> RunStatus:
    """The status of a run at the time `now` (Unix time in seconds)."""
    jobs = queue.of_run(run.directory)
    last = {id(attempt) for attempt in _not_superseded(run.attempts)}
    attempts = tuple(
        _attempt_status(attempt, run, queue, accounts, now, is_last=id(attempt) in last)
        for attempt in run.attempts
    )
    arrays = tuple(_array_status(array, queue, run.secrets) for array in run.arrays)
    state, why = _state(run, attempts, arrays, jobs, queue, now)
    ends = next((job.ends for job in jobs if job.state == "RUNNING" and has_attempts(job.stage)), None)
    goes_on = state in ("running", "waiting", "silent") and _keeps_its_pace(run, attempts)
    return RunStatus(
        directory=str(run.directory),
        name=run.name,
        owner=user(run.owner),
        state=state,
        why=" ".join(why.split()),
        active=_active(run),
        training=_training(run, ends, now, goes_on=goes_on),
        program=run.program,
        data=_data(run),
        arrays=arrays,
        jobs=tuple(map(_job_status, jobs)),
        attempts=attempts,
        checkpoints=run.checkpoints,
        excluded=run.excluded,
        disk=run.disk,
        problems=tuple(filter(None, (queue.problem, run.data_problem, *run.unread))),
    )


def _keeps_its_pace(run: RunFiles, attempts: Iterable[AttemptStatus]) -> bool:
    """False if the running attempt has not begun to train, or was asked to stop: its pace tells no end."""
    last = next(
        (each for each in reversed(tuple(attempts)) if each.state == "running" and each.stage == TRAIN), None
    )
    return last is None or not (last.asked_to_stop or (run.latest.last_time or 0.0) < last.began)


def _active(run: RunFiles) -> float | None:
    """When the run last wrote something."""
    times = [run.latest.last_time, *(attempt.ended or attempt.began for attempt in run.attempts)]
    times += [array.active for array in run.arrays]
    return max((time for time in times if time is not None), default=None)


def _not_superseded(attempts: Iterable[JobAttempt]) -> Iterable[JobAttempt]:
    """The last attempt of each job. Of jobs that train, only the last one: it found that no other job runs."""
    last = {"" if has_attempts(attempt.stage) else attempt.job: attempt for attempt in attempts}
    return last.values()


def _is_slurms(attempt: JobAttempt) -> bool:
    """False for a job of the local launcher."""
    return attempt.job.isdecimal()


def _attempt_status(
    attempt: JobAttempt, run: RunFiles, queue: Queue, accounts: Accounts, now: float, *, is_last: bool
) -> AttemptStatus:
    state: AttemptState = attempt.verdict or "failed"
    reason = redact(attempt.reason, run.secrets)
    if attempt.ended is None:
        job = _in_queue(attempt, run, queue)
        state, reason = "killed", _how_it_ended(job or accounts.jobs.get(attempt.job))
        if is_last and attempt.job not in run.gone:
            is_active = attempt.stage == TRAIN and now - (run.latest.last_time or 0.0) < ACTIVE_S
            state, reason = _open_attempt(attempt, run, job, queue, reason, is_active=is_active)
    lost = (event.get("lost", "") for event in attempt.events if event["event"] == "spare")
    return AttemptStatus(
        job=attempt.job,
        restart=attempt.restart,
        stage=attempt.stage,
        state=state,
        reason=reason,
        began=attempt.began,
        ended=attempt.ended,
        status=attempt.status,
        nodes=attempt.nodes,
        spares=tuple(name for names in lost for name in names.split()),
        restarts_in_job=sum(event["event"] == "restart_in_job" for event in attempt.events),
        asked_to_stop=any(event["event"] == "stop" for event in attempt.events),
    )


def _in_queue(attempt: JobAttempt, run: RunFiles, queue: Queue) -> QueuedJob | None:
    """The attempt's job. A job of another run may have its number, if the run is from another cluster."""
    job = queue.find(attempt.job)
    if job is None or job.run_dir is None or job.run_dir in run.paths:
        return job
    return None


def _open_attempt(
    attempt: JobAttempt, run: RunFiles, job: QueuedJob | None, queue: Queue, killed: str, *, is_active: bool
) -> tuple[AttemptState, str]:
    """State of the last attempt without a recorded end, and why it ended."""
    if attempt.began > queue.asked:
        return "running", ""
    if job is not None and not job.is_over:
        return ("killed", "Slurm requeued it") if job.waits else ("running", "")
    if job is None and (is_active or not _is_slurms(attempt)):
        return "running", ""
    may_be_hidden = job is None and not run.is_own and user(run.owner) not in queue.users
    return ("unknown", "") if queue.problem or may_be_hidden else ("killed", killed)


def _how_it_ended(job: QueuedJob | AccountedJob | None) -> str:
    """How an attempt without a verdict ended, as far as Slurm knows."""
    if job is None or job.state not in _ENDED:
        return "it ended without a verdict: it was killed, or its first node was lost"
    return f"{_ENDED[job.state]}, according to Slurm"


def _state(
    run: RunFiles,
    attempts: Sequence[AttemptStatus],
    arrays: Sequence[ArrayStatus],
    jobs: Sequence[QueuedJob],
    queue: Queue,
    now: float,
) -> tuple[RunState, str]:
    """State of the run and the reason. The stage that trains decides, if there is one."""
    trains = [attempt for attempt in attempts if has_attempts(attempt.stage)]
    decisive = trains or attempts
    if trains or run.state is not None:
        jobs = [job for job in jobs if has_attempts(job.stage)]
    waiting = next((job for job in jobs if job.waits), None)
    is_running = any(attempt.state == "running" for attempt in decisive) or any(not job.waits for job in jobs)
    if run.state == "done" or (run.state == "failed" and not jobs):
        return run.state, run.word
    if is_running:
        return _running(run, decisive, now)
    if waiting is not None:
        return "waiting", f"job {waiting.job} {waiting.in_words()}"
    if not decisive:
        return _from_data(run, arrays) if run.state is None else (run.state, run.word)
    return _ended(run, decisive[-1], queue)


def _running(run: RunFiles, attempts: Sequence[AttemptStatus], now: float) -> tuple[RunState, str]:
    """A run with a running job. Until its training writes metrics, an earlier attempt's are shown."""
    training = [attempt for attempt in attempts if attempt.state == "running" and attempt.stage == TRAIN]
    if not training:
        return "running", ""
    began, last = training[-1].began, run.latest.last_time
    if last is None or last < began:
        return ("running", "starting") if now - began < SILENT_S else ("silent", run.word)
    if run.state in ("hung", "silent"):
        return run.state, run.word
    return "running", "asked to save a checkpoint and stop" if training[-1].asked_to_stop else ""


def _ended(run: RunFiles, last: AttemptStatus, queue: Queue) -> tuple[RunState, str]:
    """A run without a job that waits or runs, as far as Slurm knows."""
    if last.state == "done":
        return "done", last.reason
    if last.state == "failed":
        return "failed", last.reason
    if last.state in ("stopped", "terminated"):
        return "stopped", last.reason
    if last.state == "requeued":
        if queue.problem:
            return "waiting", last.reason
        return "stopped", f"{last.reason}; job {last.job} is no longer in the queue"
    if last.state == "killed":
        return ("hung", run.word) if run.state == "hung" else ("died", last.reason)
    return (run.state, run.word) if run.state is not None else ("silent", "")


def _from_data(run: RunFiles, arrays: Sequence[ArrayStatus]) -> tuple[RunState, str]:
    """A run without attempts of other stages than those of its corpus. Its newest array decides."""
    if not arrays:
        return "new", "no job has started here (hpcgen runs finds runs below a directory)"
    last = max(zip(run.arrays, arrays, strict=True), key=lambda pair: pair[0].began)[1]
    if last.running:
        return "running", ""
    if last.unknown:
        return "silent", "Slurm does not answer"
    if last.failed:
        return "failed", last.reasons[0]
    if last.killed:
        return "died", f"{last.killed:,} tasks of {last.stage} ended without a verdict: they were killed"
    if last.terminated:
        return "stopped", f"Slurm ended {last.terminated:,} tasks of {last.stage}"
    return "done", ""


def _array_status(array: ArrayFiles, queue: Queue, secrets: Collection[str]) -> ArrayStatus:
    jobs = [queue.find(task) for task in array.open]
    live = sum(job is not None and not job.is_over and not job.waits for job in jobs)
    waiting = sum(
        sum(map(len, job.tasks)) for job in queue.jobs if job.waits and job.job.partition("_")[0] == array.job
    )
    again = sum(job is not None and job.waits for job in jobs)
    left = len(array.open) - live - again
    return ArrayStatus(
        job=array.job,
        stage=array.stage,
        done=array.ended.get("done", 0),
        running=live,
        waiting=waiting,
        failed=array.ended.get("failed", 0),
        terminated=array.ended.get("terminated", 0),
        killed=0 if queue.problem else left,
        unknown=left if queue.problem else 0,
        reasons=tuple(redact(reason, secrets) for reason in array.reasons),
    )


def _training(run: RunFiles, limit: float | None, now: float, *, goes_on: bool) -> TrainingStatus | None:
    latest = run.latest
    section = run.config.get("training", {})
    train_iters = number_or_none(latest.start.get("train_iters") or section.get("train_iters"))
    if latest.iteration is None:
        return None
    ends = _expected_end(latest, train_iters, now) if goes_on else None
    return TrainingStatus(
        iteration=latest.iteration,
        train_iters=None if train_iters is None else int(train_iters),
        loss=number_or_none(latest.step.get("loss")),
        tokens_per_s=number_or_none(latest.step.get("tokens_per_s")),
        mfu=number_or_none(latest.step.get("mfu")),
        step_time_s=number_or_none(latest.step.get("step_time_s")),
        pace_s=latest.pace_s,
        reported=number_or_none(latest.step.get("time")),
        ends=ends,
        time_limit=limit if ends is not None and limit is not None and limit < ends else None,
    )


def _expected_end(latest: Latest, train_iters: float | None, now: float) -> float | None:
    pace, reported = latest.pace_s, number_or_none(latest.step.get("time"))
    if train_iters is None or pace is None or reported is None or latest.iteration is None:
        return None
    return max(now, reported + (train_iters - latest.iteration) * pace)


def _data(run: RunFiles) -> tuple[DataStage, ...]:
    return tuple(
        DataStage(
            stage=stage.stage,
            outputs=stage.units,
            done=stage.done,
            running=stage.running,
            failed=stage.failed,
            waiting=stage.missing,
            remaining_s=stage.remaining_s,
            errors=tuple(error for task in stage.tasks for error in task.errors)[:MOST_ERRORS],
        )
        for stage in run.data
    )


def _job_status(job: QueuedJob) -> JobStatus:
    return JobStatus(
        job=job.job,
        stage=job.stage or "",
        state=job.state,
        words=job.in_words(),
        tasks=sum(map(len, job.tasks)),
        starts=job.starts,
        ends=job.ends,
        nodes=job.nodes,
    )
