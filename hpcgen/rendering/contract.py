"""What every batch script of hpcgen holds to, whatever blocks a site replaces: pure functions on a script's text.

`check_script` compares a script with what its stage planned. bash and shellcheck are asked elsewhere
(hpcgen.rendering.shell_programs).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpcgen.planning.secret import SECRET, SECRET_VALUE
from hpcgen.planning.stage import StagePlan
from hpcgen.rendering import flow
from hpcgen.rendering.filters import directive, shell_word
from hpcgen.rendering.findings import Finding, Rule
from hpcgen.rendering.script import CONCLUDE, LAUNCH
from hpcgen.rendering.script_lines import Line, script_lines
from hpcgen.stages import STAGES

FRAME = Rule(
    name="frame",
    why="submitit puts its own launch line between them; without them the rest of the contract cannot be looked for",
    fix='extend "hpcgen/slurm/NAME.sbatch.j2" and replace its blocks',
)
DIRECTIVE_ORDER = Rule(
    name="directive-order",
    why="sbatch stops reading #SBATCH lines at the first command, and ignores this one without a word",
    fix="put it into block directives, after {{ super() }}, or into slurm.extra_directives",
)
DIRECTIVE_LOST = Rule(
    name="directive-lost",
    why="the job would get other resources, or another end, than hpcgen planned",
    fix="keep {{ super() }} in block directives, and set what differs in the cluster profile or the run file",
)
DIRECTIVE_FORM = Rule(
    name="directive-form",
    why="sbatch takes a backslash as an escape even within quotes, and ` #` ends the line",
    fix="write --option=value, or --option={{ value | directive }}",
)
PART_LOST = Rule(
    name="part-lost",
    why="the job or the stage relies on it; a finding says how",
    fix="keep {{ super() }} in that block",
)
VARIABLE_LOST = Rule(
    name="variable-lost",
    why="the environment of a node type is there for its speed and its safety; the image's values would hold instead",
    fix="keep {{ super() }} in block environment, and set other values in the cluster profile's `environment`",
)
CONTAINER_ENV = Rule(
    name="container-env",
    why="a value that is set in the image wins over an exported one that pyxis or enroot does not name",
    fix="set it in the cluster profile's `environment`, which names it; or, where only the job knows the value, "
    'add task_environment+=("NAME=$NAME") after {{ super() }} in block scratch',
)
OPTION_LOST = Rule(
    name="option-lost",
    why="without srun's options a dead rank leaves the others waiting; without the container's, tasks run elsewhere",
    fix="keep {{ super() }} in block container, and add options with step+=(...) or container+=(...)",
)
LAUNCH_STATUS = Rule(
    name="launch-status",
    why="what follows the launch reads rc: a failed step would end as a success",
    fix="start the step with `launch OPTIONS... COMMAND...` or `run_step COMMAND...`, which set rc",
)
LAUNCH_FOREGROUND = Rule(
    name="launch-foreground",
    why="bash runs no trap while a command is in the foreground: the warning before the time limit comes too late",
    fix="start it with `launch OPTIONS... COMMAND...` or `run_step srun ...`",
)
LAUNCH_WORDS = Rule(
    name="launch-words",
    why='"${step[@]}" holds --kill-on-bad-exit and the task counts, "${container[@]}" the image and its mounts, '
    '"${task_environment[@]}" keeps caches off the home directory',
    fix='launch "${step[@]}" "${container[@]}" env "${task_environment[@]}" COMMAND...',
)
CONCLUSION = Rule(
    name="conclusion",
    why="Slurm, and jobs that depend on this one, would take a failed step for a success",
    fix='keep block conclusion, or end it with exit "$rc"',
)
NO_TRACE = Rule(
    name="no-trace",
    why="it prints every command with its values, secrets among them, into a log that others may read",
    fix="remove it; use `say` for what the log should show",
)
NO_DUMP = Rule(
    name="no-environment-dump",
    why="it prints the values of all variables, secrets among them, into a log that others may read",
    fix='print single variables: say "NAME is $NAME"; or names alone: compgen -e',
)
NO_SECRET = Rule(
    name="no-secret",
    why="`scontrol write batch_script` shows the script, and copies of it stay in spool and run directories",
    fix="name it in the run file's `secrets`, and export it where you submit",
)
SYNTAX = Rule(
    name="syntax",
    why="bash would stop here, with the job half done",
    fix="mend the shell code",
)
UNPRINTABLE = Rule(
    name="unprintable",
    why="it can make a script look different from what it does, or end a line",
    fix="remove it",
)

RULES = (
    *(FRAME, DIRECTIVE_ORDER, DIRECTIVE_LOST, DIRECTIVE_FORM, PART_LOST, VARIABLE_LOST, CONTAINER_ENV),
    *(OPTION_LOST, LAUNCH_STATUS, LAUNCH_FOREGROUND, LAUNCH_WORDS, CONCLUSION),
    *flow.RULES,
    *(NO_TRACE, NO_DUMP, NO_SECRET, UNPRINTABLE, SYNTAX),
)

__all__ = ["PARTS", "RULES", "SYNTAX", "Finding", "Rule", "check_script"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A piece of a script that a site must not lose."""

    block: str
    what: str
    pattern: str
    """Found in the code of a line."""
    why: str
    stages: frozenset[str] | None = None
    """None: all."""


