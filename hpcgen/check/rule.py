"""The register of rules for scripts rendered from a site's templates."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hpcgen.check.comparison import Comparison
from hpcgen.check.lint.rule import Hit, Rule, Severity, rule

Check = Callable[[Comparison], Iterator[Hit]]

RULES: dict[str, Rule] = {}
"""Every rule by its ID, filled when the modules of rules are imported."""


def site_rule(id: str, title: str, *, severity: Severity = "error") -> Callable[[Check], Check]:
    """Registers a function as a rule. Its docstring is the explanation."""
    return rule(id, severity, title, register=RULES)
