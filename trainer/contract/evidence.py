"""Evidence of saved training: refuses a start that would discard it.

A run resumes from its newest checkpoint. When no checkpoint is found, for example because a file system is not mounted,
other files may still show that training was saved. A run discards that training only if its configuration allows it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.contract import checkpoint_files
from trainer.contract.checkpoint_files import COMPLETE, METADATA, STARTED, TRACKER

DISCARD_KEY = "checkpoint.discard_up_to"

_NAME = re.compile(r"iter_(\d{7,})(\.broken(-\d+)?)?")


@dataclass(frozen=True)
class Refusal:
    """Reason why a run must not begin, and what to do about it."""

    reason: str
    hint: str

    def __str__(self) -> str:
        return f"{self.reason}; {self.hint}"


@dataclass(frozen=True)
class Evidence:
    """A file that shows that training was saved."""

    iteration: int
    """Last saved iteration; 0 when unknown."""
    text: str
    """Path of the file and what it shows."""


def refusal(
    run_dir: Path, checkpoints: Path, load: str | None, *, begins_at: int, discard_up_to: int | None
) -> Refusal | None:
    """Reason why a run without a valid checkpoint in `checkpoints` must not begin at iteration `begins_at`.

    None if it may begin: there is no evidence of later training, or all of it may be discarded. `begins_at` is 0, or
    the iteration of the checkpoint in `load`.

    Raises:
        OSError: a file cannot be read.
    """
    found = list(_evidence_in_checkpoints(checkpoints)) + list(_evidence_in_run(run_dir, load))
    later = [evidence for evidence in found if begins_at == 0 or evidence.iteration > begins_at]
    if not later:
        return None
    last = max(later, key=lambda evidence: evidence.iteration)
    if discard_up_to is not None and last.iteration <= discard_up_to:
        return None
    allowed = "" if discard_up_to is None else f"; {DISCARD_KEY} = {discard_up_to} does not allow that"
    return Refusal(
        f"{checkpoints} holds no valid checkpoint, but {last.text}. The run would begin at iteration {begins_at} and "
        f"discard that training{allowed}",
        "mount or correct checkpoint.save, or restore a checkpoint; to start over, set "
        f"{DISCARD_KEY}: {last.iteration}, or use another paths.run_dir",
    )


def _evidence_in_checkpoints(directory: Path) -> Iterator[Evidence]:
    tracked = checkpoint_files.tracked_iteration(directory)
    if tracked is not None or (directory / TRACKER).exists():
        yield Evidence(tracked or 0, f"{directory / TRACKER} names one")
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


def _evidence_in_run(run_dir: Path, load: str | None) -> Iterator[Evidence]:
    done, metrics = run_dir / "DONE", run_dir / "metrics.jsonl"
    if done.exists():
        text = done.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
        yield Evidence(
            int(text) if text.isdecimal() else 0, f"{done} says that iteration {text!r} was the last"
        )
    if not metrics.exists():
        return
    with metrics.open("rb") as lines:
        last = max(_evidence_in_metrics(lines, load), key=lambda found: found[0], default=None)
    if last is not None:
        yield Evidence(last[0], f"{metrics} records {last[1]}")


def _evidence_in_metrics(lines: Iterator[bytes], load: str | None) -> Iterator[tuple[int, str]]:
    for line in lines:
        if b'"checkpoint"' not in line:  # skips most lines of a long file without parsing them
            continue
        try:
            entry = json.loads(line)
            event, iteration = entry["event"], entry["iteration"]
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
        if type(iteration) is not int or iteration == 0:
            continue
        if event == "checkpoint":
            yield iteration, f"the checkpoint {entry.get('path')}"
        elif event == "start" and _is_own_checkpoint(entry.get("checkpoint"), load):
            yield iteration, f"a start from {entry['checkpoint']}"


def _is_own_checkpoint(checkpoint: Any, load: str | None) -> bool:
    """True if a start event names a checkpoint of this run, not one from checkpoint.load."""
    return isinstance(checkpoint, str) and (
        load is None or Path(load) not in (Path(checkpoint), Path(checkpoint).parent)
    )
