"""Functions, arguments and libraries that do not reach a program."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpcgen.check.lint.job import Job
from hpcgen.check.lint.mpi import STEP_PROGRAMS
from hpcgen.check.lint.rule import Hit, rule
from hpcgen.check.lint.words import Word


@rule(
    "launch-deprecated",
    "note",
    "a deprecated launcher of PyTorch",
    source="PyTorch, torch/distributed/launch.py, its FutureWarning",
)
def launch_deprecated(job: Job) -> Iterator[Hit]:
    """torch.distributed.launch is deprecated and will be removed. torchrun has the same options.

    torchrun only sets LOCAL_RANK in the environment. The old launcher also passes --local-rank to the program, unless
    --use-env is set.
    """
    for launch in job.launches:
        for word in launch.command.words:
            if word.text == "torch.distributed.launch" and launch.launcher == "torchrun":
                yield Hit.at(
                    word.line,
                    "torch.distributed.launch is deprecated, and a later PyTorch will remove it",
                    "use torchrun, and read LOCAL_RANK in the program instead of --local-rank",
                )


@rule(
    "function-in-step",
    "error",
    "a step does not have the script's functions",
    source="man bash, export -f; Slurm, man srun, DESCRIPTION",
)
def function_in_step(job: Job) -> Iterator[Hit]:
    """srun starts programs. It cannot start a function of the batch shell.

    The shell of `srun bash -c` has the function only after `export -f`. A text that defines or sources it is not
    reported.
    """
    functions = job.script.functions
    for step in job.steps:
        program = step.program[0] if step.program else None
        if program and program.known and program.certain and _is_only_a_function(job, program.text):
            yield Hit.at(
                program.line,
                f"srun looks for a program named {program.text}, which is a function of this script",
                f"export -f {program.text}, and srun bash -c {program.text}",
            )
    if "allexport" in job.script.shell_options:
        return  # set -a exports functions too
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
        if (
            outer is None
            or outer.name not in STEP_PROGRAMS
            or outer.dead
            or name not in functions
            or name in handed_on
        ):
            continue
        text = outer.shell_text
        if text is None or not _is_only_a_function(job, name):
            continue
        # the batch shell expands $(name) in double quotes, or in a variable of the text
        is_literal = text.source.startswith("'") or command.status != "substituted"
        if name not in text.source or not is_literal:
            continue
        if re.search(
            rf"\b{re.escape(name)}\s*\(\)|\bfunction\b|\bdeclare -f\b|(^|[\s;&])(source|\.)\s", text.text
        ):
            continue
        yield Hit.at(
            command.line, f"the shell of the step does not have the function {name}", f"export -f {name}"
        )


def _is_only_a_function(job: Job, name: str) -> bool:
    """True if a name is a function of the script, and not a program that the function wraps."""
    body = job.script.commands_by_function.get(name, [])
    calls_itself = any(word.text.rpartition("/")[2] == name for command in body for word in command.words)
    return name in job.script.functions and bool(body) and not calls_itself


@rule(
    "arguments-lost",
    "error",
    "the text of bash -c has no arguments",
    source="man bash, OPTIONS, -c; Special Parameters",
)
def arguments_lost(job: Job) -> Iterator[Hit]:
    """In `bash -c 'python train.py "$@"'`, "$@" is empty, because nothing follows the text.

    In `bash -c "train $@"`, the outer shell expands $@ to several words. Only the first belongs to the text, and the
    others are lost. This is a warning, because the script works with one argument.
    """
    for command in job.script.commands:
        text = command.shell_text
        if text is None or command.words[-1] is not text or command.dead or command.name in _ADD_ARGUMENTS:
            continue
        if re.search(r"(?<!\\)\$(@|\{@\})", _without_single_quotes(text.source)):
            yield Hit.at(
                text.line,
                "$@ in double quotes becomes several words, and bash -c takes only the first as its text",
                'bash -c \'... "$@"\' bash "$@", or $* in place of $@',
                severity="warning",
            )
        elif text.certain and _reads_arguments(_without_single_quotes(_known_part(text))):
            yield Hit.at(
                text.line,
                '"$@" is empty in this text, because nothing follows it',
                'bash -c \'... "$@"\' bash "$@"',
            )


_ADD_ARGUMENTS = ("xargs", "parallel", "find", "env_parallel")
"""Programs that append words to the command they run."""


def _without_single_quotes(source: str) -> str:
    """A word as written, without its single-quoted parts. The shell expands the rest."""
    parts = re.findall(r"'[^']*'|\"(?:[^\"\\]|\\.)*\"?|\\.|[^'\"\\]+", source, re.DOTALL)
    return "".join(part for part in parts if not part.startswith("'"))


def _known_part(word: Word) -> str:
    """The text of a word without what its shell has expanded."""
    starts = (0, *(end for _, end in word.unknowns))
    ends = (*(start for start, _ in word.unknowns), len(word.text))
    return " ".join(word.text[start:end] for start, end in zip(starts, ends, strict=True))


def _reads_arguments(text: str) -> bool:
    """True if a text uses "$@" without setting it by `set --` or using it in a function."""
    own = re.search(r"\bset\s+(--|\S*\$)|\(\)|\bfunction\b|\bshift\b|\bsource\b|<<|\\", text)
    return bool(re.search(r"\$(@|\{@\})", text)) and not own


@rule("array-exported", "error", "an exported array is empty in a program", source="man bash, BUGS")
def array_exported(job: Job) -> Iterator[Hit]:
    """bash does not export arrays: `export HOSTS=(a b)` sets HOSTS in the script only.

    Reported if the text of a `bash -c` uses it. What the outer shell expands, in double quotes, has its value.
    """
    arrays = {item.name: item.line for item in job.script.exports if item.items is not None}
    arrays = {name: line for name, line in arrays.items() if name not in _set_in_texts(job)}
    for command in job.script.commands if arrays else ():
        outer = None if command.outer is None else job.script.commands[command.outer]
        text = outer.shell_text if outer and outer.name != "eval" else None
        if text is None or command.status == "substituted":
            continue
        outside = _without_single_quotes(text.source)
        for name in dict.fromkeys(
            name for word in command.words for name in word.variables if name in arrays
        ):
            if re.search(rf"\$\{{?[#!]?{name}\b", text.source) and not re.search(
                rf"(?<!\\)\$\{{?[#!]?{name}\b", outside
            ):
                yield Hit.at(
                    command.line,
                    f"{name} is empty here: bash does not export the array of line {arrays[name]}",
                    f'pass its elements as arguments: bash -c \'... "$@"\' bash "${{{name}[@]}}"',
                )


def _set_in_texts(job: Job) -> set[str]:
    return {item.name for item in job.script.assignments if item.outer is not None}


_LIBRARIES = re.compile(
    r"cuda|nccl|cudnn|mpi|gcc|ofi|fabric|ucx|hpcx|nvhpc|rocm|oneapi|intel|cray", re.IGNORECASE
)
"""Environment modules that add libraries to LD_LIBRARY_PATH."""


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
            yield Hit.at(
                item.line,
                f"this drops the directories that the modules on line {before[-1]} added",
                "LD_LIBRARY_PATH=...${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}",
            )
