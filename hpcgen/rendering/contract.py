"""What a site's blocks must leave in a batch script: the planned directives, settings and environment.

Pure functions on a script's text. bash, shellcheck and `hpcgen lint` are asked elsewhere (hpcgen.shell_programs).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from hpcgen.planning.stage import StagePlan
from hpcgen.rendering.filters import directive
from hpcgen.rendering.findings import Finding, Rule
from hpcgen.rendering.settings import Setting

DIRECTIVE_ORDER = Rule(
    name="directive-order",
    why="sbatch stops reading #SBATCH lines at the first command, and silently ignores this one",
    fix="put it into block directives, after {{ super() }}, or into slurm.extra_directives",
)
DIRECTIVE_LOST = Rule(
    name="directive-lost",
    why="the job would get other resources, or end otherwise, than hpcgen planned",
    fix="keep {{ super() }} in block directives, and set what differs in the cluster profile or the run file",
)
DIRECTIVE_FORM = Rule(
    name="directive-form",
    why="sbatch takes a backslash as an escape even within quotes, and ` #` ends the line",
    fix="write --option=value, or --option={{ value | directive }}",
)
SETTING_LOST = Rule(
    name="setting-lost",
    why="functions of the script read this variable, and the job would end with `unbound variable`",
    fix="keep {{ super() }} in block settings",
)
VARIABLE_LOST = Rule(
    name="variable-lost",
    why="the environment of a node type makes jobs fast and safe; the image's values would apply instead",
    fix="keep {{ super() }} in block environment, and set other values in the cluster profile's `environment`",
)
SYNTAX = Rule(
    name="syntax",
    why="bash would stop here, with the job half done",
    fix="correct the shell code",
)

RULES = (DIRECTIVE_ORDER, DIRECTIVE_LOST, DIRECTIVE_FORM, SETTING_LOST, VARIABLE_LOST, SYNTAX)


def check_script(script: str, stage: StagePlan, settings: Sequence[Setting]) -> list[Finding]:
    """The findings in the script of a stage, in the order of the rules."""
    lines = script.split("\n")
    names = [setting.name for setting in settings]
    missing = tuple(name for name in names if not re.search(rf"^{name}=", script, re.MULTILINE))
    unset = tuple(
        variable.name
        for variable in stage.environment
        if not re.search(rf"^\s*export {re.escape(variable.name)}=", script, re.MULTILINE)
    )
    findings = list(_directives(lines, stage))
    if missing:
        findings.append(Finding(rule=SETTING_LOST, what="not set:", names=missing, block="settings"))
    if unset:
        findings.append(Finding(rule=VARIABLE_LOST, what="not exported:", names=unset, block="environment"))
    return findings


def _directives(lines: Sequence[str], stage: StagePlan) -> Iterator[Finding]:
    first_command = next((number for number, line in enumerate(lines, 1) if _is_command(line)), len(lines))
    written = [(number, line) for number, line in enumerate(lines, 1) if line.startswith("#SBATCH")]
    for number, line in written:
        if number > first_command:
            yield Finding(rule=DIRECTIVE_ORDER, what=f"{line} follows the first command", line=number)
        if "\\" in line or " #" in re.sub(r'"[^"]*"', "", line) or "'" in line:
            yield Finding(rule=DIRECTIVE_FORM, what=line, line=number)
    planned = {}
    for option in stage.directives:
        name, _, value = option.partition("=")
        planned[name] = expected = f"#SBATCH {name}={directive(value)}" if value else f"#SBATCH {name}"
        if expected not in lines:
            yield Finding(rule=DIRECTIVE_LOST, what=f"{expected} is missing", block="directives")
    for number, line in written:
        name = re.split(r"[=\s]", line.removeprefix("#SBATCH").strip(), maxsplit=1)[0]
        if line != planned.get(name, line):
            what = f"{line} changes {planned[name]}: of two, sbatch takes the last"
            yield Finding(rule=DIRECTIVE_LOST, what=what, line=number)


def _is_command(line: str) -> bool:
    return bool(line.strip()) and not line.startswith("#")
