"""Converts the environment that a script gives its program."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from hpcgen.check.lint.job import Job
from hpcgen.check.lint.launch import Launch
from hpcgen.check.lint.script import Assignment, Command
from hpcgen.check.lint.words import Word
from hpcgen.check.migration.account import (
    is_secret,
    is_within,
    launch_prefix,
    mpi_prefix,
    own_commands,
    shell_prefixes,
)
from hpcgen.check.migration.leftover import Carried, is_sure, unknown
from hpcgen.config.cluster import ClusterConfig
from hpcgen.config.known_variables import UNREAD, right_name
from hpcgen.config.node_type import NodeType
from hpcgen.config.variables import RESERVED, RESERVED_PREFIXES
from hpcgen.redaction import SECRET, SECRET_VALUE

OF_RANKS = frozenset(("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK"))
"""Variables that hpcgen's script computes for every program."""
OF_HOST_OR_IMAGE = frozenset(("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "HOME", "TMPDIR", "LD_PRELOAD"))
_NAME_AND_VALUE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A variable that the script sets for its program."""

    name: str
    line: int
    text: str
    why_not: str = ""
    """Why the value cannot be carried over; "" if it can."""


def carry_environment(
    job: Job,
    launch: Launch,
    carried: Carried,
    cluster: ClusterConfig,
    node_type: NodeType,
    *,
    trains: bool = True,
) -> None:
    """Carries over variables that neither hpcgen nor the node type sets. Only the names of secrets are kept.

    For hpcgen's trainer (`trains`), NCCL_COLLNET_ENABLE becomes parallelism.use_sharp if the node type supports SHARP.
    """
    facts = node_type.environment | node_type.sharp
    usual = {name: variable.value for name, variable in facts.items()} | cluster.environment
    secrets: set[str] = set()
    environment: dict[str, str] = {}
    for setting in _settings(
        job, launch, carried, has_prefix=not trains and launch.launcher in ("python", "")
    ):
        name, text = setting.name, setting.text
        if trains and name == "CUDA_DEVICE_MAX_CONNECTIONS" and text == "1":
            carried.own.append(name)  # hpcgen sets it with tensor or context parallelism
        # before the rules that name or keep a value
        elif SECRET.search(name) or SECRET_VALUE.search(text):
            secrets.add(name)
            carried.leave(setting.line, name, "it is a secret: export it in the shell that submits the job")
        elif name in OF_RANKS or (trains and name in RESERVED - OF_HOST_OR_IMAGE - {"PYTHONPATH"}):
            carried.own.append(name)
        elif why := _why_not(setting, trains=trains):
            carried.leave(setting.line, name, why)
        elif trains and name == "NCCL_COLLNET_ENABLE" and text == "1" and node_type.sharp:
            carried.put("parallelism.use_sharp", True)
        elif usual.get(name) != text:
            environment[name] = text
        else:
            environment.pop(name, None)  # set twice, and at last as the node type does
    # a secret that the script uses but never assigns comes from the submitting shell
    used = {use.name for use in job.script.uses if SECRET.search(use.name)}
    assigned = {assignment.name for assignment in job.script.assignments}
    if secrets or used - assigned:
        carried.put("secrets", sorted(secrets | (used - assigned)))
    if environment:
        carried.put("environment", environment)


def _why_not(setting: Setting, *, trains: bool) -> str:
    """Why a run file cannot set a variable; "" if it can."""
    name = setting.name
    is_reserved = name in RESERVED or name.startswith(RESERVED_PREFIXES)
    if name in OF_HOST_OR_IMAGE and (trains or name not in RESERVED):
        return "it is set by the image or the node"
    if name.startswith(("SLURM_", "SLURMD_", "SBATCH_", "SRUN_")):
        return "hpcgen's script removes variables that change Slurm, and gives srun options instead"
    if is_reserved and trains:
        return "it is set by the image, the node or the trainer"
    if is_reserved:
        return f"to keep it, begin program.command with env and {name}=VALUE"
    if right := right_name(name):
        return f"nothing reads it; the correct name is {right}"
    if name in UNREAD:
        return f"nothing reads it: {UNREAD[name]}"
    if setting.why_not:
        return setting.why_not
    if name == name.lower() or not setting.text.isprintable():
        return "a run file cannot set lower-case variables or multi-line values"
    return ""


def _settings(job: Job, launch: Launch, carried: Carried, *, has_prefix: bool) -> Iterator[Setting]:
    """Yields what the script sets for its program, in the order in which the program's environment is made.

    `has_prefix`: program.command keeps the words in front of the program, such as env and its assignments.
    """
    own = own_commands(job, launch)
    end = max(command.end for command in own)
    unset = [
        command
        for command in job.script.commands
        if command.name == "unset" and not command.dead and command.end <= end
    ]
    for assignment in job.script.exports:
        if assignment.dead or is_within(assignment, launch, job) or not _is_for(assignment, job, own):
            continue
        ends = [command for command in unset if _ends(command, assignment)]
        if any(not command.conditional for command in ends):
            continue  # it is unset again before the program starts
        # in a function, or in text that another shell runs, the line does not tell the order
        if assignment.outer is None and not assignment.function and assignment.line > end:
            carried.leave(assignment.line, assignment.name, "it is set after the program, for something else")
        else:
            outer = None if assignment.outer is None else job.script.commands[assignment.outer]
            # if the step itself is conditional, so is everything in its text
            is_conditional = bool(ends) or (assignment.conditional and not (outer and outer.conditional))
            yield _of_assignment(assignment, is_conditional=is_conditional)
    for directive in job.script.directives:
        if directive.name == "export" and directive.effective:
            yield from _of_export(directive.value or "", None, directive.line)
            if _keeps_all(directive.value or ""):
                carried.claim(directive)
    for command in reversed(own):
        yield from (_of_assignment(assignment) for assignment in command.environment)
    for name, value in launch.mpi.environment if launch.mpi else ():
        if value is not None:
            yield Setting(name=name, line=value.line, text=value.text, why_not=_doubt(value))
    for word in mpi_prefix(launch):
        yield from _of_word(word)
    for option in launch.step.options if launch.step else ():
        if option.name == "export":
            yield from _of_export(option.text, option.value, option.word.line)
            if _keeps_all(option.text):
                carried.claim(option)
    for word in itertools.chain(*shell_prefixes(job, launch)):
        yield from _of_word(word)
    for word in launch_prefix(launch)[0]:
        if not has_prefix or is_secret(word.text):  # no file may keep a secret
            yield from _of_word(word)


def _ends(command: Command, assignment: Assignment) -> bool:
    """True if an `unset` that follows an assignment in the same shell names its variable."""
    names = {word.text for word in command.words[1:]}
    return (
        assignment.name in names
        and command.line > assignment.line
        and (command.outer, command.function) == (assignment.outer, assignment.function)
    )


def _of_word(word: Word) -> Iterator[Setting]:
    """The assignment that a word such as A=B gives to env."""
    if found := _NAME_AND_VALUE.fullmatch(word.text):
        yield Setting(name=found[1], line=word.line, text=found[2], why_not=_doubt(word))


def _is_for(assignment: Assignment, job: Job, own: tuple[Command, ...]) -> bool:
    """True if an assignment is in the script itself, or in a text that starts the program."""
    if assignment.outer is None:
        return True
    return any(job.script.commands[assignment.outer] is command for command in own)


def _of_assignment(assignment: Assignment, *, is_conditional: bool = False) -> Setting:
    word = assignment.value
    why = "it has no value" if word is None else _doubt(word)
    if is_conditional:
        why = "it is only set conditionally"
    text = word.text if word else ""
    return Setting(name=assignment.name, line=assignment.line, text=text, why_not=why)


def _of_export(text: str, word: Word | None, line: int) -> Iterator[Setting]:
    """The assignments in a value of --export, such as ALL,LR=3."""
    for part in text.split(","):
        if found := _NAME_AND_VALUE.fullmatch(part):
            yield Setting(name=found[1], line=line, text=found[2], why_not=_doubt(word) if word else "")


def _keeps_all(text: str) -> bool:
    """True if a value of --export keeps the environment, as hpcgen's steps do."""
    parts = text.split(",")
    return parts[0] == "ALL" and all("=" in part for part in parts[1:])


def _doubt(word: Word) -> str:
    return "" if is_sure(word) else unknown(word)