_TRAIN = frozenset(name for name, stage in STAGES.items() if stage.trains)
_WITH_RANKS = frozenset(name for name, stage in STAGES.items() if stage.uses_gpus)
PARTS = (
    Part(
        block="functions",
        what="the trap for TERM",
        pattern=r"^trap '.*\bterminated=1\b.*' TERM$",
        why="a cancelled job would die at once, its step's status unread and its scratch left",
    ),
    Part(
        block="functions",
        what="the function run_step",
        pattern=r"^run_step\(\)",
        why="it waits for a step in the background, so that traps run, and sets rc",
    ),
    Part(
        block="functions",
        what="the function launch",
        pattern=r"^launch\(\)",
        why="it starts the step that is the job's work",
    ),
    Part(
        block="functions",
        what="the trap for USR2",
        pattern=r"^trap '.*\bwarned=1\b.*' USR2$",
        why="without it Slurm's warning before the time limit kills the job, and no checkpoint is written",
        stages=_TRAIN,
    ),
    Part(
        block="run_directory",
        what="mkdir of the run's directories",
        pattern=r'^mkdir -p -- "\$job_dir"',
        why="a container can mount only what is there",
    ),
    Part(
        block="run_directory",
        what="the check of $run_dir/DONE",
        pattern=r"\bif\b.*\$run_dir/DONE\b.* && \[\[",
        why="a job of a chain, or one that was requeued after its end, would train again",
        stages=_TRAIN,
    ),
    Part(
        block="run_directory",
        what="the stop file",
        pattern=r"\bTRAINER_STOP_FILE=",
        why="the trainer would not hear that the time limit is near, and save nothing",
        stages=_TRAIN,
    ),
    Part(
        block="environment",
        what="the removal of leaked variables",
        pattern=r'\bunset -v "\$name"',
        why="NCCL_*, UCX_* and Python's variables of whoever submits would change the job",
    ),
    Part(
        block="nodes",
        what="the function each_node",
        pattern=r"^each_node\(\)",
        why="prepare_nodes and what follows it call it: no node would be prepared, and the job would end",
    ),
    Part(
        block="rendezvous",
        what="the export of MASTER_ADDR, MASTER_PORT and WORLD_SIZE",
        pattern=r"\bexport MASTER_ADDR MASTER_PORT WORLD_SIZE\b",
        why="the ranks would not find one another, or find those of another job",
        stages=_WITH_RANKS,
    ),
    Part(
        block="functions",
        what="scontrol requeue",
        pattern=r'\bscontrol requeue "\$SLURM_JOB_ID"',
        why="Slurm requeues neither a job that is out of time nor one that failed",
        stages=_TRAIN,
    ),
)

