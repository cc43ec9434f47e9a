"""Checks a script against the rules, except those that its comments disable."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from hpcgen.check.lint.job import Job
from hpcgen.check.lint.reader import read
from hpcgen.check.lint.rule import Hit, Rule, Severity
from hpcgen.check.lint.rules import RULES
from hpcgen.check.lint.sbatch import parse_options
from hpcgen.check.lint.script import Command, Script
from hpcgen.config.sbatch_options import matching_options
from hpcgen.errors import HpcgenError
from hpcgen.text import did_you_mean
from trainer.contract.problem import Problem

__all__ = ["RULES", "Finding", "apply", "lint", "release_of", "require_known", "selection"]

IGNORE = re.compile(r"#\s*hpcgen:\s*ignore=([\w,-]+)")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A violation of a rule in a script."""

    path: str
    line: int
    rule: str
    severity: Severity
    problem: Problem
    """The mistake. Its hint is the correction."""
    also: tuple[int, ...] = ()
    """Other lines with the same mistake."""

    def entry(self) -> dict[str, Any]:
        """The finding as plain data for JSON."""
        return {
            "path": self.path,
            "line": self.line,
            "rule": self.rule,
            "severity": self.severity,
            "why": self.problem.reason,
            "fix": self.problem.hint,
            "also": self.also,
        }


_Result = TypeVar("_Result")
OnBug = Callable[[str, Exception], None]
"""Called with the script or rule at which hpcgen itself failed, and the exception."""


def _raise(where: str, bug: Exception) -> None:
    raise bug


def _attempt(action: Callable[[], _Result], where: str, on_bug: OnBug) -> _Result | None:
    """The result of an action; None if hpcgen itself fails."""
    try:
        return action()
    except HpcgenError:
        raise
    except Exception as bug:
        on_bug(where, bug)
        return None


def lint(
    text: str,
    path: str = "-",
    rules: Collection[str] | None = None,
    slurm_version: str | None = None,
    on_bug: OnBug = _raise,
) -> list[Finding]:
    """Checks a script and returns the findings in the order of its lines.

    Args:
        text: the script.
        path: the name of the script in findings.
        rules: IDs of the rules to check. None: all rules.
        slurm_version: release of the cluster, such as "22.05". None: unknown.
        on_bug: called when hpcgen itself fails at a rule, whose findings are then missing. Default: raises.

    Raises:
        HpcgenError: the text is not a script.
    """
    script = _attempt(lambda: read(text, path), path, on_bug)
    if script is None:
        return []
    found = list(_findings(script, rules, slurm_version, on_bug))
    submissions = {
        command.here_line: command
        for command in script.commands
        if command.name == "sbatch" and command.here_document.startswith("#!")
    }
    for line, command in submissions.items():
        # a here-document of sbatch is a separate script
        above = line - 1
        submitted = _attempt(partial(_submitted, command, path), path, on_bug)
        for inner in _findings(submitted, rules, slurm_version, on_bug) if submitted else ():
            also = tuple(number + above for number in inner.also)
            found.append(replace(inner, line=inner.line + above, also=also))
    return sorted(found, key=lambda finding: (finding.line, finding.rule, finding.problem.reason))


def _submitted(command: Command, path: str) -> Script:
    """The script that sbatch gets from a here-document. Options of sbatch override its directives."""
    words = command.words[1:]
    arguments = parse_options([word.text for word in words])
    is_expanded = command.here_expands or not all(word.known for word in words)
    return read(
        command.here_document,
        path,
        expanded=command.here_expanded if is_expanded else None,
        options={name: argument.value for argument in arguments for name in matching_options(argument.name)},
    )


def _findings(
    script: Script, rules: Collection[str] | None, slurm_version: str | None, on_bug: OnBug
) -> Iterator[Finding]:
    job = Job(script)
    chosen = [
        rule
        for rule in RULES.values()
        if rule.applies_to(slurm_version, job.oldest_slurm) and (rules is None or rule.id in rules)
    ]
    return apply(chosen, job, script, slurm_version, on_bug)


def apply(
    rules: Iterable[Rule],
    subject: object,
    script: Script,
    slurm_version: str | None = None,
    on_bug: OnBug = _raise,
) -> Iterator[Finding]:
    """Applies rules to `subject`. Findings that comments of the script disable are left out."""
    ignored = _ignored(script)
    for rule in rules:
        found = _attempt(partial(_hits, rule, subject), f"{script.path}, rule {rule.id}", on_bug)
        hits = [
            hit
            for hit in found or ()
            if rule.id not in ignored.get(hit.line, ()) and hit.applies_to(slurm_version)
        ]
        for first, *others in _grouped(hits):
            yield Finding(
                path=script.path,
                line=first.line,
                rule=rule.id,
                severity=rule.severity_of(first, slurm_version),
                problem=first.problem,
                also=tuple(dict.fromkeys(hit.line for hit in others if hit.line != first.line)),
            )


def _hits(rule: Rule, subject: object) -> list[Hit]:
    return list(rule.check(subject))


def _grouped(hits: Iterable[Hit]) -> Iterable[list[Hit]]:
    """Groups hits of one rule by severity and cause. Each group is in the order of lines."""
    groups: dict[tuple[Severity | None, str, str], list[Hit]] = {}
    for hit in sorted(hits, key=lambda hit: hit.line):
        what = (hit.cause, "") if hit.cause else (hit.problem.reason, hit.problem.hint)
        groups.setdefault((hit.severity, *what), []).append(hit)
    return groups.values()


def selection(chosen: Sequence[str], ignored: Sequence[str]) -> frozenset[str]:
    """The IDs of the rules to check.

    Raises:
        HpcgenError: an ID is unknown.
    """
    for id in (*chosen, *ignored):
        require_known(id)
    return frozenset(chosen or RULES) - frozenset(ignored)


def release_of(version: str) -> str:
    """The release of a Slurm version, such as 22.05 for 22.05.8.

    Raises:
        HpcgenError: the text is not a Slurm version.
    """
    found = re.fullmatch(r"(\d\d\.\d\d)(\.\d+)?", version, re.ASCII)
    if not found:
        raise HpcgenError(f"{version!r} is not a Slurm version", "give one such as 22.05 or 24.11.3")
    return found[1]


def require_known(id: str) -> None:
    """Refuses an unknown rule.

    Raises:
        HpcgenError: no rule has this ID.
    """
    if id not in RULES:
        hint = did_you_mean(id, RULES, most=1) or "hpcgen lint --rules lists them"
        raise HpcgenError(f"{id!r} is not a rule", hint)


def _ignored(script: Script) -> dict[int, set[str]]:
    """Line -> rules disabled by a comment on the line, above it, or above the command that contains it."""
    comments = {
        number: set(found[1].split(","))
        for number, line in enumerate(script.lines, start=1)
        if (found := IGNORE.search(line))
    }
    ignored: dict[int, set[str]] = {}
    if not comments:
        return ignored
    for number, rules in comments.items():
        ignored.setdefault(number, set()).update(rules)
        if re.match(r"\s*#(?!SBATCH)", script.lines[number - 1]):
            ignored.setdefault(number + 1, set()).update(rules)
    for first, last in _extents(script):
        for line in range(first + 1, last + 1) if first in ignored else ():
            ignored.setdefault(line, set()).update(ignored[first])
    return ignored


def _extents(script: Script) -> Iterator[tuple[int, int]]:
    for command in script.commands:
        if command.end > command.line:
            yield command.line, command.end
    for assignment in script.assignments:
        lines = [word.line for word in assignment.items or ()]
        if lines and max(lines) > assignment.line:
            yield assignment.line, max(lines)
