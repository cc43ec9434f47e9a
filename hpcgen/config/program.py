"""The section `program`: a training program of the user's own, in place of hpcgen's trainer."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from hpcgen.config.fields import Text
from hpcgen.errors import Problem
from hpcgen.text import did_you_mean, one_of
from trainer.contract.config import Count, FilePath, PathKind, PositiveFloat, paths_in
from trainer.contract.record import config_section

VARIABLES = {
    "RANK": "number of the task in the job, from 0",
    "LOCAL_RANK": "number of the task on its node, from 0",
    "NODE_RANK": "number of the node, from 0",
    "WORLD_SIZE": "number of ranks",
    "MASTER_ADDR": "address of the first node",
    "MASTER_PORT": "port for the rendezvous, different in each attempt",
    "NNODES": "number of nodes that the program runs on",
    "RANKS_PER_NODE": "number of ranks on each node: one per GPU, or ntasks_per_node",
    "GPUS_PER_NODE": "number of GPUs of a node, 0 without GPUs",
    "RUN_DIR": "run directory",
    "SCRATCH": "directory for temporary files on the node's own disk, removed at the end of the job",
    "JOB_ID": "Slurm's job ID, which a requeued job keeps",
    "RESTART": "number of times that the job was requeued, 0 in the first attempt",
    "DEEPSPEED_CONFIG": "path of DeepSpeed's configuration, with program.deepspeed",
}
"""The variables that arguments of the command can contain, as {NAME}."""
DEEPSPEED_CONFIG = "DEEPSPEED_CONFIG"
OF_A_RANK = ("RANK", "LOCAL_RANK")
"""Variables that only launcher srun has, because torchrun sets them for each of its processes."""

_PART = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
# `re` accepts more than POSIX: these mean something else to grep -E, or nothing.
_NOT_POSIX = {
    r"\\[dD]": "\\d is not a digit in a POSIX expression; use [0-9]",
    r"\(\?": "(?...) is not a POSIX expression; use a plain group",
    r"[*+?}]\?": "a lazy quantifier is not a POSIX expression; use a narrower one, such as [^,]*",
}

Argument = Annotated[str, Text(r"[^\n]{0,10000}", "up to 10000 characters on one line")]
Glob = Annotated[
    str,
    Text(
        r"(?![~-])(?!(.*/)?\.\.(/|$))(?=.*[*?\[]).{1,1000}",
        "a path without '..' that has a wildcard, such as checkpoints/step_*",
    ),
    PathKind.PATTERN,
]
JobPath = Annotated[str, PathKind.IN_RUN_DIR]
Signal = Literal["USR1", "USR2", "TERM", "INT"]


@config_section
class DeepSpeedConfig:
    """DeepSpeed's configuration. The job writes it to the file {DEEPSPEED_CONFIG}, which the command must name."""

    config: dict[str, Any]
    """DeepSpeed's own keys, as in its JSON file. Two of the three batch sizes are enough. Strings can contain
    variables of the job, such as {SCRATCH}; {{ and }} stand for braces."""
    model: FilePath | None = None
    """Hugging Face config.json of the model, or the directory that contains it, for the memory estimate."""
    parameters: PositiveFloat | None = None
    """Number of parameters of the model, for the memory estimate of a model without a config.json."""
    largest_layer_parameters: PositiveFloat | None = None
    """Number of parameters of the model's largest module, such as its embedding. Used with `parameters` and stage 3.
    Default: 0."""
    trainable_parameters: PositiveFloat | None = None
    """Number of trainable parameters, for the memory estimate of adapters such as LoRA. Default: all."""
    model_parallel_size: Count = 1
    """Number of ranks among which the program itself divides each copy of the model, such as the stages of a
    PipelineModule. The batch sizes count only the copies."""


@config_section
class ProgressConfig:
    """The number that shows the program's progress, from one of three sources. It must grow, for example with the
    step. Paths can begin with {RUN_DIR}/."""

    file: JobPath | None = None
    """File whose first line is the number."""
    checkpoints: Glob | None = None
    """Names of checkpoints, with wildcards. The number is the largest one that the wildcards match, such as 400 for
    checkpoints/step_* and checkpoints/step_400."""
    log: Argument | None = None
    """POSIX extended regular expression (grep -E) for lines of the job's log. Its first group is the number. Only the
    last line that matches counts."""


