"""Converts a script that starts any program into a run file with the section `program`."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

from hpcgen.check.lint.job import Job
from hpcgen.check.lint.launch import Launch, Step, mpi_call_of, program_of
from hpcgen.check.lint.words import Word
from hpcgen.check.lint.wrappers import CONTAINERS
from hpcgen.check.migration.leftover import Carried, is_sure
from hpcgen.check.migration.resources import carry_container, carry_directives, carry_environment
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
BY_TORCHRUN = ("RANK", "LOCAL_RANK")
SET_BY_LAUNCHER = frozenset((
    "nnodes", "nproc-per-node", "node-rank", "master-addr", "master-port", "rdzv-backend", "rdzv-endpoint", "rdzv-id",
    "rdzv-conf", "standalone", "num-nodes", "num-gpus", "hostfile", "m", "module",
))  # fmt: skip
"""Options of torchrun and deepspeed that hpcgen's launchers set, or that become keys of the run file."""
SET_FOR_STEP = re.compile(
    r"nodes|ntasks|ntasks-per-node|cpus-per-task|gpus|gpus-per-(node|task)|gres|kill-on-bad-exit|label|unbuffered|wait|"
    r"output|error|job-name|jobid|mem|exclusive|partition|account|time|exact|export|nodelist|container-.*"
)
"""Options of srun that hpcgen sets, or that have a key of the run file."""
SET_FOR_RANKS = re.compile(
    r"np|n|c|npernode|pernode|N|ppn|perhost|grr|x|genv|env|H|host|hosts|hostfile|machinefile|f"
)
"""Options of mpirun that hpcgen sets, or that have a key of the run file."""
SIGNAL = re.compile(r"(?P<to>[BR]{1,2}:)?(SIG)?(?P<name>USR1|USR2|TERM|INT|10|12|15|2)(@(?P<lead>\d{1,5}))?")
SIGNAL_NAMES = {"10": "USR1", "12": "USR2", "15": "TERM", "2": "INT"}
QUIET = frozenset((
    "echo", "printf", "date", "export", "set", "shopt", "declare", "local", "readonly", "trap", "exit", "return", ":",
    "true", "false", "test", "[", "[[", "hostname", "scontrol", "head", "tail", "awk", "sed", "cut", "grep", "tr",
    "nvidia-smi", "env", "printenv", "which", "pwd", "whoami", "sleep", "wait", "shift", "unset", "cat", "expr", "seq",
    "getent", "ip", "python", "python3", "sbatch", "squeue", "dirname", "basename", "realpath", "readlink", "nproc",
    "read", "mapfile", "readarray", "cd",
))  # fmt: skip
"""Commands that only print, compute or set something."""


def work_of(job: Job) -> Launch | None:
    """The program that the job is for; None if the script starts none."""
    launches = [launch for launch in job.launches if not launch.command.dead]
    steps = [step for step in job.work_steps or job.parallel_steps or job.steps if not step.command.dead]
    trainings = [launch for launch in launches if launch.trains]
    for launch in (*trainings, *(launch for launch in launches if launch.step in steps)):
        return launch
    for step in steps:
        if step.program:
            return _launch(step)
    return next(iter(launches), None)


def _launch(step: Step) -> Launch:
    """A step whose program is not a Python program."""
    return Launch(
        command=step.command,
        step=step,
        launcher="",
        options=(),
        program=step.program[0].text,
        is_module=False,
        arguments=step.program[1:],
        environment=frozenset(),
    )


