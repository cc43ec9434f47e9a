"""Runs stages on this machine through submitit's local executor, one after another."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from submitit import LocalExecutor

from hpcgen.config.program import StopConfig
from hpcgen.data.progress import progress_path
from hpcgen.errors import JobFailed, JobStopped
from hpcgen.files import write_text
from hpcgen.planning.kind import Stage
from hpcgen.planning.paths import corpus_job
from hpcgen.run_plan.plan import Plan
from hpcgen.run_plan.stage import StagePlan
from hpcgen.slurm.corpus import check_corpus, missing_tasks
from hpcgen.slurm.events import record_launch, record_stop, recorded
from hpcgen.slurm.job import Job, Progress
from hpcgen.slurm.processes import kill_tree, term_exits
from hpcgen.slurm.run_directory import (
    STOP_FILE,
    Followed,
    make_job_directory,
    make_run_directory,
    sharing,
)
from hpcgen.slurm.shell import of_outer_launcher, without
from hpcgen.slurm.submission import submission_file
from hpcgen.slurm.submittable import require_this_machine
from hpcgen.slurm.tasks import ModuleTask, ShellTask
from trainer.contract.files.regular_file import read_bytes, read_text
from trainer.contract.files.run_directory import RunDirectory

POLL_S = 0.3
TERMINATION_TIMEOUT_S = 30.0
"""Time between SIGTERM and SIGKILL, in which a stage saves and removes private files, as with Slurm."""


def run_stages(plan: Plan, on_progress: Callable[[Progress], None] | None) -> list[Job]:
    """Runs the planned stages in order and waits for each.

    Ctrl-C requests a checkpoint from training and waits for it. A second Ctrl-C ends training at once. Ctrl-C ends
    other stages, and SIGTERM ends any stage; training then has TERMINATION_TIMEOUT_S to save. No process of a stage is
    left when this returns or raises. If training saved before it ended, a message says so.

    Raises:
        HpcgenError: see `require_this_machine`, or the corpus cannot be fetched or does not fit.
        PackageNotFoundError: see `require_this_machine`.
        JobFailed: a stage failed. The message ends with the last lines of its log.
        JobStopped: training saved after Ctrl-C, or the stage stopped because hpcgen stop asked.
    """
    require_this_machine(plan)
    for warning in check_corpus(plan, missing_tasks(plan)):
        print(f"warning: {warning}", file=sys.stderr)
    with sharing(plan), term_exits():
        run_dir = make_run_directory(plan)
        return [_run(plan, stage, run_dir, on_progress) for stage in plan.stages.values()]


def _run(plan: Plan, stage: StagePlan, run_dir: Path, on_progress: Callable[[Progress], None] | None) -> Job:
    named, job_dir = make_job_directory(plan, "local-")
    is_private = plan.config.share == "private"
    folder = run_dir / "submitit" if is_private else named
    executor = LocalExecutor(folder if is_private else job_dir)
    # only Slurm enforces time limits; submitit's default here is two minutes
    executor.update_parameters(
        tasks_per_node=stage.allocation.num_tasks,
        gpus_per_node=stage.allocation.gpus_per_node,
        timeout_min=60 * 24 * 365,
        stderr_to_stdout=True,
    )
    started = time.time()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_announce_save(run_dir, stage.kind, started))
        asks = "yes" if stage.kind.has_stop_file or _program_stop(plan, stage) else ""
        stack.enter_context(recorded(job_dir, named.name, stage.name, asks))
        with _children_ignore_ctrl_c(), _children_ignore_local_modules(), without(of_outer_launcher()):
            submitted: Any = executor.submit(_task(plan, stage, job_dir))
            job = Job(stage.name, submitted.job_id, folder / Path(submitted.paths.stdout).name, submitted)
            record_launch(job_dir, named.name, stage.name, job.log, run_dir)
            stack.enter_context(_ended(job))
        on_request = partial(record_stop, job_dir, named.name, stage.name)
        _wait(job, stage, plan, job_dir / STOP_FILE, on_request, on_progress, started)
    return job


def _task(plan: Plan, stage: StagePlan, job_dir: Path) -> ModuleTask | ShellTask:
    """The stage as one task. An array runs as one task on all cores."""
    environment = {variable.name: variable.value for variable in stage.environment}
    for name, text in {**stage.files, **submission_file(plan, stage)}.items():
        write_text(job_dir / name, text, mode=0o660)
    config = ("--config", str(job_dir / stage.kind.config_file)) if stage.kind.config_file else ()
    if stage.allocation.array is not None:
        return ModuleTask(("-m", "hpcgen", "data", stage.name, *config), environment)
    if stage.kind.has_ranks:
        environment |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "TRAINER_RENDEZVOUS_ID": secrets.token_hex(16),
        }
    if stage.kind.runs_user_program:
        environment |= {
            "WORLD_SIZE": str(stage.allocation.ranks_per_node),
            "SLURM_NODEID": "0",
            "SLURM_JOB_ID": job_dir.name,
            "TMPDIR": tempfile.gettempdir(),
        }
        stop = _program_stop(plan, stage) or StopConfig()
        if stop.file is not None:
            Path(stop.file).unlink(missing_ok=True)  # of an earlier attempt
        file, request = str(job_dir / stage.kind.config_file), str(job_dir / STOP_FILE)
        return ShellTask(file, environment, request, stop.signal, stop.file)
    stop_file = ("--stop-file", str(job_dir / STOP_FILE)) if stage.kind.has_stop_file else ()
    return ModuleTask((*stage.arguments, *config, *stop_file), environment)


def _program_stop(plan: Plan, stage: StagePlan) -> StopConfig | None:
    """How the user's program is asked to save and stop; None for other stages, and if it cannot be asked."""
    program = plan.config.program if stage.kind.runs_user_program else None
    return program.stop if program is not None else None


