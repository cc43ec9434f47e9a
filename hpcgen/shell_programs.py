"""What bash and shellcheck say about scripts; they only read them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from hpcgen.rendering.contract import SYNTAX, Finding, Rule

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