def carry_program(
    job: Job, launch: Launch, carried: Carried, cluster: ClusterConfig, node_type: NodeType
) -> None:
    """Carries over the command, its launcher, resources, environment and container."""
    carry_directives(job, launch, carried, node_type, stage="run")
    _carry_ranks(launch, carried)
    carry_environment(job, carried, cluster, node_type, trains=False)
    carry_container(launch, carried, cluster)
    _carry_directory(job, launch, carried)
    _carry_command(launch, carried)
    _carry_signal(job, carried)
    if carried.get("slurm.run.nodes") is None:
        carried.put("slurm.run.nodes", 1)
        carried.leave(
            job.script.first_directive, "the number of nodes", "the script does not set it; 1 is filled in"
        )
    for option in launch.step.options if launch.step else ():
        if not SET_FOR_STEP.fullmatch(option.name):
            text = f"--{option.name}" + (f"={option.text}" if option.value else "")
            carried.leave(option.word.line, f"srun {text}", "hpcgen starts the step with its own options")
    for mpi_option in launch.mpi.options if launch.mpi else ():
        if not SET_FOR_RANKS.fullmatch(mpi_option.name):
            text = " ".join((mpi_option.name, *(word.text for word in mpi_option.values)))
            carried.leave(
                mpi_option.word.line,
                f"mpirun -{text}",
                "hpcgen starts the tasks with srun and its own options",
            )
    _other_work(job, launch, carried)


def _carry_ranks(launch: Launch, carried: Carried) -> None:
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
            why = "the script starts it on the first node only, and the run file on every node"
            carried.leave(launch.line, launch.program, why)


def _carry_directory(job: Job, launch: Launch, carried: Carried) -> None:
    directory = None
    for command in job.script.commands:
        if command is launch.command or (launch.step and command is launch.step.command):
            break
        if command.name == "cd" and not command.dead and command.outer is None and len(command.words) == 2:
            word = command.words[1]
            if is_sure(word) and word.text.startswith("/") and not command.conditional:
                directory = word.text
            else:
                carried.leave(
                    command.line,
                    f"cd {word.text}",
                    "set program.directory; its default is the directory of the run file",
                )
    if directory:
        carried.put("program.directory", directory)


def _carry_command(launch: Launch, carried: Carried) -> None:
    words = _words(launch)
    if launch.launcher == "torchrun":
        carried.put("program.launcher", "torchrun")
        _leave_wrappers(words, launch, carried)
        words = _target(launch)
    elif launch.launcher == "deepspeed":
        why = "launcher srun starts every rank; the program reads LOCAL_RANK instead of the argument --local_rank"
        carried.leave(launch.line, "the launcher deepspeed", why)
        _leave_wrappers(words, launch, carried)
        python = replace(words[0], text="python", source="python", known=True, variables=())
        words = (
            python,
            *(replace(python, text=text, source=text) for text in _flags(launch)),
            *_script(launch),
        )
    if launch.launcher in ("torchrun", "deepspeed"):
        for option in launch.options:
            if option.name not in SET_BY_LAUNCHER:
                text = f"{option.name}={option.text}" if option.value else option.name
                carried.leave(
                    option.word.line, f"{launch.launcher} --{text}", "the run file has no key for it"
                )
    for is_certain, group in itertools.groupby(words, key=lambda word: word.certain):
        if not is_certain:
            first, *more = group
            text = " ".join(word.text for word in (first, *more))
            why = "program.command has these arguments in any case; remove them if they are not wanted"
            carried.leave(first.line, f"the condition of {text}", why)
    carried.put("program.command", [_argument(word, launch, carried) for word in words])
    relative = (
        not launch.is_module and "/" not in launch.program[:1] and carried.get("program.directory") is None
    )
    if relative and launch.launcher:
        why = "the program starts in the directory of the run file; set program.directory if it is elsewhere"
        carried.leave(launch.line, launch.program, why)


def _words(launch: Launch) -> tuple[Word, ...]:
    """The complete command of a task, without the container that it runs in."""
    step = launch.step
    words = step.program if step and launch.command is step.command else launch.command.words
    if (call := mpi_call_of(words)) is not None:
        words = call.program
    if any(word.text.rpartition("/")[2] in CONTAINERS for word in words[:1]):
        return program_of(words)
    return words


