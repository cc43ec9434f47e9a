"""What a rule is, and the register of them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from hpcgen.lint.job import Job

Severity = Literal["error", "warning", "note"]
"""error: the job fails or does something else than the script says; warning: it costs speed, time or safety,
or fails on a bad day; note: it may be right on this cluster, and is worth a look."""


@dataclass(frozen=True)
class Hit:
    """Where a rule is broken: `why` says what is there, `fix` what to write instead."""

    line: int
    why: str
    fix: str


Check = Callable[[Job], Iterator[Hit]]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule; its documentation is what `hpcgen lint --explain` prints."""

    id: str
    severity: Severity
    title: str
    """What is wrong with a script that breaks it, in a few words."""
    explanation: str
    """Why that matters."""
    source: str
    """Where the fact is from; "" for what follows from the shell."""
    check: Check


RULES: dict[str, Rule] = {}
"""Every rule by its id, filled as the modules of `hpcgen.lint.rules` are imported."""


def rule(id: str, severity: Severity, title: str, *, source: str = "") -> Callable[[Check], Check]:
    """Registers a function as a rule; its docstring is the explanation."""

    def register(check: Check) -> Check:
        assert id not in RULES, id
        assert check.__doc__, id
        explanation = "\n".join(line.strip() for line in check.__doc__.strip().splitlines())
        RULES[id] = Rule(
            id=id, severity=severity, title=title, explanation=explanation, source=source, check=check
        )
        return check

    return register
