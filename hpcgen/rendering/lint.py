"""What hpcgen's own lint says of scripts that were made from templates."""

from __future__ import annotations

from collections.abc import Sequence

from hpcgen.lint import check
from hpcgen.rendering.findings import Finding, Rule


def lint_scripts(scripts: Sequence[str]) -> list[list[Finding]]:
    """The errors and warnings in each script; notes are for those who know the cluster."""
    findings = {script: _lint(script) for script in dict.fromkeys(scripts)}
    return [findings[script] for script in scripts]


def _lint(script: str) -> list[Finding]:
    return [_finding(found) for found in check.lint(script) if found.severity != "note"]


def _finding(found: check.Finding) -> Finding:
    rule = check.RULES[found.rule]
    why = " ".join(rule.explanation.split("\n\n")[0].split())
    return Finding(rule=Rule(name=rule.id, why=why, fix=found.fix), what=found.why, line=found.line)