def _script(launch: Launch) -> tuple[Word, ...]:
    """The program and its arguments."""
    words = _words(launch)
    return words[len(words) - len(launch.arguments) - 1 :]


def _flags(launch: Launch) -> tuple[str, ...]:
    return ("-m",) if launch.is_module else ()


def _target(launch: Launch) -> tuple[Word, ...]:
    """The words after torchrun and its options: a script, or -m and a module."""
    words = _script(launch)
    return tuple(replace(words[0], text=text, source=text) for text in _flags(launch)) + words


def _leave_wrappers(words: tuple[Word, ...], launch: Launch, carried: Carried) -> None:
    """Lists a command such as numactl in front of the launcher."""
    inner = program_of(words)
    if before := words[: len(words) - len(inner)]:
        text = " ".join(word.text for word in before)
        carried.leave(
            before[0].line, f"{text} in front of {launch.launcher}", "the launcher starts the program"
        )


def _argument(word: Word, launch: Launch, carried: Carried) -> str:
    """A word as an argument of program.command. An unknown part becomes a variable that `validate` refuses."""
    variables = PER_NODE if launch.launcher == "torchrun" else VARIABLES
    source = re.sub(r'^"(.*)"$', r"\1", word.source)
    if word.variables and set(word.variables) <= variables.keys() and not re.search(r"[`'\"\\]|\$\(", source):
        text = source  # with the names, although their values may be known
    else:
        text = word.text
    left: list[str] = []
    unset: list[str] = []
    argument, end = "", 0
    for found in re.finditer(r"\$\(\(?[^()]*(?:\([^()]*\)[^()]*)*\)?\)|\$\{?(\w+)[^{}\s/]*\}|\$(\w+)", text):
        argument += _literal(text[end : found.start()])
        name = variables.get(found[1] or found[2] or "")
        if re.match(r"\$\([^)]*(scontrol show host|hostname)", found[0]):
            name = "MASTER_ADDR"
        if name in BY_TORCHRUN and launch.launcher == "torchrun":
            name = None
        if name is None:
            name = found[1] or found[2] or re.sub(r"[{}\n]", " ", found[0])
            left.append(name)
            unset.append(found[0])
        argument += f"{{{name}}}"
        end = found.end()
    if left:
        why = f"nothing in the run file sets {', '.join(left)}; replace it in program.command"
        carried.leave(word.line, " ".join(unset), why)
    return argument + _literal(text[end:])


def _literal(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _carry_signal(job: Job, carried: Carried) -> None:
    """Carries over --signal for the tasks. What a signal to the batch shell means is known only to its trap."""
    text = job.script.options.get("signal")
    if text is None:
        return
    line = job.script.option_line("signal")
    found = SIGNAL.fullmatch(text)
    if found is None or found["to"] or carried.get("program.launcher") == "torchrun":
        why = "set program.stop to the signal or file with which the program saves and stops"
        carried.leave(line, f"--signal={text}", why)
        return
    carried.put("program.stop.signal", SIGNAL_NAMES.get(found["name"], found["name"]))
    if found["lead"] and int(found["lead"]):
        carried.put("slurm.run.signal_lead_s", int(found["lead"]))


def _other_work(job: Job, launch: Launch, carried: Carried) -> None:
    """Lists every other command that may matter. Steps and module commands are listed for any script."""
    own = {id(launch.command), id(launch.step.command if launch.step else None)}
    steps = {id(step.command) for step in job.steps}
    launches = {id(other.command) for other in job.launches}
    for command in job.script.commands:
        if command.dead or command.function or command.outer is not None or {id(command)} & (own | steps):
            continue
        name = command.name.rpartition("/")[2]
        if id(command) in launches or (
            name and name not in QUIET and name not in ("module", "ml", "source", ".")
        ):
            text = " ".join(word.text for word in command.words)
            carried.leave(
                command.line,
                re.sub(r"\s+", " ", text)[:60],
                "the run file runs one program; run this before submitting, or in the prologue of a site template",
            )
