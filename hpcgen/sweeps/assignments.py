"""Assignments of the points of a sweep: values separated by commas, or one point per line of a file."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcgen.config.document import read_text, split_assignment
from hpcgen.config.keys import section_of
from hpcgen.config.run import RunConfig
from hpcgen.errors import ConfigErrors, FilePlace, HpcgenError, Problem
from hpcgen.text import counted

MAX_POINTS = 1000
"""Maximum number of points. A grid of a few keys with many values each is rarely meant."""
MAX_NAME = 48
"""Maximum length of a point's name. It is part of a directory's name and of the name of a job."""

SCIENTIFIC_TO = 0.01
"""Numbers up to this one are written as 3e-4 in names."""

Assignments = tuple[str, ...]
"""The values that distinguish a point, such as ("optimizer.lr=1e-4", "training.seed=2")."""

_OF_POINTS = {
    "name": "each point has its own name, which begins with that of the run file",
    "paths.run_dir": "each point has its own directory, below that of the run file",
}
_OPENING, _CLOSING, _QUOTES = "[{", "]}", "\"'"


def split_values(text: str) -> list[str]:
    """The values of `a,b,[c,d]`. Commas in brackets, braces and quotes belong to a value, as in YAML."""
    values, depth, quote, before = [""], 0, "", ","
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in _QUOTES and before in f",{_OPENING}:":  # the apostrophe of a word quotes nothing
            quote = char
        elif char in _OPENING:
            depth += 1
        elif char in _CLOSING:
            depth -= 1
        elif char == "," and depth <= 0:
            values.append("")
            before = char
            continue
        values[-1] += char
        before = before if char == " " else char
    return [value.strip() for value in values]


def points_of(settings: Sequence[str], *, paired: bool = False) -> tuple[list[str], list[Assignments]]:
    """The settings that all points share, and the assignments of each point.

    A setting with several values, such as optimizer.lr=1e-4,3e-4, distinguishes points. All combinations are points, or
    with `paired` the first values of all settings, their second values and so on.

    Raises:
        HpcgenError: no setting has several values, there are too many points, or with `paired` the numbers differ.
        ConfigErrors: settings are malformed.
    """
    shared, swept, mistakes = [], dict[str, list[str]](), list[Problem]()
    for setting in settings:
        try:
            path, values = _values(setting)
        except HpcgenError as error:
            mistakes += error.mistakes
            continue
        if len(values) > 1:
            swept[path] = [f"{path}={value}" for value in values]  # the last one counts, as with --set
        else:
            shared.append(setting)
    if mistakes:
        raise ConfigErrors(mistakes)
    return shared, combined(swept, paired=paired)


def _values(setting: str) -> tuple[str, list[str]]:
    path, text = split_assignment(setting)
    values = split_values(text)
    if len(values) > 1 and path in _OF_POINTS:
        raise HpcgenError(f"--set {path} has several values, but {_OF_POINTS[path]}", "set one value")
    if len(values) > 1 and "" in values:
        hint = "remove a comma; quote or bracket a value that contains commas: --set 'data.split=\"99,1,0\"'"
        raise HpcgenError(f"--set {setting}: a value is empty", hint)
    default = _default(path)
    if (
        len(values) > 1
        and isinstance(default, str)
        and "," in default
        and not all("," in value for value in values)
    ):
        hint = f"quote each value: --set '{path}=\"{text}\"'"
        raise HpcgenError(
            f"--set {setting}: the commas are those of one value, as in the default {default}", hint
        )
    return path, values


def _default(path: str) -> object:
    """The default of a key; None if it has none, or is not known."""
    *section, key = path.split(".")
    with contextlib.suppress(KeyError, TypeError):  # an unknown key, or one of a mapping
        fields = dataclasses.fields(section_of(RunConfig, section))
        return next((field.default for field in fields if field.name == key), None)
    return None


def combined(swept: Mapping[str, Sequence[str]], *, paired: bool = False) -> list[Assignments]:
    """The points of a sweep over `swept`, the assignments by their keys: all combinations, or with `paired` the first
    of each key, the second ones and so on.

    Raises:
        HpcgenError: there is no point, or too many, or with `paired` the numbers differ.
    """
    if not swept:
        hint = "separate values with commas: --set optimizer.lr=1e-4,3e-4"
        raise HpcgenError("no setting has several values, so there is nothing to sweep", hint)
    lengths = {path: len(values) for path, values in swept.items()}
    if paired and len(set(lengths.values())) > 1:
        numbers = ", ".join(f"{path} has {length}" for path, length in lengths.items())
        raise HpcgenError(f"--zip needs the same number of values for each key, but {numbers}")
    number = min(lengths.values())
    if not paired:
        number = 1
        for length in lengths.values():
            number *= length
    _require_few(number)
    rows = zip(*swept.values(), strict=True) if paired else itertools.product(*swept.values())
    return [tuple(row) for row in rows]


def read_points(file: Path) -> list[Assignments]:
    """The points of a file: one per line, as words of a shell. Text after # is ignored, as are empty lines.

    Raises:
        ConfigErrors: lines are malformed. Lists all of them.
        HpcgenError: the file cannot be read, or has no point or too many.
    """
    points, mistakes = list[Assignments](), list[Problem]()
    for number, line in enumerate(read_text(file).splitlines(), 1):
        try:
            words = tuple(shlex.split(line, comments=True))
            for word in words:
                _require_own_value(word)
        except (HpcgenError, ValueError) as error:
            reason = f"cannot be split into words ({error})" if isinstance(error, ValueError) else str(error)
            mistakes.append(Problem("", reason, where=FilePlace(file, number)))
            continue
        if words:
            points.append(words)
    if mistakes:
        raise ConfigErrors(mistakes)
    if not points:
        raise HpcgenError("has no points", "write one per line, such as optimizer.lr=3e-4", where=file)
    _require_few(len(points))
    return points


def _require_own_value(word: str) -> None:
    path, _ = split_assignment(word)
    if path in _OF_POINTS:
        raise HpcgenError(f"{path} cannot be set here: {_OF_POINTS[path]}", "remove it")


def _require_few(number: int) -> None:
    if number > MAX_POINTS:
        raise HpcgenError(
            f"{counted(number, 'point')} are more than the maximum of {MAX_POINTS:,}", "use fewer values"
        )


def point_names(points: Sequence[Assignments]) -> list[str]:
    """A readable name for each point, such as lr-3e-4_seed-2. It is short, so different points can have the same name.

    A name does not depend on the values of other points, so that it stays when they change.
    """
    values = [dict(map(split_assignment, point)) for point in points]
    short = _short_names(list(dict.fromkeys(path for each in values for path in each)))
    return [
        "_".join(f"{short[path]}-{_in_name(text)}" for path, text in each.items())[:MAX_NAME]
        for each in values
    ]


def _short_names(paths: Sequence[str]) -> dict[str, str]:
    """The shortest ends of dotted paths that distinguish them."""
    parts = [path.split(".") for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        ends = [".".join(each[-count:]) for each in parts]
        if len(set(ends)) == len(ends):
            break
    return dict(zip(paths, ends, strict=True))


def _in_name(text: str) -> str:
    """A value as part of a name. 3e-4 and 0.0003 are the same."""
    if re.fullmatch(r"[+-]?[0-9]*\.?[0-9]+(e[+-]?[0-9]+)?", text, re.IGNORECASE) and not text.isdecimal():
        number = float(text)
        mantissa, _, exponent = f"{number:e}".partition("e")
        is_small = number != 0 and abs(number) <= SCIENTIFIC_TO
        text = f"{float(mantissa):g}e{int(exponent)}" if is_small or abs(number) >= 1e6 else f"{number:g}"
    sign = "-" if text.startswith("-") else ""
    return sign + (re.sub(r"[^A-Za-z0-9.-]+", "-", text).strip("-.") or "none")
