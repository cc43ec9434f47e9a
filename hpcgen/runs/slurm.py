"""Slurm's answer about all jobs of some users: one squeue, and one sacct for jobs that squeue no longer knows.

Both work with and without accounting, and end soon if the controller does not answer.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from hpcgen.config.stages import STAGE_ROWS, has_attempts
from hpcgen.slurm.programs import UNKNOWN_JOB, Answer, ask, ask_settings
from trainer.contract.record import record

_SEPARATOR = "\x1f"
_FORMATS = {"SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}
"""Variables for times as seconds since 1970, and for all numbers of the tasks of an array."""
_QUEUE_FIELDS = (
    "JobArrayID",
    "State",
    "Reason",
    "SubmitTime",
    "StartTime",
    "EndTime",
    "TimeLimit",
    "NodeList",
    "Dependency",
    "UserName",
    "Name",
    "STDOUT",
)
_ACCOUNT_FIELDS = ("JobID", "State", "ExitCode", "Submit", "Eligible", "Start", "End", "NodeList")
_OVER = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "REVOKED", "TIMEOUT"),
}
"""States of a job that has ended. A controller shows it for some minutes (MinJobAge)."""
_WAITS = frozenset(("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"))
_LOG = re.compile(rf"({'|'.join(sorted(STAGE_ROWS, key=len, reverse=True))})-[%\d].*\.log")
"""Name of the log of a job: STAGE-JOBID.log, with Slurm's %j or %A_%a in place of the ID."""
_MOST_ARGUMENT = 100_000
"""Characters of an argument. Linux refuses one of 128 KiB."""
_UNAVAILABLE = re.compile(r"^ReqNodeNotAvail, ?UnavailableNodes:(\S+)")
_UNLIMITED = frozenset(("UNLIMITED", "NOT_SET", "INVALID", ""))
_REASONS = {
    "None": "waits for Slurm's scheduler",
    "Resources": "waits for resources",
    "Priority": "waits behind jobs with a higher priority",
    "Dependency": "waits for its dependency",
    "DependencyNeverSatisfied": "will never start, because its dependency failed",
    "JobHeldUser": "held by a user",
    "JobHeldAdmin": "held by an admin",
    "BeginTime": "waits for its begin time",
    "JobArrayTaskLimit": "waits for other tasks of its array",
    "ReqNodeNotAvail": "needs nodes that are not available",
    "ReqNodeNotAvail, Reserved for maintenance": "waits for the end of a maintenance",
    "Nodes required for job are DOWN": "needs nodes that are down, drained or reserved",
    "Nodes_required_for_job_are_DOWN": "needs nodes that are down, drained or reserved",
    "NodeDown": "needs a node that is down",
    "PartitionDown": "waits, because its partition is down",
    "PartitionInactive": "waits, because its partition is inactive",
    "PartitionTimeLimit": "asks for more time than its partition allows",
    "PartitionNodeLimit": "asks for more nodes than its partition allows",
    "Reservation": "waits for its reservation",
    "Licenses": "waits for licenses",
    "BadConstraints": "asks for nodes that do not exist",
    "JobHoldMaxRequeue": "held, because it was requeued too often",
    "launch failed requeued held": "held, because a node could not start it",
}
"""Slurm's reason of a waiting job -> what it means."""
_STATES = {
    "RUNNING": "runs",
    "CONFIGURING": "waits for its nodes to start",
    "COMPLETING": "ends",
    "SUSPENDED": "is suspended",
}
"""Slurm's state of a job that does not wait in the queue -> what it does."""


