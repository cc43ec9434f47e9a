"""Constrained types for configuration fields, and the check of their constraints.

pydantic checks types and keys. Numbers are annotated with trainer.contract.config.Range and strings with `Text`.
`constraint_problems` checks a document against its type hints and reports all invalid values at once.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Union

from hpcgen.errors import Problem
from trainer.contract.code.imports import file_of
from trainer.contract.config import PathKind, Range, field_hints
from trainer.contract.record import record


@record
class Text:
    """The required pattern of a string. Unprintable characters are refused in all strings."""

    pattern: str
    meaning: str
    """Description that follows "must be", such as "1 to 64 letters, digits, '.', '_' or '-'"."""

    def problem(self, path: str, value: str) -> Problem | None:
        """The problem of an invalid `value` at `path`; None if it is valid."""
        is_valid = re.fullmatch(self.pattern, value, re.ASCII)
        return None if is_valid else Problem(path, f"must be {self.meaning}")


_SEGMENT = r"(?!\.\.(?:/|$))[^/]{0,255}"
_SAFE_SEGMENT = r"(?!\.\.(?:/|$))[A-Za-z0-9._+@=-]{0,255}"

Name = Annotated[
    str,
    Text(
        r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}",
        "1 to 64 letters, digits, '.', '_' or '-', starting with a letter or digit",
    ),
]
"""Name of a run, a partition or an account, safe in directives, file names and comments."""
SlurmWord = Annotated[
    str,
    Text(
        r"[A-Za-z0-9(\[][A-Za-z0-9._:+,@*|&()\[\]-]{0,255}", "one word for Slurm (no spaces, quotes or '$')"
    ),
]
"""A value written into a directive unchanged, such as the constraint "a100|h100"."""
Directive = Annotated[
    str,
    Text(
        r"--[a-z][a-z-]*(=[A-Za-z0-9._:+,@*|&()/%\[\]=-]+)?",
        "one sbatch option such as --mail-type=FAIL (no spaces, quotes or '$')",
    ),
]
EnvironmentName = Annotated[str, Text(r"[A-Za-z_][A-Za-z0-9_]*", "the name of an environment variable")]
PATH = Text(
    rf"(?![~-])(?=.{{1,1000}}$){_SEGMENT}(/{_SEGMENT})*",
    "a path without '..' (use an absolute path), of at most 1000 characters, that does not start with '~' or '-'",
)
ProfileName = Annotated[str, PATH]
"""Name of a profile, or path of its file."""


def is_profile_path(name: str) -> bool:
    """True if a profile is named by the path of its file."""
    return "/" in name or name.endswith((".yaml", ".yml"))


MinimumVersion = Annotated[
    str, Text(r">=\d{1,4}(\.\d{1,4}){0,2}", 'a minimum version of hpcgen such as ">=0.3"')
]
RunPath = Annotated[
    str,
    Text(
        rf"(?![-])(?=.{{1,1000}}$){_SAFE_SEGMENT}(/{_SAFE_SEGMENT})*",
        "a path of letters, digits and . _ + @ = - / without '..', because sbatch writes its log there",
    ),
]
TimeLimit = Annotated[
    str,
    Text(
        r"(\d{1,4}-)?\d{1,2}:\d{2}:\d{2}|\d{1,4}-\d{1,2}(:\d{2})?|\d{1,6}:\d{2}",
        "a Slurm time such as 30:00 (minutes:seconds), 12:00:00 or 2-00:00:00",
    ),
]
Mask = Annotated[
    str,
    Text(
        r"0x[0-9a-f]{1,254}",
        "a hexadecimal CPU mask such as 0xfff000, of at most 254 digits (Slurm cuts off the rest; leave cpu_masks out)",
    ),
]
"""A mask for srun --cpu-bind. Slurm cuts off what follows its first 256 characters (task/affinity, get_cpuset)."""


_PATHS = (PathKind.PATH, PathKind.TASK, PathKind.IN_RUN_DIR)
"""Texts that are a path, or are checked like one."""


def text_of(constraint: Any) -> Text | None:
    """The pattern that a constraint of a type requires of the complete string; None if it requires none."""
    return PATH if constraint in _PATHS else constraint if isinstance(constraint, Text) else None


def constraint_problems(hint: Any, value: Any, path: str = "") -> Iterator[Problem]:
    """Yields all numbers out of range and strings with the wrong pattern in `value`, a document of type `hint`.

    Values of the wrong type are skipped, because pydantic reports them.
    """
    origin = typing.get_origin(hint)
    if origin is Annotated:
        inner, *constraints = typing.get_args(hint)
        yield from constraint_problems(inner, value, path)
        yield from _unmet(constraints, value, path)
    elif origin in (Union, types.UnionType):
        if value is not None:
            [inner] = [arg for arg in typing.get_args(hint) if arg is not type(None)]
            yield from constraint_problems(inner, value, path)
    elif origin is tuple and isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from constraint_problems(typing.get_args(hint)[0], item, f"{path}[{index}]")
    elif origin is dict and isinstance(value, Mapping):
        of_key, of_value = typing.get_args(hint)
        for key, item in value.items():
            yield from constraint_problems(of_key, key, f"{path}.{key}")
            yield from constraint_problems(of_value, item, f"{path}.{key}")
    elif dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        hints = field_hints(typing.cast(type, hint))
        for field in dataclasses.fields(hint):
            if field.name in value:
                inner_path = f"{path}.{field.name}" if path else field.name
                yield from constraint_problems(hints[field.name], value[field.name], inner_path)
    elif isinstance(value, str) and not value.isprintable():
        # it could forge a line of a script or of a log
        character = next(character for character in value if not character.isprintable())
        yield Problem(path, f"contains the unprintable character {character!a}", "remove it")


def _unmet(constraints: list[Any], value: Any, path: str) -> Iterator[Problem]:
    for constraint in constraints:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if isinstance(constraint, Range) and is_number and (problem := constraint.problem(path, value)):
            yield problem
        if isinstance(value, str) and value.isprintable():
            yield from _unmet_by_text(constraint, value, path)


def _unmet_by_text(constraint: Any, value: str, path: str) -> Iterator[Problem]:
    if constraint is PathKind.FUNCTION:
        file = file_of(value)
        yield from () if file is None else _unmet_by_text(PathKind.PATH, file, path)
    elif constraint in _PATHS and not value:
        yield Problem(path, "is empty", "set a path, or remove the key")
    elif (text := text_of(constraint)) and (problem := text.problem(path, value)):
        yield problem


def seconds(time_limit: str) -> int:
    """Seconds of a Slurm time (minutes:seconds, hours:minutes:seconds or days-hours[:minutes[:seconds]])."""
    days, dash, clock = time_limit.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if dash:
        parts = [*parts, 0, 0][:3]
    while len(parts) < 3:
        parts.insert(0, 0)
    hours, minutes, secs = parts
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + secs


def slurm_time(duration_s: int) -> str:
    """`duration_s` in Slurm's format: 00:01:30 for 90, 2-00:00:00 for 172800."""
    days, rest = divmod(duration_s, 86400)
    clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock
