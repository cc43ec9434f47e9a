"""What does not reach a program: functions, arguments and libraries; and its failure on the way back."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from hpcgen.check.lint.job import Job
from hpcgen.check.lint.rule import Hit, rule
from hpcgen.check.lint.script import SHELLS, Command
from hpcgen.check.lint.words import Word


@rule(
    "launch-deprecated",
    "note",
    "an old launcher of PyTorch's",
    source="PyTorch, torch/distributed/launch.py, its FutureWarning",
)
def launch_deprecated(job: Job) -> Iterator[Hit]:
    """torch.distributed.launch is deprecated, and will be removed. torchrun has the same options.

    torchrun sets LOCAL_RANK in the environment, where the old launcher also passes --local-rank to the program unless
    it gets --use-env.
    """
    for launch in job.launches:
        for word in launch.command.words:
            if word.text == "torch.distributed.launch" and launch.launcher == "torchrun":
                yield Hit(
                    word.line,
                    "torch.distributed.launch is deprecated, and a later PyTorch is to remove it",
                    "torchrun, and a program that reads LOCAL_RANK instead of --local-rank",
                )


@rule(
    "function-in-step",
    "error",
    "a step does not have the script's functions",
    source="man bash, export -f; Slurm, man srun, DESCRIPTION",
)
def function_in_step(job: Job) -> Iterator[Hit]:
    """srun starts programs, and a function of the batch shell is none.

    The shell of `srun bash -c` has the function only after `export -f`. A text that defines or sources it is not
    reported.
    """
    functions = job.script.functions
    for step in job.steps:
        program = step.program[0] if step.program else None
        if program and program.known and program.certain and _is_only_a_function(job, program.text):
            yield Hit(
                program.line,
                f"srun looks for a program {program.text}, which is a function of this script",
                f"export -f {program.text}, and srun bash -c {program.text}",
            )
    if "allexport" in job.script.shell_options:
        return
    handed_on = {
        word.text
        for command in job.script.commands
        if command.name in ("export", "declare", "typeset")
        and any(re.fullmatch(r"-\w*f\w*", word.text) for word in command.words)
        for word in command.words
    }
    for command in job.script.commands:
        outer = None if command.outer is None else job.script.commands[command.outer]
        name = command.words[0].text if command.words else ""
        if outer is None or outer.name != "srun" or outer.dead or name not in functions or name in handed_on:
            continue
        text = _shell_text(outer)
        if text is None or not _is_only_a_function(job, name):
            continue
        # the batch shell runs $(name) in double quotes, or in a variable that the text is made of
        is_literal = text.source.startswith("'") or command.status != "substituted"
        if name not in text.source or not is_literal:
            continue
        if re.search(
            rf"\b{re.escape(name)}\s*\(\)|\bfunction\b|\bdeclare -f\b|(^|[\s;&])(source|\.)\s", text.text
        ):
            continue
        yield Hit(
            command.line, f"the shell of the step does not have the function {name}", f"export -f {name}"
        )


def _is_only_a_function(job: Job, name: str) -> bool:
    """Whether a name is a function of the script's own, and no program that the function stands for."""
    body = [command for command in job.script.commands if command.function == name]
    calls_itself = any(word.text.rpartition("/")[2] == name for command in body for word in command.words)
    return name in job.script.functions and bool(body) and not calls_itself


@rule(
    "arguments-lost",
    "error",
    "the text of bash -c has no arguments",
    source="man bash, OPTIONS, -c; Special Parameters",
)
def arguments_lost(job: Job) -> Iterator[Hit]:
    """In `bash -c 'python train.py "$@"'`, "$@" is what follows the text: nothing.

    In double quotes the outer shell expands $@: `bash -c "train $@"` makes several words of it. Only the first belongs
    to the text, and the others are lost. That is a warning, for a script with one argument works.
    """
    for command in job.script.commands:
        text = _shell_text(command)
        if text is None or command.words[-1] is not text or command.dead or command.name in _ADD_ARGUMENTS:
            continue
        if text.source.startswith('"') and re.search(r"(?<!\\)\$(@|\{@\})", text.source):
            yield Hit(
                text.line,
                "$@ within double quotes becomes several words, and bash -c takes the first alone for its text",
                'bash -c \'... "$@"\' bash "$@", or $* in place of $@',
                severity="warning",
            )
        elif text.source.startswith("'") and _reads_arguments(text.text):
            yield Hit(
                text.line,
                '"$@" is empty in this text: nothing follows it',
                'bash -c \'... "$@"\' bash "$@"',
            )


