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
    """The line that says a mistake, with the parts that it was made of."""

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


def in_parts(message: str) -> MistakeParts:
    """The parts of a mistake; of a message that was made of none, what follows its place is the reason."""
    if isinstance(message, Mistake):
        return message.parts
    if place := re.match(r"(?!--)([^\n]+?):(\d+): ", message):
        reason = message[place.end() :]
        return {"key": None, "file": place[1], "line": int(place[2]), "reason": reason, "hint": None}
    return {"key": None, "file": None, "line": None, "reason": message, "hint": None}


class HpcgenError(Exception):
    """A mistake of the user's: the command prints it and ends with status 2, without a traceback."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message}; {hint}" if hint else message)

    @property
    def mistakes(self) -> tuple[str, ...]:
        """What is wrong, one line each."""
        return (str(self),)


class ConfigErrors(HpcgenError):
    """Every mistake found in the configuration, each with where it comes from; one line each."""

    def __init__(self, messages: Sequence[str]) -> None:
        self.messages = tuple(messages)
        super().__init__("\n".join(self.messages))

    @property
    def mistakes(self) -> tuple[str, ...]:
        """The same as `messages`."""
        return self.messages


class JobStopped(KeyboardInterrupt):
    """Ctrl-C made a job save and leave, which was said: the command ends with status 130 and no further word."""


class JobFailed(Exception):
    """A job that hpcgen waited for has failed: the command prints it and ends with status 1."""
