"""A mistake or a warning, in parts. The parts become a sentence only when it is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from pathlib import PurePath
from typing import Literal

from trainer.contract.record import record
from trainer.contract.wording import few


class FilePlace(str):
    """A file or a line of it, "run.yaml:14". Other places, such as "--set optimizer.lr" and "preset 13b", are text."""

    file: str
    line: int | None

    def __new__(cls, file: object, line: int | None = None) -> FilePlace:
        """The place in `file`, a name or a path."""
        place = super().__new__(cls, file if line is None else f"{file}:{line}")
        place.file, place.line = str(file), line
        return place

    def __getnewargs__(self) -> tuple[str, int | None]:  # type: ignore[override]
        """Arguments of a copy."""
        return self.file, self.line


def as_place(where: object) -> str:
    """The place of a problem: a path, or anything whose text says where."""
    return (
        FilePlace(where) if isinstance(where, PurePath) else where if isinstance(where, str) else str(where)
    )


def file_of(place: str | None) -> str:
    """The file of a place; "" if it is not in a file."""
    return place.file if isinstance(place, FilePlace) else ""


@record
class Setting:
    """A key and the value that it should have."""

    path: str
    value: object


@record
class Problem:
    """A mistake or a warning.

    `path` is the dotted path of the value ("parallelism.tensor_model_parallel_size"); empty if the problem is not about
    a single value. `reason` completes the sentence that starts with "path = value" ("does not divide
    model.num_attention_heads = 16 (16 / 6)"). `hint` says what to do ("use 1, 2, 4, 8 or 16") and may be empty.
    """

    path: str
    reason: str
    hint: str = ""
    file: Literal["run", "cluster"] = "run"
    """File that contains `path`: the run file or the cluster profile."""
    meant: str = ""
    """Path of the key that the user probably meant, if `path` is an unknown key."""
    about: tuple[str, ...] = ()
    """Paths of the other keys that `reason` and `hint` name. If `path` has its default, the message shows the place of
    the first of these that the user set."""
    settings: tuple[Setting, ...] = ()
    """Values of other keys with which there is no problem. They become part of the hint."""
    is_missing: bool = False
    """True if `path` must have a value and has none."""
    candidates: Sequence[object] = field(default=(), compare=False)
    """Values for `path` that may solve the problem, best first. Values that break no rule become part of the hint."""
    offers: int = 6
    """Maximum number of candidates in the hint."""
    where: str = ""
    """Place of the value: a FilePlace, or the name of a source that is not a file. Empty until it is known."""
    subject: str = ""
    """Words before `reason` in the sentence, usually the path with its value. Default: `path`."""
    value: object = field(default=None, compare=False)
    """The value, for JSON; None if it is missing, a section, or must not be printed."""

    @property
    def sentence(self) -> str:
        """The message without advice: the place, the value and the reason."""
        sentence = f"{self.subject or self.path} {self.reason}".strip()
        return f"{self.where}: {sentence}" if self.where else sentence

    @property
    def advice(self) -> str:
        """Advice without the candidates: "set fp8 to null, or ..."."""
        section = self.path.rpartition(".")[0]
        changes = (
            f"{setting.path.removeprefix(f'{section}.')} to {in_yaml(setting.value)}"
            for setting in self.settings
        )
        change = f"set {' and '.join(changes)}" if self.settings else ""
        return ", or ".join(filter(None, (change, self.hint)))

    def __str__(self) -> str:
        """The message: place, what with its value, why, and what to do."""
        return f"{self.sentence}; {self.advice}" if self.advice else self.sentence


def listed(problems: Sequence[Problem], shown: int = 5) -> str:
    """The first of many problems in one line, and the number of the others."""
    return few(list(map(str, problems)), shown, separator=";")


def in_yaml(value: object) -> str:
    """A value as written in a run file."""
    if value is None:
        return "null"
    if isinstance(value, tuple):
        return f"[{', '.join(map(in_yaml, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
