"""Checks of scripts rendered from a site's templates: rules of this package, other programs, and `hpcgen lint`."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor

from hpcgen.check import behavior, lost, programs, variables
from hpcgen.check.comparison import RULES, Comparison
from hpcgen.check.lint import check
from hpcgen.check.lint.check import Finding
from hpcgen.check.shell_programs import read_by_shell_programs
from hpcgen.resources import shipped
from hpcgen.slurm.rendering.replaced import functions

__all__ = ["GROUPS", "ReadScripts", "compare", "read_by_lint", "read_scripts"]

GROUPS = (lost, variables, behavior, programs)
"""The modules of rules. Importing them fills RULES."""

ReadScripts = Callable[[Sequence[str]], Sequence[Sequence[Finding]]]
"""Other programs that check scripts. Returns a list of findings for each script."""


def compare(script: str, shipped_script: str) -> list[Finding]:
    """Findings in a site's script compared with the shipped one; empty if bash cannot parse the script."""
    if script == shipped_script:
        return []
    both = Comparison(script, shipped_script, library_functions())
    return [] if both.site.error else list(check.apply(RULES.values(), both, both.site))


@functools.cache
def library_functions() -> frozenset[str]:
    """The functions of all libraries in templates/lib."""

    libraries = (shipped("templates") / "lib").iterdir()
    return frozenset(name for path in libraries for name in functions(path.read_text(encoding="utf-8")))


def read_scripts(scripts: Sequence[str]) -> list[list[Finding]]:
    """Findings of bash, shellcheck (if installed) and `hpcgen lint` in each script. Uses all cores."""
    # The longest first: a long script at the end would keep the other cores idle.
    distinct = sorted(set(scripts), key=len, reverse=True)
    with ProcessPoolExecutor(
        max_workers=len(os.sched_getaffinity(0)),
        # at Ctrl-C, the processes end at once and only their parent reports it
        initializer=signal.signal,
        initargs=(signal.SIGINT, signal.SIG_DFL),
    ) as processes:
        findings = dict(zip(distinct, processes.map(_read, distinct), strict=True))
    return [findings[script] for script in scripts]


def _read(script: str) -> list[Finding]:
    found = read_by_shell_programs(script)
    # for a script that bash cannot parse, report only the syntax error
    return found if any(finding.rule == "syntax" for finding in found) else [*found, *read_by_lint(script)]


def read_by_lint(script: str) -> list[Finding]:
    """Errors and warnings of `hpcgen lint`. Notes depend on the cluster and are left out."""
    return [finding for finding in check.lint(script) if finding.severity != "note"]
