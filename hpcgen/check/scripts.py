"""The checks of one script of a site's templates: the rules of this package, and those of `hpcgen lint`."""

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
"""What other programs find in scripts: one list for each."""


def compare(script: str, shipped_script: str) -> list[Finding]:
    """Findings in a site's script next to the shipped one; none for a script that bash cannot read."""
    if script == shipped_script:
        return []
    both = Comparison(script, shipped_script, library_functions())
    try:
        return list(check.apply(RULES.values(), both, both.job.script))
    except ShellSyntaxError:
        return []


@functools.cache
def library_functions() -> frozenset[str]:
    """The functions of all libraries of templates/lib."""

    def names() -> Iterator[str]:
        for path in (shipped("templates") / "lib").iterdir():
            yield from re.findall(r"^(\w+)\(\)", path.read_text(encoding="utf-8"), re.MULTILINE)

    return frozenset(names())


def read_by_lint(scripts: Sequence[str]) -> list[list[Finding]]:
    """The errors and warnings of `hpcgen lint` in each script; notes are for those who know the cluster."""
    found = {
        script: [finding for finding in check.lint(script) if finding.severity != "note"]
        for script in dict.fromkeys(scripts)
    }
    return [found[script] for script in scripts]