_COMMAND = r"(?:^|[;&|({]|\b(?:then|do|else)\b|!)\s*"
"""Before the first word of a command."""
_TRACE = re.compile(
    rf"{_COMMAND}set\s+(?:\S+\s+)*?(?:-[a-wyzA-Z]*x[a-z]*\b|-o\s+xtrace\b)|\bbash\s+(?:-\S+\s+)*-[a-wyz]*x\b|\bBASH_XTRACEFD="
)
_DUMP = re.compile(
    rf"{_COMMAND}(?:printenv|env|set|export(?:\s+-p)?|(?:declare|typeset)(?:\s+-[a-zA-Z]*[px][a-zA-Z]*)?)\s*(?:$|[|;&)}}>'\"])"
)
_ASSIGNMENT = re.compile(r"(?:^|[\s;&|(\"'])([A-Za-z_]\w*)\+?=(?=(\S*))")
_EXPORT = re.compile(rf"{_COMMAND}(?:export|declare\s+-x|typeset\s+-x)\s+(?!-)([^;&|#]*)")
_UNSET = re.compile(rf"{_COMMAND}(?:unset(?:\s+-v)?|export\s+-n)\s+([^;&|#-][^;&|#]*)")
_EXPORTED_NAME = re.compile(r"(?:^|\s)([A-Za-z_]\w*)(?==|\s|$)")
# As those who issue them write them: Hugging Face, GitHub, AWS, NVIDIA.
_SRUN = re.compile(rf"{_COMMAND}(?:(?:command|exec|time|timeout\s+\S+|\w+=\S*)\s+)*srun\b(?!.*[^&]&\s*$)")
_SETS_RC = re.compile(r"\b(?:launch|run_step)\s|\brc=")

# Read by the nodes' shells, by Slurm or by enroot, outside of the container; or better the image's own. Locales are
# set for programs of the host.
OF_THE_HOST = re.compile(
    r"CHECK_MEMLOCK|(?:SLURM|SLURMD|SBATCH|SRUN|SQUEUE|ENROOT|PYXIS|LMOD|MODULE)\w*|(?:LD_LIBRARY_|MAN|INFO)?PATH|BASH_ENV|LANG|LC_\w+"
)


def check_script(script: str, stage: StagePlan) -> list[Finding]:
    """What is wrong with the script of a stage, in the order of the rules."""
    lines = script_lines(script)
    code = [line for line in lines if line.kind == "code"]
    findings = [*_directives(lines, stage), *_frame(lines)]
    if all(finding.rule != FRAME for finding in findings):
        markers = [line.number for line in lines if line.text in (LAUNCH, CONCLUDE)]
        findings += _parts(code, stage, launch=markers[0])
        findings += _launch([line for line in code if markers[0] < line.number < markers[1]], stage)
        findings += _conclusion(code, after=markers[1])
        findings += flow.flow(lines, launch=markers[0], conclude=markers[1])
    findings += _environment(lines, stage)
    findings += _options(lines, stage)
    findings += _leaks(lines)
    findings += _unprintable(lines)
    return findings


def _directives(lines: Sequence[Line], stage: StagePlan) -> Iterator[Finding]:
    first_command = next((line.number for line in lines if line.kind == "code"), len(lines) + 1)
    written = [line for line in lines if line.kind == "directive"]
    for line in written:
        if line.number > first_command:
            what = f"{line.text} stands after the first command"
            yield Finding(rule=DIRECTIVE_ORDER, what=what, line=line.number)
        if "\\" in line.text or " #" in re.sub(r'"[^"]*"', "", line.text) or "'" in line.text:
            yield Finding(rule=DIRECTIVE_FORM, what=line.text, line=line.number)
    texts = {line.text for line in written}
    planned = {}
    for option in stage.directives:
        name, _, value = option.partition("=")
        expected = f"#SBATCH {name}={directive(value)}" if value else f"#SBATCH {name}"
        planned[name] = expected
        if expected not in texts:
            yield Finding(rule=DIRECTIVE_LOST, what=f"{expected} is not there", block="directives")
    for line in written:
        name = re.split(r"[=\s]", line.text.removeprefix("#SBATCH").strip(), maxsplit=1)[0]
        if line.text != planned.get(name, line.text):
            what = f"{line.text} changes {planned[name]}: of two, sbatch takes the last"
            yield Finding(rule=DIRECTIVE_LOST, what=what, line=line.number)


