"""What ends a script before its conclusion, or leaves its end to something else: rules on a script's code."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from hpcgen.rendering.findings import Finding, Rule
from hpcgen.rendering.script_lines import Line

NO_ERREXIT = Rule(
    name="no-errexit",
    why="the script reads exit codes itself: a command that fails would end it without its conclusion",
    fix='say what a failure means: COMMAND || die "..."; in a subshell, (set -e; ...), it may stay',
)
TRAP_KEPT = Rule(
    name="trap-kept",
    why="these traps end the job in order when it is cancelled or its time is up; the last one that is set holds",
    fix="trap another signal, or EXIT; or replace the trap in block functions, and keep what it sets",
)
NO_EXIT = Rule(
    name="no-exit",
    why="the script ends here, whatever became of the job",
    fix='make it depend on something: [[ -d /site ]] || die "..."',
)
STATUS_KEPT = Rule(
    name="status-kept",
    why="rc is the status of the job's step: the conclusion, and Slurm, would take a failure for a success",
    fix="use a variable of your own; run commands without run_step and each_node, which set rc",
)
STEP_FOREGROUND = Rule(
    name="step-foreground",
    why="bash runs no trap before the step is over, and nothing ends one that hangs",
    fix='each_node SECONDS COMMAND... || die "..." after block nodes; elsewhere: run_step timeout SECONDS srun ...',
)
OPTION_TWICE = Rule(
    name="container-option-twice",
    why="pyxis takes the last of two without a word: what the first one says is lost",
    fix="name mounts in the profile's `container.mounts`, which hpcgen joins, and variables in its `environment`",
)

RULES = (NO_ERREXIT, TRAP_KEPT, NO_EXIT, STATUS_KEPT, STEP_FOREGROUND, OPTION_TWICE)

_FIRST = r"(?:^|[;&|{]|\b(?:then|do|else)\b|!)\s*"
"""Before the first word of a command that the script's own shell runs."""
_ERREXIT = re.compile(rf"{_FIRST}set\s+(?:\S+\s+)*?(?:-[A-Za-z]*e[A-Za-z]*\b|-o\s+errexit\b)")
_TRAP = re.compile(rf"{_FIRST}trap\s.*\s(?:SIG)?(TERM|USR2|15|12)\b")
_EXIT = re.compile(r"^(?:exit|die)\b(?!\(\))")
_STATUS = re.compile(rf"{_FIRST}(?:rc=|(?:run_step|each_node|launch)\s)")
_STEP = re.compile(rf"(?:{_FIRST}|\$\(\s*)(?:(?:command|env|time)\s+|\w+=\S*\s+)*srun\b(?!.*[^&]&\s*$)")
_CONTAINER_OPTION = re.compile(r"(?:^|[\s('\"])(--container-(?:mounts|env|image|workdir))\b")
_BEFORE = r"(?:^|[;&|]|\b(?:then|do|else)\b|\(\))\s*"
_OPENING = re.compile(rf"{_BEFORE}(?:(?:if|case|for|while|until|select|\{{)(?=\s|$)|\()|[=$]\($")
_CLOSING = re.compile(rf"{_BEFORE}(?:fi|esac|done|\}}|\))(?=[\s;&|]|$)")


def flow(lines: Sequence[Line], *, launch: int, conclude: int) -> Iterator[Finding]:
    """What the code does to the way through the script; `launch` and `conclude` are the lines of the markers."""
    code = [line for line in lines if line.kind == "code"]
    outside = [line for line, depth in _depths(code) if depth == 0]
    for line in code:
        text = _without_subshells(line.code)
        if _ERREXIT.search(text):
            yield _finding(NO_ERREXIT, line, "ends the script at the first failure")
        if _TRAP.search(text) and not re.search(r"\b(?:terminated|warned)=1\b", line.code):
            yield _finding(TRAP_KEPT, line, "takes the script's own trap away")
        if _STEP.search(line.code) and not launch < line.number < conclude:
            yield _finding(STEP_FOREGROUND, line, "runs in the foreground without a limit")
    for line in outside:
        if _EXIT.match(line.code.strip()) and line != outside[-1]:
            yield _finding(NO_EXIT, line, "is always reached, and nothing after it")
        if line.number > conclude and _STATUS.search(line.code):
            yield _finding(STATUS_KEPT, line, "sets rc")
    yield from _repeated(lines)


def _finding(rule: Rule, line: Line, what: str) -> Finding:
    return Finding(rule=rule, what=f"`{line.code.strip()}` {what}", line=line.number)


def _depths(code: Sequence[Line]) -> Iterator[tuple[Line, int]]:
    """Each line with the number of functions, branches, loops, groups and arrays that it begins in.

    What continues a line before, as after ||, counts as being in one.
    """
    depth, continues = 0, False
    for line in code:
        text = _without_subshells(re.sub(r"'[^']*'|\"(?:\\.|[^\"\\])*\"", '""', line.code))
        yield line, depth + continues
        continues = text.endswith(("||", "&&", "|", "\\"))
        depth = max(0, depth + len(_OPENING.findall(text)) - len(_CLOSING.findall(text)))


def _without_subshells(code: str) -> str:
    """Without what is in parentheses, which (( )) are as well; f() stays."""
    while (inner := re.sub(r"(?<![\w-])\([^()]*\)|\([^()]+\)", "", code)) != code:
        code = inner
    return code


def _repeated(lines: Sequence[Line]) -> Iterator[Finding]:
    """Options of pyxis beyond the first; job files and comments hold none."""
    seen: set[str] = set()
    for line in lines:
        for option in _CONTAINER_OPTION.findall(line.code) if line.kind in ("code", "words") else ():
            if option in seen:
                what = f"a second {option}"
                yield Finding(rule=OPTION_TWICE, what=what, line=line.number)
            seen.add(option)
