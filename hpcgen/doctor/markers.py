"""Marker files that contradict each other or the configuration, and the state in which a run was left."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from hpcgen.config.shown import show
from hpcgen.doctor.cause import Cause
from hpcgen.doctor.run_files import RunFiles
from hpcgen.report.essentials import flat
from hpcgen.slurm.job_files import EVENTS, RUNNING, job_directory
from hpcgen.text import duration, few
from trainer.contract.config import TrainerConfig, fingerprint
from trainer.contract.files.run_directory import RunDirectory

PAGE = "faults.md#a-broken-run-directory"
DONE, STOPPED, FAILED = RunDirectory.DONE, RunDirectory.STOPPED, RunDirectory.FAILED


def causes(files: RunFiles) -> Iterator[Cause]:
    """Yields what the marker files say."""
    yield from _done(files)
    if files.failure is None:  # it explains the end better
        yield from _stopped(files)
        yield from _killed(files)


def _done(files: RunFiles) -> Iterator[Cause]:
    """Yields a DONE that is damaged, that belongs to another configuration, or next to FAILED."""
    if DONE not in files.markers:
        return
    lines = files.markers[DONE].splitlines()
    path = files.directory / DONE
    if not lines or not lines[0].strip().isdecimal():
        yield Cause(
            name="damaged-done",
            effect="harmless",
            what="DONE is damaged",
            evidence=(f"{path}:1: {show(lines[0]) if lines else 'it is empty'}, not the last iteration",),
            fix="Remove it and submit again: the run checks its newest checkpoint, and writes DONE if nothing is "
            f"left. rm {path}",
            page=PAGE,
        )
    elif FAILED in files.markers:
        yield Cause(
            name="failed-next-to-done",
            effect="ended",
            what="The run is finished, and a later attempt with other settings was refused",
            evidence=(
                f"{path}:1: finished at iteration {lines[0].strip()}",
                f"{files.directory / FAILED}:1: {_first_line(files.markers[FAILED])}",
            ),
            fix="Nothing if the finished run is what you want. For other settings, use another paths.run_dir; for more "
            "steps, raise training.train_iters.",
            page="resuming.md#change-hyperparameters",
        )
    elif files.trainer is not None and lines[1:2] != [fingerprint(files.trainer)]:
        yield from _other_configuration(files, int(lines[0]), files.trainer)


def _other_configuration(files: RunFiles, iteration: int, trainer: TrainerConfig) -> Iterator[Cause]:
    asked = trainer.training.train_iters
    changes = [
        f"{name} = {show(new)}, and was {show(old)}"
        for name, old, new in (_differences(files.trained, trainer) if files.trained else ())
    ]
    said = f"{files.directory / DONE}:1: finished at iteration {iteration}"
    of_job = f"{files.job_config}: {few(changes) if changes else f'training.train_iters = {asked}'}"
    if asked > iteration:
        what = f"DONE is of an earlier configuration: {asked - iteration:,} steps are left"
        fix = f"Submit again: the run continues from iteration {iteration} to {asked}, and replaces DONE."
    else:
        what = "DONE is of another configuration than the newest job's"
        fix = (
            "Set the run file back to what finished, or use another paths.run_dir for other settings. To continue with "
            "changed hyperparameters, raise training.train_iters and name them in checkpoint.changed."
        )
    yield Cause(
        name="done-other-configuration",
        effect="costs",
        what=what,
        evidence=(said, of_job),
        fix=fix,
        page="resuming.md#change-hyperparameters",
    )


def _differences(before: TrainerConfig, after: TrainerConfig) -> Iterator[tuple[str, Any, Any]]:
    """Yields the keys with other values, with the old and the new one."""
    old, new = dict(flat(dataclasses.asdict(before))), dict(flat(dataclasses.asdict(after)))
    yield from ((name, old.get(name), new.get(name)) for name in new if old.get(name) != new.get(name))


def _stopped(files: RunFiles) -> Iterator[Cause]:
    """Yields a run that was asked to stop, and that no job continues."""
    if STOPPED not in files.markers or DONE in files.markers or FAILED in files.markers:
        return
    last = files.last
    if last is not None and (
        last.verdict == "requeued" or (last.ended is None and files.is_active is not False)
    ):
        return  # its job is in the queue again, or runs
    path = files.directory / STOPPED
    yield Cause(
        name="stopped",
        effect="ended",
        what=f"The run was asked to stop, and saved at iteration {_first_line(files.markers[STOPPED])}",
        evidence=(
            f"{path}:1: {_first_line(files.markers[STOPPED])}",
            *((_end_of(files),) if last else ()),
        ),
        fix="Submit again: it resumes from there.",
        page="faults.md#slurm-ended-it",
    )


def _killed(files: RunFiles) -> Iterator[Cause]:
    """Yields an attempt without an end: its script was killed, unless it still runs."""
    last = files.last
    if last is None or last.ended is not None or DONE in files.markers or FAILED in files.markers:
        return
    if files.is_active or (files.is_active is None and files.state in ("running", "hung")):
        return
    path = job_directory(files.directory, last.job) / EVENTS
    ago = duration(max(0.0, files.now - last.began))
    running = files.markers.get(RUNNING, "").strip()
    marker = (f"{files.directory / RUNNING}:1: {running}",) if running == last.job.partition("_")[0] else ()
    ask = f"See what Slurm says (scontrol show job {last.job}, or sacct -j {last.job} -o State,ExitCode,NodeList). "
    runs = "" if files.is_active is False else "still runs, "  # Slurm did not tell
    yield Cause(
        name="job-killed",
        effect="ended",
        what=f"The script of job {last.job} {runs}was killed, or its node died: the attempt has no end",
        evidence=(
            f"{path}: it began {ago} ago on {last.nodes or 'unknown nodes'}, with no end",
            *marker,
            *((files.slurm_says,) if files.slurm_says else ()),
        ),
        fix=f"{'' if files.is_active is False else ask}If the job is gone, submit again: the run resumes, and the next "
        "job replaces RUNNING.",
        page="faults.md#a-node-or-a-process-died",
    )


def _end_of(files: RunFiles) -> str:
    assert files.last is not None
    path = job_directory(files.directory, files.last.job) / EVENTS
    return f"{path}: {files.last.verdict or 'no end'}: {files.last.reason or 'without a message'}"


def _first_line(text: str) -> str:
    return next(iter(text.splitlines()), "").strip() or "(empty)"
