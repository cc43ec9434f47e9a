"""What a check says about a script: a rule, and where it is broken."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One thing that scripts hold to. docs/templates.md lists them."""

    name: str
    why: str
    fix: str


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A rule that a script breaks."""

    rule: Rule
    what: str
    names: tuple[str, ...] = ()
    """Of the variables, options or words that it is about, where there can be many."""
    line: int = 0
    """Of the script; 0 when something is missing."""
    block: str = ""
    """The block that holds what is missing, or ""."""
