"""Checks of scripts by `bash -n` and shellcheck, which do not run them."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess

from hpcgen.check.lint import syntax
from hpcgen.check.lint.check import Finding
from hpcgen.check.lint.rule import Severity
from hpcgen.errors import HpcgenError, Problem
from hpcgen.slurm.rendering.script import Script
from hpcgen.slurm.rendering.written import TemplateLines

SHELLCHECK_OPTIONS = (
    "--norc",
    "--shell=bash",
    "--format=json1",
    # sourced files are on the nodes
    "--exclude=SC1090,SC1091",
)


def has_shellcheck() -> bool:
    """True if shellcheck is installed."""
    return shutil.which("shellcheck") is not None


def read_by_shell_programs(script: str) -> list[Finding]:
    """Findings of `bash -n`, or of shellcheck if there are none and it is installed."""
    found = _bash(script)
    return found if found or not has_shellcheck() else _shellcheck(script)


def require_syntax(script: Script) -> None:
    """Refuses a script with a syntax error.

    Raises:
        HpcgenError: a site's template renders shell code with a syntax error. The message has the file and line of
            the template, if they are known.
    """
    found = _bash(script.text)
    if not found:
        return
    line, what = found[0].line, found[0].problem.reason
    with contextlib.suppress(ModuleNotFoundError):  # without shfmt, bash's line is used
        try:
            syntax.parse(script.text)
        except syntax.ShellSyntaxError as error:
            # shfmt reports where a construct begins, bash where it should end
            line, what = error.line, error.reason
    where = _written_by(script, line) or f"line {line} of the script"
    raise HpcgenError(
        f"{where}: the script has a syntax error: {what}", "correct the shell code of the block"
    )


def _written_by(script: Script, line: int) -> str:
    """FILE:LINE of the template that wrote the line, or the nearest line above it with a known origin."""
    lines, templates = script.text.split("\n"), TemplateLines()
    for text in reversed(lines[:line]):
        if place := templates.find(text.strip(), script.sources):
            return f"{place[0]}:{place[1]}"
    return ""


def _bash(script: str) -> list[Finding]:
    answer = _run("bash", "-n", script=script)
    errors = re.findall(r"^bash: line (\d+): (.*)$", answer.stderr, re.MULTILINE)
    if answer.returncode and not errors:
        errors = [("0", answer.stderr.strip() or "bash cannot parse the script")]
    return [
        _finding(int(line), "syntax", Problem("", reason, "correct the shell code"))
        for line, reason in errors
    ]


def _shellcheck(script: str) -> list[Finding]:
    answer = _run("shellcheck", *SHELLCHECK_OPTIONS, "-", script=script)
    return [
        _finding(
            comment["line"],
            rule := f"SC{comment['code']}",
            Problem("", comment["message"], f"see https://www.shellcheck.net/wiki/{rule}"),
            "error" if comment["level"] == "error" else "warning",
        )
        for comment in json.loads(answer.stdout)["comments"]
    ]


def _finding(line: int, rule: str, problem: Problem, severity: Severity = "error") -> Finding:
    return Finding(path="", line=line, rule=rule, severity=severity, problem=problem)


def _run(*command: str, script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, input=script, capture_output=True, text=True, check=False)
