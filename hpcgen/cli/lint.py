"""hpcgen lint: check any batch script for mistakes."""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcgen.cli.options import strict_option
from hpcgen.errors import FilePlace, HpcgenError
from hpcgen.text import counted, harmless, printable

if TYPE_CHECKING:
    from hpcgen.check.lint.check import Finding
    from hpcgen.check.lint.rule import Rule

_MAX_BYTES = 16 * 2**20
COLORS = {"error": "red", "warning": "yellow", "note": "cyan"}


def _complete_rules(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    return [id for id in _rules() if id.startswith(incomplete)]


def _rules() -> Mapping[str, Rule]:
    """The rules by ID."""
    from hpcgen.check.lint.check import RULES

    return RULES


def _print_rules(context: click.Context, parameter: click.Parameter, asked: bool) -> None:
    if not asked:
        return
    width = max(map(len, _rules()))
    for rule in _rules().values():
        click.echo(f"{rule.id:<{width}}  {rule.severity:<7}  {rule.title}")
    context.exit()


def _explain(context: click.Context, parameter: click.Parameter, id: str | None) -> None:
    from hpcgen.check.lint.check import require_known

    if id is None:
        return
    require_known(id)
    rule = _rules()[id]
    click.echo(f"{rule.id} ({rule.severity}): {rule.title}\n\n{rule.explanation}")
    if rule.slurm:
        first, last = rule.slurm
        click.echo(f"\nSlurm versions: {f'{first} to {last}' if first else f'up to {last}'}")
    if rule.source:
        click.echo(f"\nSource: {rule.source}")
    click.echo(f"\nTo ignore this rule for one line, write above the line: # hpcgen: ignore={rule.id}")
    context.exit()


@click.command("lint")
@click.argument("scripts", metavar="SCRIPT...", nargs=-1, required=True)
@click.option(
    "--rule",
    "chosen",
    multiple=True,
    metavar="ID",
    help="Check only this rule; repeatable.",
    shell_complete=_complete_rules,
)
@click.option(
    "--ignore",
    multiple=True,
    metavar="ID",
    help="Skip this rule; repeatable.",
    shell_complete=_complete_rules,
)
@click.option(
    "--slurm-version",
    metavar="VERSION",
    help="Slurm version of the cluster, such as 22.05. Without it, findings that depend on the version are notes.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as a JSON list.")
@strict_option
@click.option(
    "--rules", is_flag=True, is_eager=True, expose_value=False, callback=_print_rules, help="List all rules."
)
@click.option(
    "--explain",
    metavar="ID",
    is_eager=True,
    expose_value=False,
    callback=_explain,
    help="Explain why a rule matters and how to ignore it.",
    shell_complete=_complete_rules,
)
def command(
    scripts: tuple[str, ...],
    chosen: tuple[str, ...],
    ignore: tuple[str, ...],
    slurm_version: str | None,
    as_json: bool,
    strict: bool,
) -> None:
    """Use - as SCRIPT for standard input. Exits with status 1 if there is an error or a warning, and with --strict also
    if there is a note. A bug in hpcgen is reported with its traceback after the findings, and also means
    status 1.
    """
    from hpcgen.check.lint import check, syntax

    syntax.find_shfmt()  # its absence is no bug
    rules = check.selection(chosen, ignore)
    release = None if slurm_version is None else check.release_of(slurm_version)
    texts = [_read(path) for path in scripts]
    bugs: dict[tuple[str, int | None], str] = {}

    def on_bug(where: str, bug: Exception) -> None:
        frame = traceback.extract_tb(bug.__traceback__)[-1]
        report = "".join(traceback.format_exception(bug))
        message = f"{harmless(where)}: this is a bug in hpcgen; findings may be missing\n{report}"
        bugs.setdefault((frame.filename, frame.lineno), message)

    findings = [
        finding
        for path, text in zip(scripts, texts, strict=True)
        for finding in check.lint(text, path, rules, release, on_bug)
    ]
    if as_json:
        click.echo(json.dumps([finding.entry() for finding in findings], indent=1))
    else:
        for finding in findings:
            _show(finding)
    _summarize(findings, len(scripts))
    for message in bugs.values():
        click.echo(message, err=True)
    if bugs or any(strict or finding.severity != "note" for finding in findings):
        sys.exit(1)


def _read(path: str) -> str:
    try:
        with contextlib.nullcontext(sys.stdin.buffer) if path == "-" else Path(path).open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise HpcgenError(
            f"cannot be read ({error.strerror})",
            "name a shell script, or - for standard input",
            where=FilePlace(path),
        ) from error
    if len(content) > _MAX_BYTES:
        raise HpcgenError(
            f"is larger than {_MAX_BYTES >> 20} MiB, four times what Slurm accepts by default (max_script_size)",
            "name a shell script",
            where=FilePlace(path),
        )
    # comments can be in any encoding
    return content.decode(errors="replace")


def _show(finding: Finding) -> None:
    path = finding.path if finding.path.isprintable() else ascii(finding.path)
    place = click.style(f"{path}:{finding.line}:", bold=True)
    severity = click.style(f"{finding.severity}:", fg=COLORS[finding.severity])
    click.echo(f"{place} {severity} {printable(finding.problem.reason)} [{finding.rule}]")
    if finding.also:
        noun = "lines" if len(finding.also) > 1 else "line"
        click.echo(f"    also: {noun} {', '.join(map(str, finding.also))}")
    click.echo(f"    fix: {printable(finding.problem.hint)}")


def _summarize(findings: list[Finding], num_scripts: int) -> None:
    counts = Counter(finding.severity for finding in findings)
    parts = [
        counted(count, severity)
        for severity in COLORS
        if (count := counts[severity])  # type: ignore[index]
    ]
    where = f" in {num_scripts} scripts" if num_scripts > 1 else ""
    click.echo(f"{', '.join(parts) if parts else 'no findings'}{where}", err=True)
