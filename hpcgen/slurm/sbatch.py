"""Calls sbatch for a rendered script, and waits for the job."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hpcgen.errors import HpcgenError
from hpcgen.files import write_text
from hpcgen.slurm.programs import UNKNOWN_JOB, ask
from hpcgen.slurm.refusal import advice
from hpcgen.slurm.shell import reach_job, shell_settings, without

if TYPE_CHECKING:
    from hpcgen.run_plan.plan import Plan

PATIENCE_S = 5.0
"""Time after which a message says that sbatch has not answered."""

POLLS_S = (1.0, 10.0)
"""First and longest pause between two questions about a job (seconds)."""


def submit_script(plan: Plan, stage: str, text: str, arguments: Sequence[str] = ()) -> str:
    """Queues the script of one stage and returns its job ID. The script is kept in the run directory.

    `arguments` are options for the job's command.

    Raises:
        HpcgenError: the script cannot be written, Slurm is not installed, or it refuses the job.
    """
    planned, directory = plan.stages[stage], Path(plan.config.paths.run_dir)
    script = directory / f"{stage}.sh"
    write_text(script, text, mode=0o700)
    variables = (*reach_job(planned.directives), *shell_settings())
    warn_of_leaks(reach_job(planned.directives))
    with without(variables), waiting_is_said(stage):
        try:
            done = subprocess.run(
                ["sbatch", "--parsable", str(script), *arguments], capture_output=True, text=True, check=False
            )
        except FileNotFoundError as error:
            raise HpcgenError("sbatch: no such program", "run this on a login node of the cluster") from error
    if done.returncode != 0:
        answer = done.stderr.strip() or "sbatch ended without a message"
        raise HpcgenError(f"stage {stage} was not submitted: {answer}", advice(answer, plan, planned))
    return done.stdout.strip().partition(";")[0]


def states(job_id: str, on_poll: Callable[[], None] = lambda: None) -> Iterator[str]:
    """Yields the state of a job, with the reason if it waits, whenever it changes. Ends when the job has ended.

    `on_poll` is called after each question about the job.
    """
    last, pause = "", POLLS_S[0]
    while (state := state_of(job_id)) is not None:
        on_poll()
        if state != last:
            yield state
        last = state
        time.sleep(pause)
        pause = min(pause * 1.5, POLLS_S[1])
    on_poll()


def state_of(job_id: str) -> str | None:
    """The state of a job, with the reason if it waits, or why squeue does not tell it. None if it has ended."""
    answer = ask("squeue", "--noheader", f"--jobs={job_id}", "--format=%T %r")
    if UNKNOWN_JOB in answer.messages or not (answer.text.strip() or answer.problem):
        return None
    if answer.problem:
        return answer.problem
    state, _, reason = answer.text.strip().partition(" ")
    return f"{state} ({reason})" if state == "PENDING" and reason != "None" else state


def cancel(job_id: str) -> None:
    """Cancels a job."""
    subprocess.run(["scancel", job_id], check=False)


@contextmanager
def waiting_is_said(stage: str) -> Iterator[None]:
    """If sbatch does not answer soon, prints why that may be. submitit keeps sbatch's own messages until it ends."""
    message = (
        f"waiting for sbatch to submit {stage}. It tries for some minutes if Slurm has no place for more jobs "
        "(MaxJobCount of `scontrol show config`) or does not answer (`scontrol ping`)"
    )
    timer = threading.Timer(PATIENCE_S, print, (message,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def warn_of_leaks(names: Collection[str]) -> None:
    """Prints the variables that are not passed to sbatch. An outer job has dozens: its ID stands for them."""
    outer_job = os.environ.get("SLURM_JOB_ID")
    shown = sorted(name for name in names if not (outer_job and name.startswith(("SLURM_", "SLURMD_"))))
    if outer_job:
        shown.append(f"the SLURM_* variables of job {outer_job}")
    if shown:
        print(
            f"warning: not passed to the new jobs, which set their own: {', '.join(shown)}", file=sys.stderr
        )
