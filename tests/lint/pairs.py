"""Reads pairs.txt: scripts that break a rule, each next to one that nearly does."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Pair:
    rule: str
    breaks: str
    """The script that breaks the rule."""
    lines: frozenset[int]
    """The lines that findings name."""
    nearly: str
    """The script that nearly breaks it."""


def _pair(rule: str, body: str) -> Pair:
    breaks = [line for line in body.splitlines() if line and line[0] in " -"]
    nearly = [line for line in body.splitlines() if line and line[0] in " +"]
    return Pair(
        rule=rule,
        breaks=_script(breaks),
        lines=frozenset(number for number, line in enumerate(breaks, 1) if line[1] == "!"),
        nearly=_script(nearly),
    )


def _script(lines: list[str]) -> str:
    return "".join(f"{line[3:]}\n" for line in lines)


_TEXT = Path(__file__).with_name("pairs.txt").read_text(encoding="utf-8")
_PARTS = re.split(r"^== (.+): ([\w-]+)\n", _TEXT, flags=re.MULTILINE)[1:]
PAIRS = {
    name: _pair(rule, body) for name, rule, body in zip(_PARTS[::3], _PARTS[1::3], _PARTS[2::3], strict=True)
}