@config_section
class StopConfig:
    """Request to save a checkpoint and stop, sent slurm.run.signal_lead_s seconds before the time limit."""

    signal: Signal | None = None
    """Signal to every process of the program. Launcher torchrun supports only TERM."""
    file: JobPath | None = None
    """File that the job creates, and removes before each attempt. It can begin with {RUN_DIR}/."""


@config_section
class DoneConfig:
    """Condition under which the program is done."""

    file: JobPath
    """File that the program creates when it is done. It can begin with {RUN_DIR}/."""


@config_section
class ProgramConfig:
    """A training program of your own. A run file with this section has no keys for hpcgen's trainer."""

    command: tuple[Argument, ...]
    """Command and its arguments, as a list. No shell evaluates them. {RANK}, {MASTER_ADDR} and other variables of the
    job are replaced; {{ and }} stand for braces. With launcher torchrun: a script, or -m and a module."""
    launcher: Literal["srun", "torchrun"] = "srun"
    """Way to start the program: srun starts it once per GPU and sets RANK and similar variables; torchrun starts one
    torchrun per node."""
    directory: FilePath = "."
    """Working directory of the program. Default: the directory of the run file."""
    progress: ProgressConfig | None = None
    """Source of the program's progress, one of {file: PATH}, {checkpoints: PATTERN} and {log: EXPRESSION}. Three failed
    attempts in a row without progress end the job; with null, any three failed attempts in a row."""
    stop: StopConfig | None = None
    """Request to save and stop before the time limit, {signal: USR1} or {file: PATH}; null if the program saves
    checkpoints only by itself."""
    done: DoneConfig | None = None
    """Condition under which the program is done, such as {file: PATH}. Default: exit status 0, unless it was asked to
    stop."""
    deepspeed: DeepSpeedConfig | None = None
    """DeepSpeed's configuration, for a program that uses DeepSpeed; null for other programs."""


def parts(argument: str) -> Iterator[tuple[str, bool]]:
    """Yields the literal texts of an argument, and the names of its variables with True.

    Braces that belong to neither are literal; `problems` reports them.
    """
    end = 0
    for found in _PART.finditer(argument):
        yield argument[end : found.start()], False
        name = found[1]
        yield (name, True) if name is not None else (found[0][0], False)
        end = found.end()
    yield argument[end:], False


def problems(program: ProgramConfig) -> Iterator[Problem]:
    """Yields mistakes in the section."""
    yield from _command_problems(program)
    if program.deepspeed is not None and f"{{{DEEPSPEED_CONFIG}}}" not in "".join(program.command):
        reason = f"is a file that the command does not name, because no argument has {{{DEEPSPEED_CONFIG}}}"
        hint = f'pass it to the program, such as "--deepspeed_config={{{DEEPSPEED_CONFIG}}}"'
        yield Problem("program.deepspeed.config", reason, hint)
    for name, section in (("progress", program.progress), ("stop", program.stop)):
        if section is not None:
            known = [field.name for field in dataclasses.fields(section)]
            keys = [key for key in known if getattr(section, key) is not None]
            if len(keys) != 1:
                yield Problem(
                    f"program.{name}", f"sets {' and '.join(keys) or 'nothing'}", f"set {one_of(known)}"
                )
    yield from _path_problems(program)
    if program.progress is not None and program.progress.log is not None:
        yield from _expression_problems(program.progress.log)
    signal = program.stop.signal if program.stop else None
    if signal not in (None, "TERM") and program.launcher == "torchrun":
        reason = "would kill torchrun, which does not pass it to its processes"
        yield Problem("program.stop.signal", reason, "use TERM, stop.file, or launcher srun")


