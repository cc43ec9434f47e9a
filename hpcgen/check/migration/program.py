"""Converts a script that starts any program into a run file with the section `program`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping

from hpcgen.check.lint.job import Job
from hpcgen.check.lint.launch import OTHER_WORK, Launch, Step
from hpcgen.check.lint.mpi import MpiCall
from hpcgen.check.lint.script import Command
from hpcgen.check.lint.words import Word, unknown_ranges
from hpcgen.check.lint.wrappers import CONTAINERS, wrapped
from hpcgen.check.migration.account import (
    DIRECTORY,
    brief,
    changes_of_directory,
    command_words,
    hold_secrets,
    is_body,
    is_secret,
    launch_prefix,
    option_text,
    program_words,
    shown_words,
    text_of,
)
from hpcgen.check.migration.environment import carry_environment
from hpcgen.check.migration.leftover import Carried, is_sure
from hpcgen.check.migration.resources import carry_container, carry_directives
from hpcgen.config.cluster import ClusterConfig
from hpcgen.config.node_type import NodeType

VARIABLES = {
    "SLURM_PROCID": "RANK",
    "SLURM_LOCALID": "LOCAL_RANK",
    "SLURM_NODEID": "NODE_RANK",
    "SLURM_NTASKS": "WORLD_SIZE",
    "SLURM_NPROCS": "WORLD_SIZE",
    "SLURM_NNODES": "NNODES",
    "SLURM_JOB_NUM_NODES": "NNODES",
    "SLURM_NTASKS_PER_NODE": "RANKS_PER_NODE",
    "SLURM_GPUS_ON_NODE": "GPUS_PER_NODE",
    "SLURM_GPUS_PER_NODE": "GPUS_PER_NODE",
    "SLURM_JOB_ID": "JOB_ID",
    "SLURM_JOBID": "JOB_ID",
    "SLURM_RESTART_COUNT": "RESTART",
    "SLURM_LAUNCH_NODE_IPADDR": "MASTER_ADDR",
    "MASTER_ADDR": "MASTER_ADDR",
    "MASTER_PORT": "MASTER_PORT",
    "RANK": "RANK",
    "LOCAL_RANK": "LOCAL_RANK",
    "WORLD_SIZE": "WORLD_SIZE",
}
"""Variables of a batch script -> variables of program.command."""

PER_NODE = VARIABLES | {"SLURM_PROCID": "NODE_RANK", "SLURM_NTASKS": "NNODES", "SLURM_NPROCS": "NNODES"}
"""Variables where torchrun is the only task of its node."""
_OF_JOB = frozenset(name for name in VARIABLES if name.startswith(("SLURM_", "MASTER_")))
"""Variables that mean the same in every script."""
_OPTIONS_OF = {
    "SLURM_NTASKS": frozenset(("ntasks", "ntasks-per-node")),
    "SLURM_NPROCS": frozenset(("ntasks", "ntasks-per-node")),
    "SLURM_NTASKS_PER_NODE": frozenset(("ntasks-per-node",)),
    "SLURM_GPUS_PER_NODE": frozenset(("gpus-per-node",)),
}
"""Variables that Slurm sets only for a job with one of these options."""
BY_TORCHRUN = ("RANK", "LOCAL_RANK")
SIGNAL = re.compile(r"(?P<to>[BR]{1,2}:)?(SIG)?(?P<name>USR1|USR2|TERM|INT|10|12|15|2)(@(?P<lead>\d{1,5}))?")
SIGNAL_NAMES = {"10": "USR1", "12": "USR2", "15": "TERM", "2": "INT"}


def work_of(job: Job) -> Launch | None:
    """The program that the job is for; None if the script starts none."""
    launches = [launch for launch in job.launches if _counts(launch.command, job)]
    likely = job.work_steps or job.parallel_steps or [step for step in job.steps if not job.is_aid(step)]
    steps = [step for step in likely if _counts(step.command, job)]
    in_steps = [launch for launch in launches if launch.step in steps]
    calls = [(command, call) for command, call in job.mpi_calls if _counts(command, job)]
    others = [step for step in job.steps if _counts(step.command, job)]
    trainings = [launch for launch in launches if launch.trains]
    groups: tuple[list[Launch], ...] = (
        in_steps,
        [_launch(step.command, step, None, step.program) for step in steps if step.program],
        [_launch(command, None, call, call.program) for command, call in calls if call.program],
        launches,
        [_launch(step.command, step, None, step.program) for step in others if step.program],
    )
    ordered = [
        (group, launch)
        for group, found in enumerate([trainings] if trainings else groups)
        for launch in found
    ]
    last = max((launch.line for _, launch in ordered if not _in_background(launch)), default=0)

    def rank(item: tuple[int, Launch]) -> tuple[bool, int, bool]:
        group, launch = item
        serves = _in_background(launch) and launch.line < last
        return serves, group, OTHER_WORK.search(launch.program) is not None

    return min(ordered, key=rank)[1] if ordered else None


def _in_background(launch: Launch) -> bool:
    """True if the script does not wait for the program before its next command."""
    return launch.step.background if launch.step else launch.command.background


def _counts(command: Command, job: Job) -> bool:
    return not command.dead and not is_body(command, job)


def _launch(command: Command, step: Step | None, mpi: MpiCall | None, words: tuple[Word, ...]) -> Launch:
    """The launch of a program that is not a Python program."""
    program = _in_container(words)
    return Launch(
        command=command,
        step=step,
        mpi=mpi,
        launcher="",
        options=(),
        program=program[0].text,
        is_module=False,
        arguments=program[1:],
        words=words,
        environment=frozenset(),
    )


def carry_program(
    job: Job, launch: Launch, carried: Carried, cluster: ClusterConfig, node_type: NodeType
) -> None:
    """Carries over the command, its launcher, resources, environment and container."""
    carry_directives(job, launch, carried, node_type, stage="run")
    _carry_ranks(job, launch, carried)
    carry_environment(job, launch, carried, cluster, node_type, trains=False)
    carry_container(job, launch, carried, cluster)
    _carry_directory(job, launch, carried)
    _refuse_alternatives(launch, carried)
    _carry_command(job, launch, carried)
    _carry_signal(job, carried)
    if carried.get("slurm.run.nodes") is None:
        carried.put("slurm.run.nodes", 1)
        carried.leave(
            job.script.first_directive, "the number of nodes", "the script does not set it; 1 is filled in"
        )


def _carry_ranks(job: Job, launch: Launch, carried: Carried) -> None:
    """Corrects the number of ranks per node for deepspeed, which starts them itself, and for programs without srun."""
    section = carried.sections.setdefault("slurm", {}).setdefault("run", {})
    if launch.launcher == "deepspeed":
        section.pop("ntasks_per_node", None)
        nodes, ranks = launch.option("num-nodes"), launch.option("num-gpus")
        if ranks and ranks.value and ranks.value.number:
            section["ntasks_per_node"] = ranks.value.number
        if nodes and nodes.value and nodes.value.number:
            section["nodes"] = nodes.value.number
    elif launch.launcher != "torchrun" and launch.step is None and launch.mpi is None:
        section["ntasks_per_node"] = 1
        if section.get("nodes", 1) > 1:
            why = (
                f"the script starts it on the first node only, and the run file on each of {section['nodes']} nodes; "
                "1 node is enough for a program that runs there alone"
            )
            carried.refuse(launch.line, launch.program, why, "slurm.run.nodes")


def _carry_directory(job: Job, launch: Launch, carried: Carried) -> None:
    """Carries over the directory in which the script starts the program: of --chdir, or of the last cd."""
    found: list[tuple[int, str, str]] = []
    for directive in job.script.directives:
        if directive.name == "chdir" and directive.effective and (directive.value or "").startswith("/"):
            found.append((directive.line, text_of(directive), directive.value or ""))
            carried.claim(directive)
    for command in changes_of_directory(job, launch):
        word = command.words[-1]
        if is_sure(word) and word.text.startswith("/") and not command.conditional:
            found.append((command.line, f"{command.name} {word.text}", word.text))
        else:
            carried.leave(command.line, f"{command.name} {word.text}", DIRECTORY["run"])
    option = launch.step.option("chdir") if launch.step else None
    if option and is_sure(option.value) and option.text.startswith("/"):
        found.append((option.word.line, f"srun {option_text(option)}", option.text))
        carried.claim(option)
    for line, what, _ in found[:-1]:
        carried.leave(line, what, f"the program starts in {found[-1][2]}")
    if found:
        carried.put("program.directory", found[-1][2])


def _refuse_alternatives(launch: Launch, carried: Carried) -> None:
    """Refuses a launch whose launcher or program has different texts in different branches."""
    words = command_words(launch)
    fixed = words[: len(words) - len(program_words(launch)) + 1]
    step = launch.step.command.words if launch.step else ()
    found = next((word for word in (*step[:1], *fixed) if word.exclusive), None)
    if found is not None:
        text = brief((*step[:1], *words))
        why = "branches of the script start the program in different ways"
        carried.refuse(found.line, text, why)
    several = launch.step.option("multi-prog") if launch.step else None
    if several is not None:
        why = "the run file starts one program with the same arguments in every task"
        carried.refuse(several.word.line, f"srun {option_text(several)}", why)
        carried.claim(several)


def _carry_command(job: Job, launch: Launch, carried: Carried) -> None:
    words = _words(launch)
    if launch.launcher == "torchrun":
        carried.put("program.launcher", "torchrun")
        words = _target(launch)
    elif launch.launcher == "deepspeed":
        why = "launcher srun starts every rank; the program reads LOCAL_RANK instead of the argument --local_rank"
        carried.leave(launch.line, "the launcher deepspeed", why)
        words = (_plain("python", launch), *_flags(launch), *program_words(launch))
    else:
        carried.claim(*launch.options, *launch_prefix(launch)[0], *launch_prefix(launch)[1])
    _leave_conditions(words, carried)
    arguments = []
    for index, hides in enumerate(hold_secrets([word.text for word in words])):
        if hides:
            shown = words[index : index + 1] if is_secret(words[index].text) else words[index - 1 : index + 1]
            carried.leave(words[index].line, shown_words(shown), _SECRET)
        arguments.append("{secret}" if hides else _argument(words[index], job, launch, carried))
    carried.put("program.command", arguments)
    relative = (
        not launch.program.startswith("$")
        and not launch.is_module
        and "/" not in launch.program[:1]
        and carried.get("program.directory") is None
    )
    if relative and launch.launcher:
        why = "the program starts in the directory of the run file; set program.directory if it is elsewhere"
        carried.leave(launch.line, launch.program, why)


_SECRET = (
    "it is a secret: name its variable in `secrets`, let the program read it there, and remove this argument"
)
_IN_ANY_CASE = "program.command has these arguments in any case; remove them if they are not wanted"
_IN_ONE_BRANCH = (
    "branches of the script give different arguments; in program.command, remove the braces around those that you "
    "want, and the other arguments"
)


def _leave_conditions(words: tuple[Word, ...], carried: Carried) -> None:
    """Lists arguments that come from code that may not run."""
    for (is_certain, is_exclusive), group in itertools.groupby(
        words, key=lambda word: (word.certain, word.exclusive)
    ):
        if not is_certain:
            first, *more = group
            text = shown_words((first, *more))
            carried.leave(
                first.line, f"the condition of {text}", _IN_ONE_BRANCH if is_exclusive else _IN_ANY_CASE
            )


def _words(launch: Launch) -> tuple[Word, ...]:
    """The complete command of a task, without the container that it runs in."""
    return _in_container(command_words(launch))


def _in_container(words: tuple[Word, ...]) -> tuple[Word, ...]:
    """The program that a container starts, or the words themselves."""
    is_container = any(word.text.rpartition("/")[2] in CONTAINERS for word in words[:1])
    return (wrapped(words) or words) if is_container else words


def _plain(text: str, launch: Launch) -> Word:
    """A word that the script does not have."""
    return Word(text=text, known=True, line=launch.line, source=text)


def _flags(launch: Launch) -> tuple[Word, ...]:
    return (_plain("-m", launch),) if launch.is_module else ()


def _target(launch: Launch) -> tuple[Word, ...]:
    """The words after torchrun and its options: a script, or -m and a module."""
    return (*_flags(launch), *program_words(launch))


_EXPANSION = re.compile(
    r"\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|`[^`]*`|\$\{(?:[^{}]|\{[^{}]*\})*\}|\$\w+|\$[@*#?$!-]"
)
"""An expansion of the shell: of a command, of arithmetic, or of a variable."""
_OF_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?[-?=][^{}]*)?\})")
_PLAIN = re.compile(r"(?:[^`'\"\\$*?\[\]~{}]|\$\w+|\$\{\w+\})*")


def _argument(word: Word, job: Job, launch: Launch, carried: Carried) -> str:
    """A word as an argument of program.command. An unknown part becomes a variable that `validate` refuses."""
    variables = PER_NODE if launch.launcher == "torchrun" else VARIABLES
    source = re.sub(r'^"(.*)"$', r"\1", word.source)
    if word.exclusive:
        return f"{{{_placeholder(word.text)}}}"
    if not word.text.isprintable():
        why = (
            "an argument of program.command is one line of printable characters: write the text to a file, and start "
            "or name the file"
        )
        carried.refuse(word.line, f"the argument {brief((word,))}", why)
    if word.variables and set(word.variables) <= _OF_JOB & variables.keys() and _PLAIN.fullmatch(source):
        # by name, although the directives may determine the value
        text, ranges = source, tuple(found.span() for found in _EXPANSION.finditer(source))
    else:
        text, ranges = word.text, unknown_ranges(word)
    left: list[str] = []
    argument, end = "", 0
    for first, last in ranges:
        argument += _literal(text[end:first])
        for part in _parts_of(text[first:last]):
            name = _variable(part, variables, job, launch)
            left += [] if name else [part]
            argument += f"{{{name or _placeholder(part)}}}"
        end = last
    if left:
        names = ", ".join(_placeholder(part) for part in left)
        carried.leave(word.line, ", ".join(left), _why_unset(left, names))
    return argument + _literal(text[end:])


def _parts_of(unknown: str) -> list[str]:
    """The expansions in an unknown text; the text itself if the shell also expands what is between them."""
    parts = _EXPANSION.findall(unknown)
    return parts if "".join(parts) == unknown else [unknown]


def _variable(part: str, variables: Mapping[str, str], job: Job, launch: Launch) -> str | None:
    """The variable of program.command for an expansion; None if there is none."""
    if re.match(r"(\$\(|`)[^)]*(scontrol show host|hostname)", part):
        return "MASTER_ADDR"
    found = _OF_VARIABLE.fullmatch(part)
    source = (found[1] or found[2]) if found else ""
    options = _OPTIONS_OF.get(source)
    if options and options.isdisjoint(job.script.options) and part.strip("${}") != source:
        return None  # Slurm does not set it for this job, so the default in the script counts
    name = variables.get(source)
    return None if name in BY_TORCHRUN and launch.launcher == "torchrun" else name


def _placeholder(part: str) -> str:
    """A text for braces: the name of a variable, or the expansion as in the script."""
    found = re.fullmatch(r"\$\{?(\w+)\}?", part)
    return found[1] if found else re.sub(r"[{}\s]", " ", re.sub(r"^\$\{([@*])\}$", r"$\1", part))


def _why_unset(left: list[str], names: str) -> str:
    if names in ("$@", "$*"):
        return f"the run file does not have the script's arguments; in program.command, replace {{{names}}} by them"
    return f"nothing in the run file sets {names}; replace it in program.command"


def _literal(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _carry_signal(job: Job, carried: Carried) -> None:
    """Carries over --signal for the tasks. Only the script's trap knows what a signal to the batch shell means."""
    text = job.script.options.get("signal")
    if text is None:
        return
    line = job.script.option_line("signal")
    carried.claim(*(item for item in job.script.directives if item.name == "signal"))
    found = SIGNAL.fullmatch(text)
    if found is None or found["to"] or carried.get("program.launcher") == "torchrun":
        why = "set program.stop to the signal or file with which the program saves and stops"
        carried.leave(line, f"--signal={text}", why)
        return
    carried.put("program.stop.signal", SIGNAL_NAMES.get(found["name"], found["name"]))
    if found["lead"] and int(found["lead"]):
        carried.put("slurm.run.signal_lead_s", int(found["lead"]))
