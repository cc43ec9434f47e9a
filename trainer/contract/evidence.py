"""Whether a run would begin before training that it has saved; standard library only.

The newest checkpoint decides where a run goes on. Where none is left, or none is in sight because a file system is not
mounted, other files still tell that training was saved. A run never gives that up unless its configuration says so.
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

KEY = "checkpoint.discard_up_to"

_NAME = re.compile(r"iter_(\d{7,})(\.broken(-\d+)?)?")


@dataclass(frozen=True)
class Refusal:
    """Why a run must not begin, and what to do."""

    reason: str
    hint: str

    def __str__(self) -> str:
        return f"{self.reason}; {self.hint}"


@dataclass(frozen=True)
class Evidence:
    """A file that tells of saved training."""

    iteration: int
    """Training was saved up to this one."""
    text: str
    """The file, and what it tells."""


def refusal(
    run_dir: Path, checkpoints: Path, load: str | None, *, begins_at: int, discard_up_to: int | None
) -> Refusal | None:
    """Why a run whose `checkpoints` hold none to go on from must not begin at iteration `begins_at`.

    None when it may: nothing tells of later training, or all of it may be discarded. `begins_at` is 0, or the
    iteration of the checkpoint in `load`.

    Raises:
        OSError: a file cannot be read.
    """
    found = list(_of_checkpoints(checkpoints)) + list(_of_run(run_dir, load))
    later = [evidence for evidence in found if begins_at == 0 or evidence.iteration > begins_at]
    if not later:
        return None
    last = max(later, key=lambda evidence: evidence.iteration)
    if discard_up_to is not None and last.iteration <= discard_up_to:
        return None
    allowed = "" if discard_up_to is None else f"; {KEY} = {discard_up_to} does not allow that"
    return Refusal(
        f"{checkpoints} holds no valid checkpoint, but {last.text}: the run would begin at iteration {begins_at} and "
        f"give up what was trained{allowed}",
        f"mount or correct checkpoint.save, or put a checkpoint back; to start over, write {KEY}: {last.iteration}, or "
        "name another run_dir",
    )


def _of_checkpoints(directory: Path) -> Iterator[Evidence]:
    tracked = checkpoint_files.tracked_iteration(directory)
    if tracked is not None or (directory / TRACKER).exists():
        yield Evidence(tracked or 0, f"{directory / TRACKER} tells of one")
    if not directory.is_dir():
        return
    paths = {path: int(match[1]) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))}
    # Only the newest can have been cut off after METADATA: a save begins when the one before is complete.
    newest = max(paths.values(), default=0)
    for path, iteration in paths.items():
        was_complete = (path / COMPLETE).exists() or (
            (path / METADATA).exists() and (iteration < newest or not (path / STARTED).exists())
        )
        if was_complete:
            yield Evidence(iteration, f"{path} was a checkpoint")


def _of_run(run_dir: Path, load: str | None) -> Iterator[Evidence]:
    done, metrics = run_dir / "DONE", run_dir / "metrics.jsonl"
    if done.exists():
        text = done.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
        yield Evidence(
            int(text) if text.isdecimal() else 0, f"{done} says that iteration {text!r} was the last"
        )
    if not metrics.exists():
        return
    with metrics.open("rb") as lines:
        last = max(_of_lines(lines, load), key=lambda found: found[0], default=None)
    if last is not None:
        yield Evidence(last[0], f"{metrics} records {last[1]}")


def _of_lines(lines: Iterator[bytes], load: str | None) -> Iterator[tuple[int, str]]:
    for line in lines:
        if (
            b'"checkpoint"' not in line
        ):  # the event, or where a start went on from; a long run's file has many others
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
        elif event == "start" and _is_own(entry.get("checkpoint"), load):
            yield iteration, f"a start from {entry['checkpoint']}"


def _is_own(checkpoint: Any, load: str | None) -> bool:
    """Whether a start from this checkpoint tells of training of the run itself."""
    return isinstance(checkpoint, str) and (load is None or Path(checkpoint).parent != Path(load))
