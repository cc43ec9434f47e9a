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

from hpcgen.errors import HpcgenError
from hpcgen.lint import syntax
from hpcgen.rendering.contract import SYNTAX
from hpcgen.rendering.findings import Finding, Rule
from hpcgen.rendering.script import Script
from hpcgen.rendering.written import TemplateLines

SHELLCHECK_WHY = "shellcheck reads scripts for mistakes that bash makes without a word"

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
    line, what = found[0].line, found[0].what
    with contextlib.suppress(HpcgenError):  # shfmt is missing: bash's own line
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
    said = _run("bash", "-n", script=script)
    findings = [
        Finding(rule=SYNTAX, what=what, line=int(line))
        for line, what in re.findall(r"^bash: line (\d+): (.*)$", said.stderr, re.MULTILINE)
    ]
    if said.returncode and not findings:
        findings = [Finding(rule=SYNTAX, what=said.stderr.strip() or "bash cannot read it")]
    return findings


def _shellcheck(script: str) -> list[Finding]:
    said = _run("shellcheck", *SHELLCHECK_OPTIONS, "-", script=script)
    comments = json.loads(said.stdout)["comments"]
    return [
        Finding(rule=_shellcheck_rule(comment["code"]), what=comment["message"], line=comment["line"])
        for comment in comments
    ]


def _shellcheck_rule(code: int) -> Rule:
    return Rule(
        name=f"SC{code}",
        why=SHELLCHECK_WHY,
        fix=f"see https://www.shellcheck.net/wiki/SC{code}",
    )


def _run(*command: str, script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, input=script, capture_output=True, text=True, check=False)
