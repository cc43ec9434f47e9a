"""What can go wrong through no fault of hpcgen: problems in what the user or the admin wrote, said in one message."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict


@dataclass(frozen=True)
class Problem:
    """One mistake in the configuration.

    `path` is the dotted path of the value that is wrong ("parallelism.tensor_model_parallel_size");
    `reason` is a sentence that follows "path = value" ("does not divide model.num_attention_heads = 16 (16 / 6)");
    `hint` says what to do ("use 1, 2, 4, 8 or 16"), and may be empty.
    """

    path: str
    reason: str
    hint: str = ""
    file: Literal["run", "cluster"] = "run"
    """Where `path` is to be looked up: the run file, or the cluster profile."""
    depends_on: tuple[str, ...] = ()
    """Other sections of the run file that the problem depends on."""

    @property
    def section(self) -> str:
        """The section of `path`."""
        return re.split(r"[.\[]", self.path)[0]


class MistakeParts(TypedDict):
    """A mistake in parts, as JSON has it."""

    key: str | None
    """Dotted path of the value; null of what is not about one."""
    file: str | None
    """Where it is written; null of what stands in no file: --set, a preset, a default."""
    line: int | None
    reason: str
    hint: str | None


class Mistake(str):
    """The line that names a mistake, with the parts that it was made of."""

    parts: MistakeParts

    @classmethod
    def of(cls, line: str, where: str, key: str | None, reason: str, hint: str) -> Mistake:
        """`where` is "run.yaml:14", or something else that is no place in a file."""
        mistake = cls(line)
        file, _, number = where.rpartition(":")
        in_file = number.isdigit() and not where.startswith("--")
        mistake.parts = {
            "key": key or None,
            "file": file if in_file else None,
            "line": int(number) if in_file else None,
            "reason": reason,
            "hint": hint or None,
        }
        return mistake

    @classmethod
    def at(cls, where: str, reason: str, hint: str = "") -> Mistake:
        """A mistake that is not about one key: "WHERE: REASON; HINT", without what is empty."""
        line = f"{where}: {reason}" if where else reason
        return cls.of(f"{line}; {hint}" if hint else line, where, None, reason, hint)


class HpcgenError(Exception):
    """A mistake of the user's: the command prints it and ends with status 2, without a traceback."""

    def __init__(self, message: str, hint: str = "", *, where: str = "") -> None:
        """`where` is the place that the message is about, as "run.yaml:14"."""
        self.mistakes: tuple[Mistake, ...] = (Mistake.at(where, message, hint),)
        super().__init__(str(self.mistakes[0]))


class ConfigErrors(HpcgenError):
    """Every mistake found in the configuration, each with where it comes from; one line each."""

    def __init__(self, messages: Sequence[str]) -> None:
        super().__init__("\n".join(messages))
        self.mistakes = tuple(
            message if isinstance(message, Mistake) else Mistake.at("", message) for message in messages
        )

    @property
    def messages(self) -> tuple[str, ...]:
        """The same as `mistakes`."""
        return self.mistakes


class JobStopped(KeyboardInterrupt):
    """Ctrl-C made a job save and leave, which was said: the command ends with status 130 and no further word."""


class JobFailed(Exception):
    """A job that hpcgen waited for has failed: the command prints it and ends with status 1."""
