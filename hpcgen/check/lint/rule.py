"""What a rule is, and the register of them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from hpcgen.check.lint.job import Job

Severity = Literal["error", "warning", "note"]
"""error: the job fails or does something else than the script says; warning: it costs speed, time or safety,
or fails on a bad day; note: it may be right on this cluster, and is worth a look."""


@dataclass(frozen=True)
class Hit:
    """A place that breaks a rule: `why` says what is there, `fix` what to write instead."""

    line: int
    why: str
    fix: str
    cause: str = ""
    """Shared by hits that one mistake causes although `why` differs. They become one finding."""
    severity: Severity | None = None
    """Severity of this finding. Default: that of the rule."""
    needs_release: bool = False
    """Whether it is reported only where the cluster's Slurm release is known."""


Check = Callable[[Job], Iterator[Hit]]
_Check = TypeVar("_Check", bound=Callable[[Any], Iterator[Hit]])


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
    """Where the fact is documented or was measured; "" for facts about hpcgen itself."""
    slurm: tuple[str, str] | None
    """First ("" for any) and last Slurm release that behave so. None: every release."""
    check: Callable[[Any], Iterator[Hit]]
    """Finds the places in a `Job`, or in the `Comparison` of hpcgen.check."""

    def applies_to(self, slurm_version: str | None, oldest: str = "") -> bool:
        """Whether the rule holds, or may hold, on a Slurm release, for a script that needs at least `oldest`."""
        if self.slurm is None:
            return True
        first, last = self.slurm
        # releases are YY.MM, so their order is that of the text
        return oldest <= last and (slurm_version is None or first <= slurm_version <= last)

    def severity_of(self, hit: Hit, slurm_version: str | None) -> Severity:
        """Severity of a hit. Without a release, a rule for some releases only yields notes."""
        if self.slurm is not None and slurm_version is None:
            return "note"
        return hit.severity or self.severity


RULES: dict[str, Rule] = {}
"""Every rule by its id, filled as the modules of `hpcgen.check.lint.rules` are imported."""


def rule(
    id: str,
    severity: Severity,
    title: str,
    *,
    source: str = "",
    slurm: tuple[str, str] | None = None,
    register: dict[str, Rule] = RULES,
) -> Callable[[_Check], _Check]:
    """Registers a function as a rule; its docstring is the explanation."""

    def add(check: _Check) -> _Check:
        assert id not in register, id
        assert check.__doc__, id
        explanation = "\n".join(line.strip() for line in check.__doc__.strip().splitlines())
        register[id] = Rule(
            id=id,
            severity=severity,
            title=title,
            explanation=explanation,
            source=source,
            slurm=slurm,
            check=check,
        )
        return check

    return add
