"""Rules and their register."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from hpcgen.check.lint.job import Job
from trainer.contract.problem import Problem

Severity = Literal["error", "warning", "note"]
"""error: the job fails or does not do what the script says; warning: it costs speed, time or safety, or can fail;
note: it may be correct on this cluster, but should be checked."""


@dataclass(frozen=True)
class Hit:
    """A place that violates a rule."""

    line: int
    problem: Problem
    cause: str = ""
    """Identifies a mistake. Hits with the same cause but different reasons become one finding."""
    severity: Severity | None = None
    """Severity of this finding. Default: the severity of the rule."""
    needs_release: bool = False
    """True if the hit is reported only for a cluster whose Slurm release is known."""
    before: str = ""
    """Slurm release that no longer has the problem. The hit is only reported if the cluster's release is known to be
    older."""

    @classmethod
    def at(
        cls,
        line: int,
        why: str,
        fix: str,
        *,
        cause: str = "",
        severity: Severity | None = None,
        needs_release: bool = False,
        before: str = "",
    ) -> Hit:
        """A hit in a line. `why` describes the mistake, and `fix` the correction."""
        return cls(line, Problem("", why, fix), cause, severity, needs_release, before)

    def applies_to(self, slurm_version: str | None) -> bool:
        """True if the hit can apply to a Slurm release, or to an unknown one."""
        if slurm_version is None:
            return not self.needs_release and not self.before
        return not self.before or slurm_version < self.before


Check = Callable[[Job], Iterator[Hit]]
_Check = TypeVar("_Check", bound=Callable[[Any], Iterator[Hit]])


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule. `hpcgen lint --explain` prints its documentation."""

    id: str
    severity: Severity
    title: str
    """The mistake, in a few words."""
    explanation: str
    """Why the mistake matters."""
    source: str
    """Where the behavior is documented or was measured; "" for hpcgen's own behavior."""
    slurm: tuple[str, str] | None
    """First ("" for any) and last Slurm release with this behavior. None: every release."""
    check: Callable[[Any], Iterator[Hit]]
    """Finds hits in a `Job`, or in a `Comparison` of hpcgen.check."""

    def applies_to(self, slurm_version: str | None, oldest: str = "") -> bool:
        """True if the rule can apply to a Slurm release, and to a script that requires at least `oldest`."""
        if self.slurm is None:
            return True
        first, last = self.slurm
        # releases are YY.MM, so strings compare like releases
        return oldest <= last and (slurm_version is None or first <= slurm_version <= last)

    def severity_of(self, hit: Hit, slurm_version: str | None) -> Severity:
        """Severity of a hit. If the release is unknown, rules for some releases only yield notes."""
        if self.slurm is not None and slurm_version is None:
            return "note"
        return hit.severity or self.severity


RULES: dict[str, Rule] = {}
"""Every rule by its ID. Importing the package `hpcgen.check.lint.rules` fills it."""


def rule(
    id: str,
    severity: Severity,
    title: str,
    *,
    source: str = "",
    slurm: tuple[str, str] | None = None,
    register: dict[str, Rule] = RULES,
) -> Callable[[_Check], _Check]:
    """Registers a function as a rule. Its docstring is the explanation."""

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
