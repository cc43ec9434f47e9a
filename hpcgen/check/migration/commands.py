"""Lists what a script does around its program: other commands, pipes, redirections, loops and conditions."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpcgen.check.lint.job import Job
from hpcgen.check.lint.launch import Launch
from hpcgen.check.lint.script import Command
from hpcgen.check.migration.account import brief, is_within, own_commands, within_text
from hpcgen.check.migration.leftover import Carried

_SETS_GPUS = re.compile(
    r"-(pm|pl|lgc|lmc|ac|e|c|r|rgc|rmc|rac|mig)$|--(persist|power-limit|lock|reset|gpu-reset|comp)"
)
"""Options with which nvidia-smi changes GPUs."""
PROLOGUE = frozenset(("module", "ml", "source", ".", "conda", "mamba", "micromamba", "spack", "ulimit"))
"""Commands that change the environment of the program."""
QUIET = frozenset((
    "echo", "printf", "date", "export", "set", "shopt", "declare", "local", "readonly", "typeset", "exit",
    "return", ":", "true", "false", "test", "[", "[[", "hostname", "scontrol", "head", "tail", "awk", "sed", "cut",
    "grep", "tr", "nvidia-smi", "env", "printenv", "which", "pwd", "whoami", "sleep", "wait", "shift", "cat", "expr",
    "seq", "getent", "ip", "squeue", "dirname", "basename", "realpath", "readlink", "nproc", "read",
    "mapfile", "readarray", "cd", "wc", "sort", "uname", "id", "break", "continue", "let", "getopts", "getopt", "usage",
    "type",
))  # fmt: skip
"""Commands that only print, compute or set something, unless they write a file."""

_FOR_ONE_PROGRAM = (
    "the run file runs one program; run this before submitting, or in the prologue of a site template"
)
_IN_PROLOGUE = "put it into the prologue of a site template (templates/README.md)"
_AFTER = (
    "it runs after the program; to keep it, put it into the epilogue of a site template (templates/README.md)"
)
_TRAP = "hpcgen's script has traps of its own; to keep it, put it into the epilogue of a site template"
_SUBMITS = "the run file submits nothing; hpcgen submit queues jobs that wait for each other"
_NO_INPUT = "the program gets no standard input; write this to a file, and name the file in the command"
_IN_BLOCK = "put it into a block of a site template (templates/README.md)"
_IN_TEXT = (
    "the run file starts the program without it; to keep it, start a script that runs it and then the program"
)
_IN_FUNCTION = "it runs where the script calls its function; " + _IN_PROLOGUE
_EXPORTS_ALL = (
    "it exports every variable that the script sets; write those that the program reads into environment"
)
_UNSETS = "a run file cannot unset a variable of the image or the profile"
_UNSETS_IN_COMMAND = "; begin program.command with env and -u NAME"


def list_commands(job: Job, launch: Launch, carried: Carried, stage: str) -> None:
    """Lists every other command that may matter to the program, and the script's other steps."""
    own = own_commands(job, launch)
    steps = {id(step.command): step for step in job.steps}
    launches = {id(other.command) for other in job.launches}
    for command in job.script.commands:
        if command.dead or any(command is found for found in own) or carried.is_claimed(command):
            continue
        if is_within(command, launch, job):
            continue  # program.command has it, or the listed command that writes it
        step = steps.get(id(command))
        if step is not None and not (command.outer is not None and not within_text(command, job, own)):
            carried.leave(command.line, f"srun ... {brief(step.program)}", _IN_BLOCK)
        elif why := _why(command, job, own, stage, is_launch=id(command) in launches):
            carried.leave(command.line, " ".join((brief(command.words), *command.redirections)), why)


def _why(command: Command, job: Job, own: tuple[Command, ...], stage: str, *, is_launch: bool) -> str:
    """Where a command belongs; "" if the program does not depend on it."""
    name = command.name
    is_in_text = within_text(command, job, own)
    if command.outer is not None and not is_in_text:
        return ""  # the command around it is listed
    if command.status == "substituted":
        return ""  # only its output matters, in the words that have it
    texts = [word.text for word in command.words]
    if name == "set":
        exports = any(re.fullmatch(r"-\w*a\w*|allexport", text) for text in texts[1:])
        return _EXPORTS_ALL if exports else ""
    if name == "unset":
        return _UNSETS + (_UNSETS_IN_COMMAND if stage == "run" else "")
    if name in PROLOGUE or (name == "eval" and command.evaluated_text is None):
        return (
            _IN_TEXT if is_in_text and stage == "run" else _IN_FUNCTION if command.function else _IN_PROLOGUE
        )
    if name == "trap":  # "" ignores a signal, - removes a trap, and the options only print
        return _TRAP if texts[1:] and texts[1] not in ("", "-", "-l", "-p") else ""
    if name == "sbatch":
        return _SUBMITS
    # it only reads or prints; a launch does so too if its program is such a command
    if not is_launch and _is_quiet(command, texts, own):
        return ""
    if command.function and not any(command.function == found.function for found in own):
        return ""  # the call of the function is listed
    # in a function, the line does not tell when a command runs
    if command.outer is None and not command.function and command.line > max(found.end for found in own):
        return _AFTER
    return _IN_TEXT if is_in_text and stage == "run" else _FOR_ONE_PROGRAM if name else ""