def _frame(lines: Sequence[Line]) -> Iterator[Finding]:
    markers = [line.text for line in lines if line.text in (LAUNCH, CONCLUDE)]
    if markers != [LAUNCH, CONCLUDE]:
        found = ", ".join(repr(marker) for marker in markers) or "neither"
        what = f"the lines {LAUNCH!r} and {CONCLUDE!r} must be there once each, in this order; found {found}"
        yield Finding(rule=FRAME, what=what)


def _parts(code: Sequence[Line], stage: StagePlan, launch: int) -> Iterator[Finding]:
    for part in PARTS:
        placed = [line for line in code if line.number < launch or part.block == "conclusion"]
        is_of_stage = part.stages is None or stage.name in part.stages
        if is_of_stage and not any(re.search(part.pattern, line.code) for line in placed):
            yield _lost(part.what, part.block, part.why)
    for name in stage.files:
        # in the job's directory, or on the first node's scratch
        written = tuple(f'"${place}"/{shell_word(name)} <<' for place in ("job_dir", "scratch"))
        if not any(text in line.code for line in code for text in written):
            yield _lost(f"the job's file {name}", "job_files", "the command of the stage reads it")


def _lost(what: str, block: str, why: str) -> Finding:
    rule = dataclasses.replace(PART_LOST, why=why, fix=f"keep {{{{ super() }}}} in block {block}")
    return Finding(rule=rule, what=f"{what} is lost", block=block)


def _launch(code: Sequence[Line], stage: StagePlan) -> Iterator[Finding]:
    if not any(_SETS_RC.search(line.code) for line in code):
        yield Finding(rule=LAUNCH_STATUS, what="nothing between the markers sets rc", block="launch")
    for line in code:
        if _SRUN.search(line.code):
            what = f"`{line.code.strip()}` is in the foreground"
            yield Finding(rule=LAUNCH_FOREGROUND, what=what, line=line.number)
    words = ("step", "task_environment", *(["container"] if stage.container else []))
    references = [f'"${{{word}[@]}}"' for word in words]
    missing = tuple(word for word in references if not any(word in line.code for line in code))
    if missing:
        yield Finding(rule=LAUNCH_WORDS, what="the launch does not use", names=missing, block="launch")


def _conclusion(code: Sequence[Line], after: int) -> Iterator[Finding]:
    bodies = _functions(code)
    said = [line.code for line in code if line.number > after]
    called = {word for text in said for word in re.findall(r"[\w-]+", text)}
    said += [text for name, body in bodies.items() if name in called for text in body]
    if not any(re.search(rf"{_COMMAND}(?:die\b|exit\s+(?!0\b|143\b)\S)", text) for text in said):
        what = "nothing after the launch can end the script with a failure"
        yield Finding(rule=CONCLUSION, what=what, block="conclusion")


def _functions(code: Sequence[Line]) -> dict[str, list[str]]:
    """Function -> lines of its body, for functions that begin at the start of a line."""
    functions: dict[str, list[str]] = {}
    body: list[str] = []
    for line in code:
        if begin := re.match(r"([\w-]+)\(\)", line.code):
            body = functions.setdefault(begin[1], [])
        elif line.code.startswith("}"):
            body = []
        body.append(line.code)
    return functions


