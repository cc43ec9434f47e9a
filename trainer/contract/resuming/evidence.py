"""Evidence of saved training: refuses a start that would discard it.

A run resumes from its newest checkpoint. When no checkpoint is found, for example because a file system is not mounted,
other files may still show that training was saved. A run discards that training only if its configuration allows it.

metrics.jsonl names every checkpoint. If it is intact and names none, the run ended before its first save, and may start
again. If it is lost or damaged, each file that a run leaves once it trains is evidence. The directory `jobs` is not,
because a job makes it before the trainer starts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.contract.evaluation import evaluated, result_file
from trainer.contract.files import checkpoint_files
from trainer.contract.files.checkpoint_files import COMPLETE, METADATA, STARTED, TRACKER
from trainer.contract.files.regular_file import open_regular, read_text
from trainer.contract.files.run_directory import RunDirectory
from trainer.contract.problem import Problem

DISCARD_KEY = "checkpoint.discard_up_to"

_ITERATION = re.compile(r"[0-9]{1,15}")
_NAME = re.compile(r"iter_(\d{7,})(\.broken(-\d+)?)?")


@dataclass(frozen=True)
class Evidence:
    """A file that shows that training was saved, or may have been saved."""

    iteration: int | None
    """Last iteration that the file shows; None if it shows no iteration."""
    text: str
    """Path of the file and what it shows."""


def refusal(
    run: RunDirectory, load: str | None, *, begins_at: int, discard_up_to: int | None
) -> Problem | None:
    """The reason why a run without a valid checkpoint of its own must not begin at iteration `begins_at`.

    None if it may begin: there is no evidence of later training, or all of it may be discarded. `begins_at` is 0, or
    the iteration of the checkpoint in `load`.

    Raises:
        OSError: a file cannot be read.
    """
    found = [*_evidence_in_checkpoints(run.checkpoints), *_evidence_in_run(run, load)]
    later = [
        evidence
        for evidence in found
        if begins_at == 0 or evidence.iteration is None or evidence.iteration > begins_at
    ]
    if not later:
        return None
    last = max(later, key=lambda evidence: evidence.iteration or 0)
    iteration = last.iteration or 0
    if discard_up_to is not None and iteration <= discard_up_to:
        return None
    allowed = "" if discard_up_to is None else f"; {DISCARD_KEY} = {discard_up_to} does not allow that"
    return Problem(
        "",
        f"{run.checkpoints} holds no valid checkpoint, but {last.text}. The run would begin at iteration {begins_at} "
        f"and discard that training{allowed}",
        "mount or correct checkpoint.save, or restore a checkpoint; to start over, set "
        f"{DISCARD_KEY}: {iteration}, or use another paths.run_dir",
    )


def _evidence_in_checkpoints(directory: Path) -> Iterator[Evidence]:
    tracked = checkpoint_files.tracked_iteration(directory)
    if tracked is not None or (directory / TRACKER).exists():
        yield Evidence(tracked, f"{directory / TRACKER} names one")
    if not directory.is_dir():
        return
    paths = {path: int(match[1]) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))}
    # Only the newest save can have been interrupted after METADATA: a save begins when the previous one is complete.
    newest = max(paths.values(), default=0)
    for path, iteration in paths.items():
        was_complete = (path / COMPLETE).exists() or (
            (path / METADATA).exists() and (iteration < newest or not (path / STARTED).exists())
        )
        if was_complete:
            yield Evidence(iteration, f"{path} was a checkpoint")


def _evidence_in_run(run: RunDirectory, load: str | None) -> Iterator[Evidence]:
    for marker in (run.done, run.stopped):
        if marker.exists():
            text = _text(marker).partition("\n")[0]
            iteration = int(text) if _ITERATION.fullmatch(text) else None
            yield Evidence(iteration, f"{marker} says that iteration {text!r} was the last")
    yield from _evaluated_checkpoints(run)
    story = _read_metrics(run.metrics, load)
    if story.last is not None:
        yield Evidence(story.last[0], f"{run.metrics} records {story.last[1]}")
    if story.is_damaged:
        yield Evidence(None, f"{run.metrics} is damaged, so that it may have named one")
    if story.is_damaged or not story.has_start:
        for iteration, text in _traces(run):
            yield Evidence(iteration, f"{text}, and {run.metrics} does not tell whether it was saved")


def _traces(run: RunDirectory) -> Iterator[tuple[int | None, str]]:
    """Files that a run leaves once it trains, whether it has saved or not."""
    if run.heartbeat.exists():
        iteration = reached_iteration(run.heartbeat)
        if iteration is None:
            yield None, f"{run.heartbeat} is damaged"
        elif iteration > 0:
            yield iteration, f"{run.heartbeat} says that iteration {iteration} was reached"
    if run.trained_with.exists():
        yield None, f"{run.trained_with} shows that the run has trained"
    for directory in (run.code, run.tensorboard, run.profile):
        if directory.is_dir() and any(path.is_file() for path in directory.iterdir()):
            yield None, f"{directory} shows that the run has trained"


def reached_iteration(heartbeat: Path) -> int | None:
    """The iteration in the file heartbeat; None if it is missing or damaged."""
    try:
        iteration = json.loads(_text(heartbeat))["iteration"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return iteration if type(iteration) is int else None


def _evaluated_checkpoints(run: RunDirectory) -> Iterator[Evidence]:
    """Results of evaluations of this run's own checkpoints."""
    for iteration in evaluated(run.root):
        file = result_file(run.root, iteration)
        try:
            checkpoint = Path(json.loads(_text(file))["checkpoint"])
        except (ValueError, TypeError, KeyError, RecursionError):
            checkpoint = run.checkpoints / "unknown"
        if checkpoint.parent == run.checkpoints:
            yield Evidence(iteration, f"{file} has the results of a checkpoint")


