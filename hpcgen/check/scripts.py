"""Checks of one script rendered from a site's templates: rules of this package, and of `hpcgen lint`."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence

from hpcgen.check import behavior, kept, variables
from hpcgen.check.comparison import Comparison
from hpcgen.check.lint import check
from hpcgen.check.lint.check import Finding
from hpcgen.check.lint.syntax import ShellSyntaxError
from hpcgen.check.rule import RULES
from hpcgen.resources import shipped

__all__ = ["GROUPS", "ReadScripts", "compare", "read_by_lint"]

GROUPS = (kept, variables, behavior)
"""The modules of rules: importing them fills RULES, in this order."""

ReadScripts = Callable[[Sequence[str]], Sequence[Sequence[Finding]]]
"""Other programs that check scripts. Returns a list of findings for each script."""


def compare(script: str, shipped_script: str) -> list[Finding]:
    """Findings in a site's script compared with the shipped one; empty if bash cannot parse the script."""
    if script == shipped_script:
        return []
    both = Comparison(script, shipped_script, library_functions())
    try:
        return list(check.apply(RULES.values(), both, both.job.script))
    except ShellSyntaxError:
        return []


@functools.cache
def library_functions() -> frozenset[str]:
    """The functions of all libraries in templates/lib."""

    def names() -> Iterator[str]:
        for path in (shipped("templates") / "lib").iterdir():
            yield from re.findall(r"^(\w+)\(\)", path.read_text(encoding="utf-8"), re.MULTILINE)

    return frozenset(names())


def read_by_lint(scripts: Sequence[str]) -> list[list[Finding]]:
    """Errors and warnings of `hpcgen lint` in each script. Notes depend on the cluster and are left out."""
    found = {
        script: [finding for finding in check.lint(script) if finding.severity != "note"]
        for script in dict.fromkeys(scripts)
    }
    return [found[script] for script in scripts]
