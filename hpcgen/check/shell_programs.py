"""What bash and shellcheck say about scripts; they only read them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from hpcgen.check.lint import syntax
from hpcgen.check.lint.check import Finding
from hpcgen.errors import HpcgenError
from hpcgen.slurm.rendering.script import Script
from hpcgen.slurm.rendering.written import TemplateLines

SHELLCHECK_OPTIONS = (
    "--norc",
    "--shell=bash",
    "--format=json1",
    # files that a script sources are those of the nodes
    "--exclude=SC1090,SC1091",
)


def has_shellcheck() -> bool:
    """Whether shellcheck is installed."""
    return shutil.which("shellcheck") is not None


def read_scripts(scripts: Sequence[str]) -> list[list[Finding]]:
    """What `bash -n`, and shellcheck where it is installed, find in each script."""
    distinct = list(dict.fromkeys(scripts))
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as threads:
        findings = dict(zip(distinct, threads.map(_read, distinct), strict=True))
    return [findings[script] for script in scripts]


def require_syntax(script: Script) -> None:
    """Refuses a script that bash cannot read.

    Raises:
        HpcgenError: a site's template makes shell code with a syntax error; with the template's file and line,
            where they can be told.
    """
    found = _bash(script.text)
    if not found:
        return
    line, what = found[0].line, found[0].why
    with contextlib.suppress(ModuleNotFoundError):  # without shfmt: bash's own line
        try:
            syntax.parse(script.text)
        except syntax.ShellSyntaxError as error:
            line, what = error.line, error.reason  # where a construct begins; bash names where it should end
    where = _written_by(script, line) or f"line {line} of the script"
    raise HpcgenError(f"{where}: bash cannot read the script: {what}", "repair the block's shell code")


def _written_by(script: Script, line: int) -> str:
    """FILE:LINE of the template that wrote the line, or the nearest line before it that can be told."""
    lines, templates = script.text.split("\n"), TemplateLines()
    for text in reversed(lines[:line]):
        if place := templates.find(text.strip(), script.sources):
            return f"{place[0]}:{place[1]}"
    return ""


def _read(script: str) -> list[Finding]:
    found = _bash(script)
    return found if found or not has_shellcheck() else _shellcheck(script)


def _bash(script: str) -> list[Finding]:
    answer = _run("bash", "-n", script=script)
    errors = re.findall(r"^bash: line (\d+): (.*)$", answer.stderr, re.MULTILINE)
    if answer.returncode and not errors:
        errors = [("0", answer.stderr.strip() or "bash cannot read it")]
    fix = "correct the shell code"
    return [
        Finding(path="", line=int(line), rule="syntax", severity="error", why=why, fix=fix)
        for line, why in errors
    ]


def _shellcheck(script: str) -> list[Finding]:
    answer = _run("shellcheck", *SHELLCHECK_OPTIONS, "-", script=script)
    return [
        Finding(
            path="",
            line=comment["line"],
            rule=f"SC{comment['code']}",
            severity="error" if comment["level"] == "error" else "warning",
            why=comment["message"],
            fix=f"see https://www.shellcheck.net/wiki/SC{comment['code']}",
        )
        for comment in json.loads(answer.stdout)["comments"]
    ]


def _run(*command: str, script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, input=script, capture_output=True, text=True, check=False)