def _environment(lines: Sequence[Line], stage: StagePlan) -> Iterator[Finding]:
    code = [line for line in lines if line.kind == "code"]
    exported = {name: line for line in reversed(code) for name in _exported(line.code)}
    missing = tuple(variable.name for variable in stage.environment if variable.name not in exported)
    if missing:
        yield Finding(rule=VARIABLE_LOST, what="not exported:", names=missing, block="environment")
    planned = {variable.name for variable in stage.environment}
    for line in code:
        if taken := tuple(name for name in _taken_back(line.code) if name in planned):
            yield Finding(rule=VARIABLE_LOST, what="taken back:", names=taken, line=line.number)
    if stage.container is None:
        return
    named = set(stage.container.environment) | _task_environment(lines)
    for name, line in reversed(exported.items()):
        if name not in named and not OF_THE_HOST.fullmatch(name):
            what = "exported, and not passed to the container:"
            yield Finding(rule=CONTAINER_ENV, what=what, names=(name,), line=line.number)


def _exported(code: str) -> list[str]:
    return [name for found in _EXPORT.finditer(code) for name in _EXPORTED_NAME.findall(_unquoted(found[1]))]


def _taken_back(code: str) -> list[str]:
    return [name for found in _UNSET.finditer(code) for name in found[1].split()]


def _unquoted(code: str) -> str:
    """Without what is in quotes, so that its words do not look like names."""
    return re.sub(r"'[^']*'|\"(?:\\.|[^\"\\])*\"|\$\(\(.*?\)\)", "", code)


def _task_environment(lines: Sequence[Line]) -> set[str]:
    """Names that the launch sets with `env NAME=VALUE`, from task_environment=( and task_environment+=(."""
    names: set[str] = set()
    inside = False
    for line in lines:
        if line.kind != "words":
            inside = bool(re.search(r"\btask_environment\+?=\(", line.code))
        if inside:
            names |= {name for name, _ in _ASSIGNMENT.findall(line.code)}
    return names


def _options(lines: Sequence[Line], stage: StagePlan) -> Iterator[Finding]:
    """srun's options and the container's, as the arrays step and container hold them."""
    container = stage.container.words() if stage.container else ()
    written = {line.code.strip() for line in lines if line.kind == "words"}
    wanted = (*container, *stage.allocation.srun_options())
    missing = [_short(word) for word in wanted if shell_word(word) not in written]
    is_pyxis = stage.container is not None and stage.container.runtime == "pyxis"
    if is_pyxis and not any(word.startswith("--container-image=") for word in written):
        missing.append("--container-image")
    if missing:
        yield Finding(rule=OPTION_LOST, what="not there:", names=tuple(missing), block="container")


def _short(word: str) -> str:
    return word if len(word) < 60 else f"{word[:57]}..."


def _leaks(lines: Sequence[Line]) -> Iterator[Finding]:
    for line in lines:
        if line.kind != "words" and _TRACE.search(line.code):
            yield Finding(rule=NO_TRACE, what=f"`{line.code.strip()}` traces the script", line=line.number)
        if line.kind != "words" and _DUMP.search(line.code):
            what = f"`{line.code.strip()}` prints the environment"
            yield Finding(rule=NO_DUMP, what=what, line=line.number)
        if names := tuple(_given_secrets(line.code)):
            yield Finding(rule=NO_SECRET, what="the script holds", names=names, line=line.number)


def _given_secrets(code: str) -> Iterator[str]:
    """Secrets whose values stand in the code; one that is read from a variable or a file does not."""
    for name, value in _ASSIGNMENT.findall(code):
        if SECRET.search(name) and value.strip("'\"") and not value.strip("'\"").startswith(("$", "`")):
            yield name
    if SECRET_VALUE.search(code):
        yield "a token of a known form"


def _unprintable(lines: Sequence[Line]) -> Iterator[Finding]:
    for line in lines:
        character = next((c for c in line.text if not (c.isprintable() or c == "\t")), None)
        if character is not None:
            what = f"the character {character!a} is in the script"
            yield Finding(rule=UNPRINTABLE, what=what, line=line.number)