@record(kw_only=True)
class QueuedJob:
    """A job that the controller knows, from squeue. Times are Unix times in seconds."""

    job: str
    """Job ID: 1234, 1234_5 for the task of an array, or 1234_[6-99%8] for tasks that wait."""
    state: str
    """Slurm's state, such as PENDING."""
    reason: str
    """Slurm's reason why the job waits or ended; "" for none."""
    submitted: float | None
    starts: float | None
    """When it started, or is expected to."""
    ends: float | None
    """When it ended, or reaches its time limit. None without a limit."""
    nodes: str
    """The job's nodes in Slurm's notation."""
    dependency: str
    """Jobs that it waits for, such as afterok:123."""
    user: str
    name: str
    log: str
    """Path of the job's log. It may contain Slurm's %j."""

    @property
    def is_over(self) -> bool:
        """True if it has ended."""
        return self.state in _OVER

    @property
    def waits(self) -> bool:
        """True if it has not started, or is to start again."""
        return self.state in _WAITS

    @property
    def run_dir(self) -> Path | None:
        """Run directory of a job of hpcgen, whose logs are in it; None for other jobs."""
        return Path(self.log).parent if self.stage else None

    @property
    def stage(self) -> str | None:
        """Stage of a job of hpcgen, from the name of its log; None for other jobs."""
        path = Path(self.log)
        match = _LOG.fullmatch(path.name) if path.is_absolute() else None
        return match[1] if match else None

    @property
    def trains(self) -> bool:
        """True for a job that trains, or runs the user's program: it can save, stop and continue."""
        return has_attempts(self.stage)

    @functools.cached_property
    def tasks(self) -> tuple[range, ...]:
        """Numbers of the tasks of the array that this job stands for; empty if it is no array."""
        return tuple(_task_ranges(self.job.partition("_")[2]))

    def in_words(self) -> str:
        """The activity of the job, or what it waits for: runs, waits for resources, waits for its dependency 123."""
        if not self.waits:
            return _STATES.get(self.state) or self.state.lower().replace("_", " ")
        if self.reason == "Dependency":
            jobs = ", ".join(dict.fromkeys(re.findall(r":(\d+)", self.dependency)))
            return f"{_REASONS[self.reason]} {jobs}".rstrip()
        kind = self.reason.partition(",")[0].partition(":")[0]
        if nodes := _UNAVAILABLE.search(self.reason):
            return f"{_REASONS[kind]}: {nodes[1]}"
        for known in (self.reason, kind):
            if known in _REASONS:
                return _REASONS[known]
        if self.reason.startswith(("QOS", "Assoc", "MaxJobs", "MaxCpu", "MaxMem", "MaxNode", "MaxTRES")):
            return f"waits for a limit of its account or QOS ({self.reason})"
        return f"waits ({self.reason})"


@record(kw_only=True)
class Queue:
    """All jobs of some users that the controller knows."""

    jobs: tuple[QueuedJob, ...] = ()
    problem: str = ""
    """Why there is no answer; "" if there is one. Then a job that is not in `jobs` is unknown to the controller."""
    asked: float = 0.0
    """When the controller was asked (Unix time in seconds)."""

    def find(self, job: str) -> QueuedJob | None:
        """The job with this ID; None if the controller does not know it, or has not answered."""
        if (found := self._by_id.get(job)) is not None:
            return found
        array, _, task = job.partition("_")
        if not task.isdecimal() or array not in self._waiting_tasks:
            return None
        single, several = self._waiting_tasks[array]
        number = int(task)
        return single.get(number) or next((queued for tasks, queued in several if number in tasks), None)

    @functools.cached_property
    def users(self) -> frozenset[str]:
        """Users of whom the controller shows a job. A site can hide the jobs of others (PrivateData)."""
        return frozenset(queued.user for queued in self.jobs)

    @functools.cached_property
    def _by_id(self) -> dict[str, QueuedJob]:
        return {queued.job: queued for queued in self.jobs}

    @functools.cached_property
    def _waiting_tasks(self) -> dict[str, tuple[dict[int, QueuedJob], list[tuple[range, QueuedJob]]]]:
        """ID of an array -> the jobs that stand for several of its tasks: by numbers that squeue lists one by one, and
        by ranges. An array can have thousands of either.
        """
        found: dict[str, tuple[dict[int, QueuedJob], list[tuple[range, QueuedJob]]]] = {}
        for queued in self.jobs:
            if "[" not in queued.job:
                continue
            single, several = found.setdefault(queued.job.partition("_")[0], ({}, []))
            for tasks in queued.tasks:
                if len(tasks) == 1:
                    single.setdefault(tasks[0], queued)
                else:
                    several.append((tasks, queued))
        return found

    def of_run(self, run_dir: Path) -> tuple[QueuedJob, ...]:
        """Jobs of this run that wait or run."""
        paths = dict.fromkeys((run_dir.absolute(), run_dir.resolve()))
        return tuple(job for path in paths for job in self._by_run.get(path, ()))

    @functools.cached_property
    def _by_run(self) -> dict[Path, list[QueuedJob]]:
        found: dict[Path, list[QueuedJob]] = {}
        for queued in self.jobs:
            if not queued.is_over and (run_dir := queued.run_dir) is not None:
                found.setdefault(run_dir, []).append(queued)
        return found


@record(kw_only=True)
class AccountedJob:
    """A job in Slurm's accounting database. Times are Unix times in seconds."""

    job: str
    state: str
    """Slurm's state, such as NODE_FAIL. CANCELLED without the user's number."""
    status: int | None
    """Exit status of the batch script."""
    submitted: float | None
    eligible: float | None
    started: float | None
    ended: float | None
    nodes: str


