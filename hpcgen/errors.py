"""Exceptions for mistakes of users and admins, and for failed jobs. Bugs in hpcgen raise other exceptions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict


@dataclass(frozen=True)
class Problem:
    """One mistake in the configuration.

    `path` is the dotted path of the invalid value ("parallelism.tensor_model_parallel_size"). `reason` completes the
    sentence that starts with "path = value" ("does not divide model.num_attention_heads = 16 (16 / 6)"). `hint` says
    what to do ("use 1, 2, 4, 8 or 16") and may be empty.
    """

    path: str
    reason: str
    hint: str = ""
    file: Literal["run", "cluster"] = "run"
    """File that contains `path`: the run file or the cluster profile."""
    meant: str = ""
    """Path of the key that the user probably meant, if `path` is an unknown key."""


class MistakeParts(TypedDict):
    """The parts of a mistake, as printed in JSON."""

    key: str | None
    """Dotted path of the value; None if the mistake is not about a single value."""
    value: object
    """The value; None if it is missing, a section, or must not be printed."""
    file: str | None
    """File that sets the value; None for --set, presets and defaults."""
    line: int | None
    reason: str
    hint: str | None


class Mistake(str):
    """A mistake as one line of text, with its parts."""

    parts: MistakeParts

    @classmethod
    def of(
        cls, line: str, where: str, key: str | None, reason: str, hint: str, value: object = None
    ) -> Mistake:
        """Makes a mistake. `where` is a place such as "run.yaml:14", or a source that is not a file."""
        mistake = cls(line)
        file, _, number = where.rpartition(":")
        in_file = number.isdigit() and not where.startswith("--")
        mistake.parts = {
            "key": key or None,
            "value": value,
            "file": file if in_file else None,
            "line": int(number) if in_file else None,
            "reason": reason,
            "hint": hint or None,
        }
        return mistake

    @classmethod
    def at(cls, where: str, reason: str, hint: str = "") -> Mistake:
        """Makes a mistake that is not about a key: "WHERE: REASON; HINT", without empty parts."""
        line = f"{where}: {reason}" if where else reason
        return cls.of(f"{line}; {hint}" if hint else line, where, None, reason, hint)


class HpcgenError(Exception):
    """A mistake of the user. The command prints it without a traceback and exits with status 2."""

    def __init__(self, message: str, hint: str = "", *, where: str = "") -> None:
        """`where` is the place of the mistake, such as "run.yaml:14"."""
        self.mistakes: tuple[Mistake, ...] = (Mistake.at(where, message, hint),)
        super().__init__(str(self.mistakes[0]))


class ConfigErrors(HpcgenError):
    """All mistakes found in the configuration, one line each."""

    def __init__(self, messages: Sequence[str]) -> None:
        super().__init__("\n".join(messages))
        self.mistakes = tuple(
            message if isinstance(message, Mistake) else Mistake.at("", message) for message in messages
        )

    @property
    def messages(self) -> tuple[str, ...]:
        """An alias of `mistakes`."""
        return self.mistakes


class FileErrors(ConfigErrors):
    """Mistakes in the keys and values of files and of --set. Rules are checked only on files without them."""


class JobStopped(KeyboardInterrupt):
    """Ctrl-C made a local job save and stop. The command exits with status 130 and prints nothing more."""


class JobFailed(Exception):
    """A job that hpcgen waited for has failed. The command prints the message and exits with status 1."""