def _text(path: Path) -> str:
    """Content of a file; empty if it is not a file."""
    return read_text(path, errors="replace") if path.is_file() else ""


@dataclass(frozen=True)
class _Story:
    """Evidence in metrics.jsonl."""

    last: tuple[int | None, str] | None = None
    """Last saved iteration, and the evidence for it. None if nothing was saved."""
    has_start: bool = False
    """Every attempt that trains writes a line at its start, before any other file."""
    is_damaged: bool = False


def _read_metrics(metrics: Path, load: str | None) -> _Story:
    if not metrics.is_file():
        return _Story(is_damaged=metrics.exists())
    with open_regular(metrics) as lines:
        reader = _MetricsReader(load)
        last = max(reader.saved(lines), key=lambda found: found[0] or 0, default=None)
    return _Story(last, reader.has_start, reader.is_damaged)


class _MetricsReader:
    """Reads the lines of metrics.jsonl, which are ASCII."""

    def __init__(self, load: str | None) -> None:
        self._load = load
        self.has_start = self.is_damaged = False

    def saved(self, lines: Iterable[bytes]) -> Iterator[tuple[int | None, str]]:
        """Yields the saved iterations, and what shows each."""
        for line in lines:
            self.is_damaged |= b"\0" in line or not line.isascii()
            if b'"checkpoint"' in line or b'"start"' in line:  # most lines of a long file need no parsing
                yield from self._saved(line)

    def _saved(self, line: bytes) -> Iterator[tuple[int | None, str]]:
        try:
            entry = json.loads(line)
            event, iteration = entry["event"], entry["iteration"]
        except (ValueError, TypeError, KeyError, RecursionError):
            if line.startswith(b'{"event": "checkpoint"'):
                yield None, "a checkpoint in a line that is incomplete"
            return
        self.has_start |= event == "start"
        if type(iteration) is not int or iteration == 0:
            return
        if event == "checkpoint":
            yield iteration, f"the checkpoint {entry.get('path')}"
        elif event == "start" and _is_own_checkpoint(entry.get("checkpoint"), self._load):
            yield iteration, f"a start from {entry['checkpoint']}"


def _is_own_checkpoint(checkpoint: Any, load: str | None) -> bool:
    """True if a start event names a checkpoint of this run, not one from checkpoint.load."""
    return isinstance(checkpoint, str) and (
        load is None or Path(load) not in (Path(checkpoint), Path(checkpoint).parent)
    )
