"""The status of a run as rows of text, for a terminal of any width and for pipes."""

from __future__ import annotations

import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import click

from hpcgen.text import counted, duration, few, harmless, size_text

if TYPE_CHECKING:
    from hpcgen.logs.failure import Failure
    from hpcgen.runs.status import AttemptStatus, JobStatus, RunStatus, TrainingStatus

SHOWN_ATTEMPTS = 5
"""Number of the last attempts that are shown."""
COLORS = {
    "done": "green",
    "running": "cyan",
    "waiting": "blue",
    "new": None,
    "stopped": "yellow",
    "silent": "yellow",
    "unknown": "yellow",
    "requeued": None,
    "terminated": "yellow",
}
"""Color of a state; red for the others."""
_LABEL_WIDTH = 12
LONGEST_ID = 40
"""Characters of a job's ID that are shown."""


class Row(NamedTuple):
    """A line of the status. Rows without a label continue the one above."""

    label: str
    text: str
    color: str | None = None


def rows(status: RunStatus, now: float) -> list[Row]:
    """The status of a run: its state first, then a row for each thing that is known."""
    return [
        Row(harmless(status.name), harmless(_headline(status)), color_of(status.state)),
        *(_training_rows(status.training, now) if status.training else ()),
        *_program_rows(status),
        *_job_rows(status.jobs, now),
        *(_checkpoint_rows(status, now) if status.checkpoints else ()),
        *_data_rows(status),
        *_attempt_rows(status, now),
        *_node_rows(status, now),
        *_disk_rows(status),
        *(Row("unknown", harmless(problem), "yellow") for problem in status.problems),
    ]


def print_rows(found: Sequence[Row], width: int) -> None:
    """Prints rows. A long text continues below its beginning."""
    for line in lines(found, width):
        click.echo(line)


def lines(found: Sequence[Row], width: int) -> Iterator[str]:
    """The lines of rows: labels on the left, texts wrapped on the right."""
    for number, row in enumerate(found):
        label = f"{row.label}: " if number == 0 else f"  {row.label:<{_LABEL_WIDTH - 2}}"
        indent = " " * _LABEL_WIDTH
        wrapped = textwrap.wrap(
            label + row.text, width, subsequent_indent=indent, break_on_hyphens=False
        ) or [label]
        first = click.style(wrapped[0][len(label) :], fg=row.color) if row.color else wrapped[0][len(label) :]
        yield (click.style(label, bold=True) if number == 0 else label) + first
        yield from wrapped[1:]


def color_of(state: str) -> str | None:
    """Color of a state of a run or an attempt."""
    return COLORS.get(state, "red")


def progress(training: TrainingStatus | None) -> str:
    """The iteration, and of how many: 12,400 of 95,367 (13.0%)."""
    if training is None or training.iteration is None:
        return ""
    if not training.train_iters:
        return f"{training.iteration:,}"
    share = training.iteration / training.train_iters
    return f"{training.iteration:,} of {training.train_iters:,} ({share:.1%})"


def moment(then: float, now: float) -> str:
    """A local time: 17:30 if it is within half a day, otherwise with its date."""
    form = "%H:%M" if abs(then - now) < 43_200 else "%a %d %b %H:%M"
    return time.strftime(form, time.localtime(then))


def ago(then: float, now: float) -> str:
    """Time since then: 4 min ago."""
    return f"{duration(max(0, round(now - then)))} ago"


def _headline(status: RunStatus) -> str:
    at = progress(status.training)
    return f"{status.state}{f', iteration {at}' if at else ''}{f': {status.why}' if status.why else ''}"


def _training_rows(training: TrainingStatus, now: float) -> Iterator[Row]:
    figures = []
    if training.loss is not None:
        figures.append(f"loss {training.loss:.4f}")
    if training.tokens_per_s is not None:
        figures.append(f"{training.tokens_per_s:,.0f} tokens/s")
    if training.mfu is not None:
        figures.append(f"MFU {training.mfu:.1%}")
    if training.step_time_s is not None:
        figures.append(f"{duration(training.step_time_s)} per step")
    if figures:
        when = f" ({ago(training.reported, now)})" if training.reported is not None else ""
        yield Row("latest", ", ".join(figures) + when)
    if training.ends is not None and training.pace_s is not None:
        left, pace = duration(max(0, round(training.ends - now))), duration(training.pace_s)
        yield Row(
            "ends",
            f"in {left}, {moment(training.ends, now)}, at {pace} per step with saves",
        )
        if training.time_limit is not None:
            limit = duration(max(0, round(training.time_limit - now)))
            yield Row(
                "", f"the job reaches its time limit before, in {limit}, {moment(training.time_limit, now)}"
            )


def _program_rows(status: RunStatus) -> Iterator[Row]:
    program = status.program
    if program is not None:
        began = f", {program.began:,} when this attempt began" if program.began != program.value else ""
        yield Row("progress", harmless(f"{program.value:,}{began} ({program.source})"))


def _job_rows(jobs: Sequence[JobStatus], now: float) -> Iterator[Row]:
    tasks = Counter((job.job.partition("_")[0], job.stage) for job in jobs if _is_running_task(job))
    texts = [_job_text(job, now) for job in jobs if not _is_running_task(job)]
    texts += [f"{array} ({stage}) runs {counted(count, 'task')}" for (array, stage), count in tasks.items()]
    for number, text in enumerate(texts):
        yield Row("" if number else "jobs", harmless(text))