@record(kw_only=True)
class Accounts:
    """Jobs in the accounting database, by ID. Of a job that was requeued, its last attempt."""

    jobs: Mapping[str, AccountedJob]
    problem: str = ""
    """Why there is no answer, such as accounting that is turned off; "" if there is one."""


NO_ACCOUNTS = Accounts(jobs={})


def ask_queue(users: Iterable[int]) -> Queue:
    """Asks the controller for all jobs of these users, given by number, including jobs that ended minutes ago."""
    return _ask_queue("--states=all", f"--user={','.join(str(user) for user in sorted(set(users)))}")


def ask_job(job: str) -> Queue:
    """Asks the controller for one job, or all tasks of an array. A job that it does not know is no problem."""
    found = _ask_queue("--states=all", f"--jobs={job}")
    return Queue(asked=found.asked) if UNKNOWN_JOB in found.problem else found


def ask_cluster() -> str:
    """Slurm's name of this cluster; "" without an answer."""
    settings, _ = ask_settings()
    return settings.get("ClusterName", "")


def ask_node(node: str) -> Queue:
    """Asks the controller for the jobs on a node."""
    return _ask_queue(f"--nodelist={node}")


def _ask_queue(*options: str) -> Queue:
    asked = time.time()
    form = ",".join(f"{field}:{_SEPARATOR}" for field in _QUEUE_FIELDS)
    answer = ask("squeue", "--noheader", *options, f"--Format={form}", environment=_FORMATS)
    jobs = tuple(map(_queued, _rows(answer, len(_QUEUE_FIELDS))))
    return Queue(jobs=jobs, problem=answer.problem, asked=asked)


def ask_accounts(jobs: Iterable[str]) -> Accounts:
    """Asks the accounting database for jobs, ten thousand per call. Sites without it answer with a problem."""
    found: dict[str, AccountedJob] = {}
    for numbers in _arguments(sorted(set(jobs))):
        answer = ask(
            "sacct",
            "--noheader",
            "--allocations",
            "--parsable2",
            f"--delimiter={_SEPARATOR}",
            f"--format={','.join(_ACCOUNT_FIELDS)}",
            f"--jobs={numbers}",
            environment=_FORMATS,
        )
        if answer.problem:
            return Accounts(jobs=found, problem=answer.problem)
        found |= {job.job: job for job in map(_accounted, _rows(answer, len(_ACCOUNT_FIELDS)))}
    return Accounts(jobs=found)


def _arguments(jobs: Sequence[str]) -> Iterator[str]:
    """The jobs, separated by commas, in texts that Linux accepts as arguments."""
    first, length = 0, 0
    for number, job in enumerate(jobs):
        if length + len(job) >= _MOST_ARGUMENT:
            yield ",".join(jobs[first:number])
            first, length = number, 0
        length += len(job) + 1
    if jobs:
        yield ",".join(jobs[first:])


def _rows(answer: Answer, fields: int) -> Iterator[list[str]]:
    """The values of each line. Other lines are left out: the name of a job may contain a newline."""
    for line in () if answer.problem else answer.lines:
        values = [value.strip() for value in line.removesuffix(_SEPARATOR).split(_SEPARATOR)]
        if len(values) == fields:
            yield ["" if value in ("(null)", "N/A") else value for value in values]


def _queued(values: list[str]) -> QueuedJob:
    job, state, reason, submitted, starts, ends, limit, nodes, dependency, user, name, log = values
    is_over = state in _OVER
    return QueuedJob(
        job=job,
        state=state,
        reason="" if reason == "None" and not state.startswith("PENDING") else reason,
        submitted=_time(submitted),
        starts=_time(starts),
        ends=None if limit in _UNLIMITED and not is_over else _time(ends),
        nodes=nodes,
        dependency=dependency,
        user=user,
        name=name,
        log=log,
    )


def _accounted(values: list[str]) -> AccountedJob:
    job, state, status, submitted, eligible, started, ended, nodes = values
    number = status.partition(":")[0]
    return AccountedJob(
        job=job,
        state=state.partition(" ")[0],
        status=int(number) if number.isdecimal() else None,
        submitted=_time(submitted),
        eligible=_time(eligible),
        started=_time(started),
        ended=_time(ended),
        nodes="" if nodes == "None assigned" else nodes,
    )


def _time(text: str) -> float | None:
    return float(text) if text.isdecimal() else None


def _task_ranges(text: str) -> Iterator[range]:
    """The numbers in a list of tasks: 5, [6-9], [1-9:2,20%4]."""
    for part in text.strip("[]").partition("%")[0].split(","):
        if match := re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part):
            first = int(match[1])
            yield range(first, int(match[2] or first) + 1, int(match[3] or 1) or 1)