def _path_problems(program: ProgramConfig) -> Iterator[Problem]:
    for key, kind, path in paths_in(program, "program"):
        if kind not in (PathKind.IN_RUN_DIR, PathKind.PATTERN):
            continue
        for found in _PART.finditer(in_run_dir(path, "")):
            if found[1] in VARIABLES:
                reason = f"has {found[0]}, which is replaced only in the command"
                yield Problem(key, reason, "begin with {RUN_DIR}/, or write the path itself")


def _command_problems(program: ProgramConfig) -> Iterator[Problem]:
    if not program.command:
        yield Problem("program.command", "is empty", "set a list such as [python, train.py]")
        return
    first = program.command[0]
    name = first.rpartition("/")[2]
    if program.launcher == "torchrun" and re.match(r"python[0-9.]*$|torchrun$", name):
        reason = "is started by launcher torchrun itself"
        yield Problem(
            "program.command[0]",
            reason,
            "begin with the script, or with -m and a module",
            about=("program.launcher",),
        )
    if not first or (program.launcher == "srun" and first.startswith("-")):
        yield Problem("program.command[0]", "is not a command", "begin with a command, such as python")
    known = tuple(name for name in VARIABLES if name != DEEPSPEED_CONFIG or program.deepspeed is not None)
    for index, argument in enumerate(program.command):
        path = f"program.command[{index}]"
        yield from variable_problems(path, argument, known)
        for name in OF_A_RANK if program.launcher == "torchrun" else ():
            if (name, True) in parts(argument):
                reason = f"has {{{name}}}, which torchrun sets for each of its processes"
                yield Problem(path, reason, f"read the environment variable {name} in the program")


def variable_problems(path: str, text: str, known: Sequence[str]) -> Iterator[Problem]:
    """Yields the braces and variables of `text` that are not `known`."""
    for found in _PART.finditer(text):
        name = found[1]
        if name is None:
            if len(found[0]) == 1:
                yield Problem(path, f"has a single {found[0]}", f"write {2 * found[0]} for a brace")
        elif name == DEEPSPEED_CONFIG and name not in known:
            reason = f"has {{{name}}}, but there is no section program.deepspeed"
            yield Problem(path, reason, "add the section with the key config", about=("program.deepspeed",))
        elif name not in known:
            hint = did_you_mean(name, known) or f"use {one_of(list(known))}"
            braces = "write {{ and }} for braces"
            yield Problem(path, f"has the unknown variable {{{name}}}", f"{hint}; {braces}")


def _expression_problems(expression: str) -> Iterator[Problem]:
    path = "program.progress.log"
    for pattern, hint in _NOT_POSIX.items():
        if re.search(pattern, expression):
            yield Problem(path, "is not a POSIX extended regular expression", hint)
            return
    try:
        groups = re.compile(re.sub(r"\[\[:\w+:\]\]", "[a]", expression)).groups
    except re.error as error:
        yield Problem(path, f"is not a regular expression: {error}", "correct it; test it with grep -E")
        return
    if groups == 0:
        hint = "put parentheses around the number, such as 'step ([0-9]+)'"
        yield Problem(path, "has no group", hint)


def in_run_dir(path: str, run_dir: str) -> str:
    """The path with the run directory in place of {RUN_DIR} at its beginning."""
    rest = path.removeprefix("{RUN_DIR}/")
    return path if rest == path else f"{run_dir}/{rest}"


def directories(program: ProgramConfig) -> tuple[str, ...]:
    """The directories that the program writes to, as far as the section shows. Paths are absolute."""
    files = (
        _before_wildcards(path) if kind is PathKind.PATTERN else path
        for _, kind, path in paths_in(program)
        if kind in (PathKind.IN_RUN_DIR, PathKind.PATTERN)
    )
    return (program.directory, *(path.rpartition("/")[0] or "/" for path in files))


def _before_wildcards(pattern: str) -> str:
    """The beginning of a pattern up to its first wildcard. `[*]`, `[?]` and `[[]` are escaped characters."""
    beginning = re.match(r"(\[[*?[]\]|[^*?[])*", pattern)
    assert beginning is not None
    return re.sub(r"\[([*?[])\]", r"\1", beginning[0])