def _is_running_task(job: JobStatus) -> bool:
    return bool(job.tasks) and job.state == "RUNNING"


def _job_text(job: JobStatus, now: float) -> str:
    text = f"{_short_id(job)} ({job.stage}) {job.words}"
    if job.state == "PENDING" and job.starts is not None:
        text += f", expected to start {moment(job.starts, now)}"
    elif job.starts is not None:
        text += f" for {duration(max(0, round(now - job.starts)))}"
    if job.nodes:
        text += f" on {job.nodes}"
    if job.state == "RUNNING" and job.ends is not None:
        text += f", until {moment(job.ends, now)}"
    return text


def _short_id(job: JobStatus) -> str:
    """The ID of a job. Slurm may list thousands of tasks one by one."""
    if len(job.job) <= LONGEST_ID:
        return job.job
    return f"{job.job[:LONGEST_ID].rpartition(',')[0]},...] with {counted(job.tasks, 'task')}"


def _checkpoint_rows(status: RunStatus, now: float) -> Iterator[Row]:
    found = status.checkpoints
    assert found is not None
    parts = []
    if found.newest is not None and found.saved is not None:
        parts.append(f"iteration {found.newest:,}, {ago(found.saved, now)}")
    if found.saving is not None:
        what = "is being saved" if status.state == "running" else "is incomplete"
        parts.append(f"iteration {found.saving:,} {what}")
    parts.append(f"{counted(found.complete, 'complete checkpoint')}")
    yield Row("saved", "; ".join(parts))


def _data_rows(status: RunStatus) -> Iterator[Row]:
    for number, stage in enumerate(status.data):
        parts = [f"{stage.done:,} of {counted(stage.outputs, 'output')} done"]
        parts += _counts(stage, ("running", "failed", "waiting"))
        if stage.remaining_s is not None:
            parts.append(f"{duration(round(stage.remaining_s))} left")
        color = "red" if stage.failed else "green" if stage.done == stage.outputs else None
        yield Row("" if number else "data", f"{stage.stage}: {', '.join(parts)}", color)
        for error in stage.errors:
            yield Row("", harmless(error), "red")
    for number, array in enumerate(status.arrays):
        names = ("done", "running", "waiting", "failed", "terminated", "killed", "unknown")
        color = "red" if array.failed or array.killed else None
        counts = ", ".join(_counts(array, names))
        yield Row("" if number else "tasks", f"{array.stage} {array.job}: {counts}", color)
        for reason in array.reasons:
            yield Row("", harmless(reason), "red")


def _counts(of: object, names: Sequence[str]) -> list[str]:
    """The attributes that are not 0: 12 running."""
    return [f"{count:,} {name}" for name in names if (count := getattr(of, name))]


def _attempt_rows(status: RunStatus, now: float) -> Iterator[Row]:
    attempts = status.attempts
    shown = attempts[-SHOWN_ATTEMPTS:]
    for number, attempt in enumerate(shown):
        label = "" if number else "attempts"
        end = now if attempt.state == "running" else attempt.ended
        lasted = f", {duration(max(0, round(end - attempt.began)))}" if end is not None else ""
        what = f"{attempt.stage} {attempt.job}" + (f", restart {attempt.restart}" if attempt.restart else "")
        if attempt.restarts_in_job:
            lasted += f", ranks started again {counted(attempt.restarts_in_job, 'time')}"
        outcome = _outcome(attempt, is_told=attempt.reason == status.why)  # in the first row
        text = f"{what}: began {moment(attempt.began, now)}{lasted}, {outcome}"
        yield Row(label, harmless(text), color_of(attempt.state))
        if attempt.failure is not None:
            yield Row("", harmless(_failure_text(attempt.failure)), "red")
    if len(attempts) > len(shown):
        yield Row("", f"and {counted(len(attempts) - len(shown), 'earlier attempt')} (--json has all)")


def _outcome(attempt: AttemptStatus, *, is_told: bool) -> str:
    """The state of an attempt and its reason, which may begin with the state. A reason that is told is left out."""
    if not attempt.reason or is_told:
        return attempt.state
    return (
        attempt.reason
        if attempt.reason.startswith(f"{attempt.state}: ")
        else f"{attempt.state}: {attempt.reason}"
    )


def _failure_text(failure: Failure) -> str:
    """The failure, its place in the log, and the page with the fix."""
    others = f"; then {', '.join(map(str, failure.cascade))}" if failure.cascade else ""
    place = f" ({failure.place})" if failure.place else ""
    fix = f"; see docs/{failure.fix}" if failure.fix else ""
    return f"{failure}{place}{others}{fix}"


def _node_rows(status: RunStatus, now: float) -> Iterator[Row]:
    lost = [node for attempt in status.attempts for node in attempt.spares]
    if status.excluded:
        names = [f"{name} until {moment(until, now)}" for name, until in status.excluded.items()]
        yield Row("excluded", harmless(few(names, 4)))
    if lost:
        yield Row("spares", harmless(f"took the place of {few(lost, 6)}"))


def _disk_rows(status: RunStatus) -> Iterator[Row]:
    if status.disk is not None:
        text = f"{size_text(status.disk.free)} of {size_text(status.disk.total)} left"
        yield Row("disk", f"{text} at {harmless(status.directory)}")
