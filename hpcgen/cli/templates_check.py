"""Checks the scripts of all stages and profiles for `hpcgen templates check`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from hpcgen import api
from hpcgen.check import scripts, shell_programs, site
from hpcgen.check.lint.syntax import find_shfmt
from hpcgen.check.site import Report
from hpcgen.config.profiles import cluster_names
from hpcgen.text import counted, few


def check_templates(templates: Sequence[Path], clusters: Sequence[str], *, as_json: bool) -> int:
    """Renders every stage for the profiles `clusters` and prints what is found. Returns the exit status.

    `clusters` are names of profiles. Default: all. `templates` are directories of site templates.

    Raises:
        HpcgenError: shfmt is missing, or a directory of templates is invalid.
    """
    find_shfmt()  # now rather than after all scripts are rendered
    directories = api.site_directories(templates)
    report = site.check_site(
        directories, clusters or cluster_names(), scripts.read_scripts, named=bool(clusters)
    )
    shellchecked = shell_programs.has_shellcheck()
    if as_json:
        click.echo(json.dumps(_as_json(report, shellchecked), indent=1))
    else:
        _print_report(report, directories, shellchecked)
    return 1 if report.findings else 0


def _as_json(report: Report, shellchecked: bool) -> dict[str, Any]:
    findings = [
        {
            "rule": seen.finding.rule,
            "severity": seen.finding.severity,
            "file": seen.finding.path,
            "line": seen.finding.line,
            "why": seen.finding.problem.reason,
            "fix": seen.finding.problem.hint,
            "seen": seen.scripts,
        }
        for seen in report.findings
    ]
    return {
        "clusters": report.clusters,
        "scripts": report.num_scripts,
        "shellcheck": shellchecked,
        "findings": findings,
    }


def _print_report(report: Report, directories: Sequence[Path], shellchecked: bool) -> None:
    for seen in report.findings:
        finding = seen.finding
        color = "red" if finding.severity == "error" else "yellow"
        click.echo(f"{seen.where}: {click.style(finding.rule, fg=color)}: {finding.problem.reason}")
        click.echo(f"    why: {seen.why}")
        click.echo(f"    fix: {finding.problem.hint}")
        if seen.scripts:
            click.echo(f"    in:  {few(seen.scripts, separator=';')}")
    sites = ", ".join(str(directory) for directory in directories) or "the shipped templates only"
    num_findings = len(report.findings)
    click.echo(
        f"{counted(num_findings, 'finding') if num_findings else 'no findings'}: "
        f"{counted(report.num_scripts, 'script')} for {', '.join(report.clusters)}, with {sites}",
        err=True,
    )
    if not shellchecked:
        click.secho(
            "shellcheck is not installed, so the scripts were checked without it", fg="yellow", err=True
        )
