"""The answers of the model in training, which the trainer writes into the run directory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import get_type_hints

from trainer.contract.files.regular_file import read_bytes
from trainer.contract.files.run_directory import RunDirectory
from trainer.contract.record import record


@record(kw_only=True)
class Answer:
    """An answer to a prompt."""

    iteration: int
    number: int
    """Number of the prompt in its file, from 0."""
    prompt: str
    answer: str
    tokens: int
    """Number of new tokens."""
    finish_reason: str
    """Why the answer ends: eod, stop, length or time."""


_TYPES: dict[str, type] = get_type_hints(Answer)


def read_answers(run_dir: Path) -> tuple[Answer, ...]:
    """The answers of a run in the order of the file; none if there is no file. Skips damaged lines.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        data = read_bytes(run_dir / RunDirectory.ANSWERS)
    except FileNotFoundError:
        return ()
    return tuple(found for line in data.splitlines() if (found := _answer(line)) is not None)


def at_iteration(answers: Sequence[Answer], iteration: int) -> dict[int, Answer]:
    """The answers at an iteration by the number of their prompt."""
    return {answer.number: answer for answer in answers if answer.iteration == iteration}


def _answer(line: bytes) -> Answer | None:
    try:
        content = json.loads(line)
        if any(type(content[name]) is not kind for name, kind in _TYPES.items()):
            return None
        return Answer(**{name: content[name] for name in _TYPES})
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
