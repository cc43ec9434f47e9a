"""What can go wrong through no fault of hpcgen: problems in what the user or the admin wrote, said in one message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


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


class HpcgenError(Exception):
    """A mistake of the user's: the command prints it and ends with status 2, without a traceback."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message}; {hint}" if hint else message)


class ConfigErrors(HpcgenError):
    """Every mistake found in the configuration, each with where it comes from; one line each."""

    def __init__(self, messages: Sequence[str]) -> None:
        self.messages = tuple(messages)
        super().__init__("\n".join(self.messages))


class JobFailed(Exception):
    """A job that hpcgen waited for has failed: the command prints it and ends with status 1."""