_ADD_ARGUMENTS = ("xargs", "parallel", "find", "env_parallel")
"""Programs that add words to the command that they run."""


def _reads_arguments(text: str) -> bool:
    """Whether a text uses "$@" although it gives itself none, by `set --` or in a function of its own."""
    own = re.search(r"\bset\s+(--|\S*\$)|\(\)|\bfunction\b|\bshift\b|\bsource\b|<<|\\", text)
    return bool(re.search(r"\$(@|\{@\})", text)) and not own


def _shell_text(command: Command) -> Word | None:
    """The text that a command gives to `bash -c`."""
    for index, (shell, flag) in enumerate(itertools.pairwise(command.words)):
        if shell.text.rpartition("/")[2] in SHELLS and re.fullmatch(r"-[a-z]*c", flag.text):
            return command.words[index + 2] if index + 2 < len(command.words) else None
    return None


_LIBRARIES = re.compile(
    r"cuda|nccl|cudnn|mpi|gcc|ofi|fabric|ucx|hpcx|nvhpc|rocm|oneapi|intel|cray", re.IGNORECASE
)
"""Names of modules that put libraries on the path."""


@rule(
    "library-path",
    "warning",
    "the libraries of loaded modules are not found",
    source="ld.so(8), LD_LIBRARY_PATH; Environment Modules, prepend-path",
)
def library_path(job: Job) -> Iterator[Hit]:
    """Modules add their directories to LD_LIBRARY_PATH. Setting it afterwards without its old value drops them."""
    loads = [
        command
        for command in job.script.commands
        if command.name in ("module", "ml")
        and any(_LIBRARIES.search(word.text) for word in command.words[1:])
        and not {"unload", "purge", "rm"} & {word.text for word in command.words}
        and not command.conditional
    ]
    kept = {
        item.name
        for item in job.script.assignments
        if item.value and "LD_LIBRARY_PATH" in item.value.variables
    }
    for item in job.script.settings("LD_LIBRARY_PATH"):
        before = [command.line for command in loads if command.line < item.line]
        word = item.value
        if not before or word is None or not word.text or item.append or item.conditional or item.function:
            continue
        if (
            item.outer is None
            and kept.isdisjoint(word.variables)
            and not re.search(r"\$\(|LD_LIB", word.source)
        ):
            yield Hit(
                item.line,
                f"this drops the directories that the modules of line {before[-1]} have added",
                "LD_LIBRARY_PATH=...${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}",
            )


@rule("wait-without-status", "warning", "a failed training looks like a success", source="man bash, wait")
def wait_without_status(job: Job) -> Iterator[Hit]:
    """`wait` without a process ID returns 0 whatever the steps returned. At the end of the script, so does the job.

    Only reported where all work is in the background, and nothing but a message follows.
    """
    if not job.script.is_batch or not job.work:
        return
    background = {id(step.command) for step in job.steps if step.background}
    if any(not (command.background or id(command) in background) or command.function for command in job.work):
        return
    commands = [command for command in job.script.commands if command.outer is None]
    waits = [command for command in commands if command.name == "wait"]
    traps = [command for command in commands if command.name == "trap"]
    if len(waits) != 1 or traps or [word.text for word in waits[0].words] != ["wait"]:
        return
    wait = waits[0]
    if wait.function or wait.conditional or wait.in_loop or wait.line < job.work[-1].line:
        return
    later = [command for command in commands if command.line > wait.line and not command.function]
    if all(command.name in ("echo", "printf", "date") or _exits_with_last(command) for command in later):
        yield Hit(
            wait.line,
            f"this ends with 0 when the step of line {job.work[-1].line} fails, and so does the job",
            'pid=$! after each step, and wait "$pid" || status=1 for each, then exit $status',
        )


def _exits_with_last(command: Command) -> bool:
    return command.name == "exit" and [word.text for word in command.words[1:]] in ([], ["0"], ["$?"])