def _is_quiet(command: Command, texts: list[str], own: tuple[Command, ...]) -> bool:
    """True if a command only prints, computes or sets something."""
    name = command.name
    acts = (
        (name == "sed" and any(re.match(r"-i|--in-place", text) for text in texts[1:]))
        or (name == "scontrol" and not {"show", "write", "listpids"} & set(texts))
        or (name == "nvidia-smi" and any(_SETS_GPUS.match(text) for text in texts[1:]))
        or (name == "env" and any(not re.match(r"-|\w+=", text) for text in texts[1:]))
    )
    logs = {_file_of(text) for found in own for text in (*found.redirections, *found.around)}
    writes = {_file_of(text) for text in command.redirections} - logs - {""}
    is_query = name == "command" and texts[1:2] in (["-v"], ["-V"])
    return (name in QUIET or is_query) and not acts and not writes


def _file_of(redirection: str) -> str:
    """The file that a redirection writes; "" if it writes to a descriptor or to /dev/null."""
    found = re.fullmatch(r"(?:\d*|&|\{\w+\})(?:>>?|>\||&>>?)\s*(.+)", redirection)
    return found[1] if found and not re.match(r"&|/dev/", found[1]) else ""


def list_streams(job: Job, launch: Launch, carried: Carried, stage: str) -> None:
    """Lists redirections and pipes of the program. One that gives it input is refused in stage run."""
    own = own_commands(job, launch)
    why = f"the log is {stage}-%j.log in the run directory"
    for command in own:
        for redirection in command.redirections:
            if re.match(r"\d*<(?!.*/dev/null)(?!&)", redirection):
                _input(command.line, redirection, carried, stage)
            elif _file_of(redirection):
                carried.leave(command.line, redirection, why)
        for redirection in command.around:
            if re.match(r"\d*<(?!.*/dev/null)(?!&)", redirection):
                carried.leave(command.line, redirection, _NO_INPUT)
            elif _file_of(redirection):
                carried.leave(command.line, redirection, why)
    for pipeline in job.script.pipelines:
        _list_pipe(pipeline, own, carried, stage)


def _list_pipe(pipeline: tuple[Command, ...], own: tuple[Command, ...], carried: Carried, stage: str) -> None:
    pipeline = tuple(command for command in pipeline if command.status != "substituted")
    positions = [index for index, command in enumerate(pipeline) if any(command is found for found in own)]
    if not positions:
        return
    for command in pipeline[: positions[0]]:
        _input(command.line, f"{brief(command.words)} |", carried, stage)
        carried.claim(command)
    for command in pipeline[positions[-1] + 1 :]:
        if command.outer == pipeline[positions[0]].outer:
            text = brief(command.words)
            carried.leave(command.line, f"| {text}", f"the log is {stage}-%j.log in the run directory")
            carried.claim(command)


def _input(line: int, what: str, carried: Carried, stage: str) -> None:
    if stage == "run":
        carried.refuse(line, what, _NO_INPUT)
    else:
        carried.leave(line, what, _NO_INPUT)


def list_contexts(job: Job, launch: Launch, carried: Carried) -> None:
    """Lists a loop or a condition around the program."""
    for line, what, why in _contexts(own_commands(job, launch), launch):
        carried.leave(line, what, why)


def _contexts(own: tuple[Command, ...], launch: Launch) -> Iterator[tuple[int, str, str]]:
    line = max(command.line for command in own)
    if any(command.in_loop for command in own):
        why = "the run file starts it once; write one run file for each time that the script starts it"
        yield line, f"the loop around {launch.program}", why
    elif any(command.conditional and not command.function for command in own):
        why = "the run file starts the program in any case"
        yield line, f"the condition of the command that starts {launch.program}", why