def _wait(
    job: Job,
    stage: StagePlan,
    plan: Plan,
    stop_file: Path,
    on_request: Callable[[], None],
    on_progress: Callable[[Progress], None] | None,
    started: float,
) -> None:
    metrics = Followed(Path(plan.config.paths.run_dir) / RunDirectory.METRICS, since=started)
    total = plan.trainer.training.train_iters if plan.trainer and stage.kind.trains else 0
    asked_to_stop = is_requested = False
    while True:
        try:
            if not is_requested and stop_file.exists():
                is_requested = True
                on_request()
                if not asked_to_stop:
                    print("requested a checkpoint, because hpcgen stop asked", file=sys.stderr)
            done = job.submitit_job.done()
            if on_progress is not None and stage.allocation.array:
                on_progress(_files_done(plan, stage.name, started))
            elif on_progress is not None:
                last = metrics.last_step() if total else {}
                on_progress(Progress(stage.name, last.get("iteration", 0), total, last))
            if done:
                break
            time.sleep(POLL_S)
        except KeyboardInterrupt:
            if asked_to_stop:
                kill_tree(int(job.job_id))
            if asked_to_stop or not total:
                raise
            asked_to_stop = True
            stop_file.touch()
            print("requested a checkpoint; interrupt again to end at once", file=sys.stderr)
    _raise_failure(job, stage)
    if not stop_file.exists() or _is_done(plan, stage, started):
        return
    raise JobStopped("" if asked_to_stop else "stopped, because hpcgen stop asked; hpcgen resume continues")


def _is_done(plan: Plan, stage: StagePlan, started: float) -> bool:
    """True if the stage was done before it took a request to stop."""
    if stage.kind.has_stop_file:
        return _stopped_at(Path(plan.config.paths.run_dir), stage.kind, started) is None
    done = plan.config.program.done if plan.config.program else None
    return done is not None and Path(done.file).exists()


@contextlib.contextmanager
def _announce_save(run_dir: Path, stage: Stage, started: float) -> Iterator[None]:
    """If Ctrl-C or SIGTERM ends the block after training saved, prints the iteration of the checkpoint."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        iteration = _stopped_at(run_dir, stage, started)
        if iteration is not None:
            line = f"saved and stopped at iteration {iteration}; the same command resumes from there"
            print(line, file=sys.stderr)
        raise


def _stopped_at(run_dir: Path, stage: Stage, started: float) -> int | None:
    """The iteration at which the stage saved and stopped after `started`; None if it did not."""
    if not stage.has_stop_file:
        return None
    marker = run_dir / RunDirectory.STOPPED
    try:
        return int(read_text(marker)) if marker.stat().st_mtime >= started else None
    except (OSError, ValueError):
        return None


def _files_done(plan: Plan, stage: str, since: float) -> Progress:
    """Progress of a data stage's single task, from its progress file."""
    path = progress_path(corpus_job(plan.config).directory, stage, 0, 1)
    try:
        progress = json.loads(read_bytes(path)) if path.stat().st_mtime >= since else {}
    except (OSError, ValueError):
        progress = {}
    return Progress(stage, progress.get("units_done", 0), progress.get("units", 0), {})


def _raise_failure(job: Job, stage: StagePlan) -> None:
    """Raises the failure of the first failed task, with the end of its log.

    Raises:
        JobFailed: a task failed.
    """
    for index in range(stage.allocation.num_tasks):
        task = job.submitit_job.task(index)
        if not _succeeded(task):
            log = Path(task.paths.stdout)
            ended = "\n".join(_stage_output(log)[-15:])
            raise JobFailed(f"{ended}\nstage {stage.name} failed (task {index}); its log is {log}")


def _stage_output(log: Path) -> list[str]:
    """The lines of the log that the stage wrote; if there are none, the last line, which is submitit's error.

    submitit's traceback is left out, because it only shows the status.
    """
    lines = read_text(log, errors="replace").splitlines() if log.exists() else []
    error = next((i for i, line in enumerate(lines) if line.startswith("submitit ERROR")), len(lines))
    output = [line for line in lines[:error] if not line.startswith("submitit ")]
    return output or lines[-1:]


def _succeeded(task: Any) -> bool:
    if not Path(task.paths.result_pickle).exists():
        return False
    return task.exception() is None


@contextlib.contextmanager
def _ended(job: Job) -> Iterator[None]:
    """Ends the job's processes if they are still running at the end of the block.

    The job ID is the PID of submitit's process for the job, which forwards SIGTERM to the tasks. submitit's `cancel`
    sends SIGINT, which they ignore.
    """
    try:
        yield
    finally:
        try:
            if not job.submitit_job.done():
                os.kill(int(job.job_id), signal.SIGTERM)
            deadline = time.monotonic() + TERMINATION_TIMEOUT_S
            while not job.submitit_job.done() and time.monotonic() < deadline:
                time.sleep(POLL_S)
        finally:  # another Ctrl-C, or a timeout
            if not job.submitit_job.done():
                kill_tree(int(job.job_id))


@contextlib.contextmanager
def _children_ignore_local_modules() -> Iterator[None]:
    """Keeps children from importing a local folder named trainer, as in a job. Python 3.11 and newer."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


@contextlib.contextmanager
def _children_ignore_ctrl_c() -> Iterator[None]:
    """Keeps a terminal's Ctrl-C from reaching children, which this process notifies once.

    A second signal would interrupt a stage while it cleans up.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
