"""The rank of each task and the rendezvous of the ranks."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from hpcgen.check.lint.arithmetic import Interval, interval_of_source
from hpcgen.check.lint.job import Job
from hpcgen.check.lint.launch import Step
from hpcgen.check.lint.rule import Hit, Severity, rule
from hpcgen.check.lint.script import Assignment
from hpcgen.check.lint.words import Word

FIRST_EPHEMERAL_PORT, LAST_EPHEMERAL_PORT = 32768, 60999
"""Linux, net.ipv4.ip_local_port_range: ports for outgoing connections."""
MAX_SHOWN = 40
"""Maximum number of characters of a value in a message."""

_TASK_VARIABLES = frozenset(("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID"))


@rule(
    "rank-of-batch-shell",
    "error",
    "every task gets the batch shell's rank",
    source="Slurm, man srun, OUTPUT ENVIRONMENT VARIABLES; PyTorch, torch/distributed/run.py, --node-rank",
)
def rank_of_batch_shell(job: Job) -> Iterator[Hit]:
    """SLURM_PROCID, SLURM_NODEID and SLURM_LOCALID differ from task to task. In the batch shell, they are 0.

    As an argument of srun, or exported as RANK before it, every task gets 0. In single quotes, the shell of each task
    expands the variable. torchrun reads --node_rank only with --rdzv_backend=static, its default, and without
    --standalone.
    """
    holders = {name: frozenset((name,)) for name in _TASK_VARIABLES}
    for assignment in job.script.assignments:
        if assignment.value and (names := _TASK_VARIABLES.intersection(assignment.value.variables)):
            holders[assignment.name] = names
    for step in job.steps:
        outer = step.command.outer
        if outer is not None and job.script.commands[outer].name == "srun":
            continue  # the shell of a task expands it
        words = (*(option.value for option in step.all("export") if option.value), *step.program)
        is_unread = _ignores_node_rank(step)
        for before, word in zip(("", *(word.text for word in words)), words, strict=False):
            # if $LAUNCHER becomes several words, only some of them contain the rank
            found = {
                name
                for variable in word.variables
                for name in holders.get(variable, ())
                if re.search(rf"\b({name}|{variable})\b", word.text)
            }
            if is_unread and any(_NODE_RANK.search(text) for text in (before.strip(), word.text)):
                continue
            for name in sorted(name for name in found if not _is_0_for_all(job, step, name)):
                yield Hit(
                    word.line,
                    f"the batch shell expands {name} here, so every task gets 0",
                    f"srun bash -c 'torchrun --node_rank \"${name}\" ...', in single quotes",
                )
    yield from _exported_ranks(job)


_NODE_RANK = re.compile(r"--(node|machine)[_-]rank\b")


def _ignores_node_rank(step: Step) -> bool:
    """True if the launcher of a step determines the ranks of the nodes itself."""
    text = " ".join(word.text for word in step.program)
    return bool(re.search(r"--standalone\b|--rdzv[_-]backend[=\s]+[\"']?(?!static\b)\S", text))


def _exported_ranks(job: Job) -> Iterator[Hit]:
    """RANK and LOCAL_RANK that the batch shell exports, in steps without a launcher that sets them.

    In containers, pyxis sets both for images with PYTORCH_VERSION.
    """
    for assignment in job.script.exports:
        value = assignment.value
        names = _TASK_VARIABLES.intersection(value.variables if value else ())
        if assignment.name not in ("RANK", "LOCAL_RANK") or not names or assignment.outer is not None:
            continue
        for launch in job.trainings:
            step = launch.step
            if step is None or launch.launcher != "python" or step.has_container or assignment.function:
                continue
            inside = launch.command.outer is not None or assignment.name in launch.environment
            if step.line > assignment.line and not inside and not _is_0_for_all(job, step, min(names)):
                yield Hit(
                    assignment.line,
                    f"the batch shell expands {min(names)} here, so every task of srun gets {assignment.name}=0",
                    f"srun bash -c 'export {assignment.name}=${min(names)}; exec python ...', in single quotes",
                )


def _is_0_for_all(job: Job, step: Step, name: str) -> bool:
    """True if the variable is 0 in every task of the step."""
    option = step.option("nodes")
    nodes = option.value.number if option and option.value else job.nodes
    tasks = job.num_tasks(step)
    if tasks == 1:
        return True
    if name == "SLURM_NODEID":
        return nodes == 1
    return name == "SLURM_LOCALID" and tasks is not None and tasks == nodes


# ---- where the ranks meet ----


def _ports(job: Job) -> Iterator[tuple[int, Word | None, Assignment | None]]:
    """Every port of a rendezvous: its line, its value, and the assignment of the value."""
    for assignment in job.script.assignments:
        if assignment.name == "MASTER_PORT":
            yield assignment.line, assignment.value, assignment
    for launch in job.launches:
        for name in ("master-port", "rdzv-endpoint", "main-process-port"):
            option = launch.option(name)
            if option and option.value and not launch.option("standalone"):
                yield option.value.line, option.value, None


def _port(word: Word | None) -> int | None:
    """The number at the end of a word: 29500, host:29500."""
    found = re.search(r"(?:^|:)(\d{2,5})$", word.text) if word else None
    return int(found[1]) if found else None


def _has_no_port(word: Word | None) -> bool:
    """True if a word is a host without a port: node1, $(hostname)."""
    return word is not None and bool(
        re.fullmatch(r"\"?(\$\(hostname[^:)]*\)|[A-Za-z][\w.-]*)\"?", word.source)
    )


@rule(
    "fixed-port",
    "warning",
    "two jobs can use the same port",
    source="PyTorch, torch/distributed/run.py, Stacked single-node",
)
def fixed_port(job: Job) -> Iterator[Hit]:
    """With a fixed port, two jobs on one node collide: one fails to start, or joins the other.

    A port computed from the job ID differs between jobs. Jobs with exclusive nodes are not reported. torchrun uses
    port 29400 if --rdzv_endpoint has none.
    """
    if not job.script.is_batch or _has_exclusive_nodes(job):
        return
    if job.launches and all(launch.option("standalone") for launch in job.launches):
        return
    reported: set[int] = set()
    for line, word, assignment in _ports(job):
        port = 29400 if assignment is None and _has_no_port(word) else _port(word)
        if port is None or word is None or port in reported:
            continue
        is_own = (
            not word.variables if assignment else not any("PORT" in name.upper() for name in word.variables)
        )
        if is_own:
            reported.add(port)
            yield Hit(
                line,
                f"every job of this script uses port {port}, and two jobs can share a node",
                "MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))",
            )


def _has_exclusive_nodes(job: Job) -> bool:
    """True if the directives keep other jobs of this script off the nodes."""
    gpus = job.gpus_per_node or 0
    if job.script.options.get("dependency") == "singleton":
        return True
    return "exclusive" in job.script.options or gpus >= 8 or (job.is_multi_node and gpus >= 4)


@rule(
    "rdzv-endpoint",
    "error",
    "every node waits for the others at its own address",
    source="PyTorch, torch/distributed/run.py, get_rdzv_endpoint",
)
def rdzv_endpoint(job: Job) -> Iterator[Hit]:
    """torchrun reads --master_addr and --master_port only with --rdzv_backend=static, its default.

    With c10d and no --rdzv_endpoint, the rendezvous is at localhost, where each node waits for the others. argparse
    accepts abbreviations of --rdzv_endpoint (Python, argparse, allow_abbrev).
    """
    for launch in job.launches:
        backend, nodes = launch.option("rdzv-backend"), launch.option("nnodes")
        endpoints = tuple(
            "rdzv-endpoint"[:length] for length in range(len("rdzv-e"), len("rdzv-endpoint") + 1)
        )
        alone = launch.option(*endpoints, "standalone") or job.script.settings("PET_RDZV_ENDPOINT")
        is_one = job.nodes == 1 or nodes is None or nodes.text in ("1", "1:1")
        is_c10d = backend is not None and backend.text == "c10d" and backend.word.certain
        if launch.launcher == "torchrun" and backend and is_c10d and not alone and not is_one:
            yield Hit(
                backend.word.line,
                "--rdzv_backend=c10d without --rdzv_endpoint: every node waits at its own localhost:29400",
                '--rdzv_endpoint="$MASTER_ADDR:$MASTER_PORT"',
            )


@rule(
    "port-of-each-task",
    "error",
    "every task picks a different port",
    source="PyTorch, torch.distributed, environment variable initialization",
)
def port_of_each_task(job: Job) -> Iterator[Hit]:
    """A random MASTER_PORT in the shell of a task differs from task to task, so the ranks never connect.

    Choose the port in the batch shell, or compute it from the job ID.
    """
    meets = [item for item in job.script.assignments if item.name == "MASTER_ADDR" and item.value]
    if not any(re.search(r"scontrol|NODELIST", item.value.source) for item in meets if item.value):
        return  # each task may be a separate world
    if any(item.name == "RANDOM" for item in job.script.assignments):
        return
    if any(launch.option("standalone") for launch in job.launches):
        return
    inside = {name for step in job.steps if job.has_many_tasks(step) for name in _called_in(job, step)}
    steps = [step.command for step in job.steps if job.has_many_tasks(step) and _is_literal(step)]
    for item in job.script.assignments:
        if item.name != "MASTER_PORT" or item.value is None or not _is_random(job, item.value):
            continue
        outer = None if item.outer is None else job.script.commands[item.outer]
        in_text = outer is not None and not item.conditional and any(outer is command for command in steps)
        if in_text or (item.outer is None and item.function in inside and _runs_always(job, item)):
            yield Hit(
                item.line,
                "every task of the step picks a different MASTER_PORT, so the ranks never connect",
                "export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000)) before srun",
            )


def _called_in(job: Job, step: Step) -> Iterator[str]:
    """The functions of the script that the text of `srun bash -c` calls."""
    for command in job.script.commands:
        outer = None if command.outer is None else job.script.commands[command.outer]
        if outer is step.command and command.name in job.script.functions and not command.conditional:
            yield command.name


def _is_literal(step: Step) -> bool:
    """True if the shell of the task, not the batch shell, expands the text of `bash -c`."""
    texts = [word.source for word in step.program]
    return any(
        re.fullmatch(r"-\w*c", flag) and text.startswith("'") for flag, text in itertools.pairwise(texts)
    )


def _is_random(job: Job, word: Word) -> bool:
    """True if every evaluation of a word yields a different number."""
    source = word.source
    called = [name for name in job.script.functions if re.search(rf"\$\(\s*{re.escape(name)}\b", source)]
    for name in called:
        own = [
            found for command in job.script.commands if command.function == name for found in command.words
        ]
        source += " ".join(found.source for found in own)
    kept = "MASTER_PORT" in word.source or re.search(r"random-source|SLURM_JOB", source)
    return not kept and bool(re.search(r"\bshuf\b|\bRANDOM\b|\bbind\(\(", source))


def _runs_always(job: Job, item: Assignment) -> bool:
    """True if an assignment in a function is unconditional."""
    body = job.script.lines[job.script.functions[item.function].line : item.line]
    return not any(
        re.search(r"\b(if|case|elif|while|for)\b|&&|\|\|", line.partition("#")[0]) for line in body
    )


@rule("ephemeral-port", "warning", "the port may be taken", source="Linux, net.ipv4.ip_local_port_range")
def ephemeral_port(job: Job) -> Iterator[Hit]:
    """The kernel uses ports 32768 to 60999 for outgoing connections, so the job's port may be in use.

    The rule computes the range of ports from $RANDOM, remainders and `shuf -i`, also through another variable.
    """
    for line, word, assignment in _ports(job):
        least = greatest = _port(word) if word and not word.assumed else None
        origin = assignment or _origin(job, word)
        interval = _drawn(job, origin, word)
        if interval and not _looks_for_free_ports(job):
            least, greatest = interval.least, interval.greatest
        if least is None or greatest is None:
            continue
        if greatest >= FIRST_EPHEMERAL_PORT and least <= LAST_EPHEMERAL_PORT:
            ports = f"the port {least}" if least == greatest else f"a port between {least} and {greatest}"
            yield Hit(
                line,
                f"{ports} may be in use: the kernel assigns {FIRST_EPHEMERAL_PORT} to {LAST_EPHEMERAL_PORT} to clients",
                f"a port below {FIRST_EPHEMERAL_PORT}",
            )


def _looks_for_free_ports(job: Job) -> bool:
    looks = re.compile(r"(^|[\s(|;!])(ss|netstat|lsof|nc)\s+-")
    return any(looks.search(line) for line in job.script.lines if not line.lstrip().startswith("#"))


def _origin(job: Job, word: Word | None) -> Assignment | None:
    """The only assignment of the variable that a word consists of, or of the port in host:$PORT."""
    found = re.search(r"(?:^|:)\"?\$\{?(\w+)\}?\"?$", word.source) if word else None
    settings = [item for item in job.script.assignments if found and item.name == found[1]]
    return settings[0] if len(settings) == 1 and found and found[1] != "MASTER_PORT" else None


def _drawn(job: Job, assignment: Assignment | None, word: Word | None) -> Interval | None:
    """The interval of a computed or random port, from its assignment, the variable behind it, or the word."""
    for item in (assignment, _origin(job, assignment.value) if assignment else None):
        if item and item.interval:
            return item.interval
        if item and item.value and (interval := interval_of_source(item.value.source.strip('"'))):
            return interval
    return interval_of_source(word.source.strip('"').rpartition(":")[2]) if word else None


def addresses_of(job: Job) -> Iterator[tuple[int, Word]]:
    """Addresses of the rendezvous: MASTER_ADDR if it is set once, and those that launchers get from elsewhere."""
    settings = [item for item in job.script.assignments if item.name == "MASTER_ADDR"]
    if len(settings) == 1 and settings[0].value and not settings[0].conditional:
        yield settings[0].line, settings[0].value
    for launch in job.launches:
        if launch.command.conditional and not launch.command.function and not launch.command.in_loop:
            continue
        for name in ("rdzv-endpoint", "master-addr", "main-process-ip"):
            option = launch.option(name)
            if option and option.value and "MASTER_ADDR" not in option.value.variables:
                yield option.value.line, option.value
                break


@rule(
    "localhost-master",
    "error",
    "every node waits for the others at its own address",
    source="PyTorch, torch.distributed, environment variable initialization",
)
def localhost_master(job: Job) -> Iterator[Hit]:
    """With MASTER_ADDR=localhost, each node waits for the others at its own address until a timeout."""
    for line, word in addresses_of(job) if job.is_multi_node else ():
        if word.certain and re.match(r"(localhost|127\.\d+\.\d+\.\d+|::1)(:|$)", word.text):
            address = word.text if len(word.text) <= MAX_SHOWN else f"{word.text[:MAX_SHOWN]}..."
            yield Hit(
                line,
                f"the ranks of {job.nodes} nodes cannot rendezvous at {address}",
                'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            )


@rule(
    "nodelist-as-host",
    "error",
    "a list of nodes is used as a host",
    source="Slurm, man scontrol, show hostnames",
)
def nodelist_as_host(job: Job) -> Iterator[Hit]:
    """SLURM_JOB_NODELIST is compressed (gpu-[1-4]). scontrol show hostnames prints the names."""
    for line, word in addresses_of(job) if job.may_be_multi_node else ():
        if re.match(r'"?\$\{?SLURM_(JOB_|STEP_)?NODELIST\}?"?(:|$)', word.source):
            yield Hit(
                line,
                "the list of nodes is compressed (gpu-[1-4]) and is not a host name",
                '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            )


@rule("nodes-array", "error", "an array has only one node", source="man bash, Arrays")
def nodes_array(job: Job) -> Iterator[Hit]:
    """If nodes is an array, ($nodes) copies only its first element. If it is a string, ("$nodes") is one element.

    Only reported if the script uses more than the first element of the copy.
    """
    arrays = {item.name for item in job.script.assignments if item.items is not None}
    lists = {
        item.name
        for item in job.script.assignments
        if item.value and re.search(r"scontrol\s+show\s+host", item.value.source)
    }
    text = "\n".join(line for line in job.script.lines if not line.lstrip().startswith("#"))
    for assignment in job.script.assignments:
        if assignment.items is None or len(assignment.items) != 1:
            continue
        source = assignment.items[0].source
        found = re.fullmatch(r'("?)\$\{?(\w+)\}?"?', source)
        if not found or not re.search(rf"\$\{{[#!]?{re.escape(assignment.name)}\[(?!0\])", text):
            continue
        if found[2] in arrays and found[2] != assignment.name:
            yield Hit(
                assignment.line,
                f"${found[2]} is the first element of an array, so {assignment.name} has only one node",
                f'{assignment.name}=("${{{found[2]}[@]}}")',
            )
        elif found[1] and found[2] in lists - arrays:
            yield Hit(
                assignment.line,
                f"{source} is one word with all nodes, so {assignment.name} has only one element",
                f'mapfile -t {assignment.name} < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
            )


@rule(
    "gpu-count",
    "warning",
    "SLURM_GPUS_PER_NODE may not be a number",
    source="Slurm, man sbatch, OUTPUT ENVIRONMENT",
)
def gpu_count(job: Job) -> Iterator[Hit]:
    """SLURM_GPUS_PER_NODE is the value of --gpus-per-node, which can be "h100:8", and is unset with --gres.

    SLURM_GPUS_ON_NODE is always a number. A note if the script only prints the value.
    """
    if not job.script.is_batch or re.fullmatch(r"\d+", job.script.options.get("gpus-per-node", "")):
        return
    if "gpus-per-node" not in job.script.options and "gres" not in job.script.options:
        return
    given = job.script.options.get("gpus-per-node")
    reason = (
        f"SLURM_GPUS_PER_NODE is {given}, not a number"
        if given
        else "SLURM_GPUS_PER_NODE is unset with --gres"
    )
    if any(item.name == "SLURM_GPUS_PER_NODE" for item in job.script.assignments):
        return
    # ${SLURM_GPUS_PER_NODE:-8} handles an unset variable
    lines = {
        use.line
        for use in job.script.uses
        if use.name == "SLURM_GPUS_PER_NODE" and (given or not use.guarded)
    }
    lines |= {use.line for use in job.script.arithmetic if use.name == "SLURM_GPUS_PER_NODE"}
    severity: Severity | None = "note" if lines <= _printed(job, "SLURM_GPUS_PER_NODE") else None
    for line in sorted(lines):
        yield Hit(line, reason, "use SLURM_GPUS_ON_NODE", severity=severity)


def _printed(job: Job, name: str) -> set[int]:
    """The lines where a variable is printed to the log and not used otherwise."""
    printed: set[int] = set()
    others = {item.line for item in job.script.assignments if item.value and name in item.value.variables}
    for command in job.script.commands:
        if any(name in word.variables for word in command.words):
            is_print = command.name in ("echo", "printf") and command.status not in ("piped", "substituted")
            (printed if is_print else others).update(range(command.line, command.end + 1))
    return printed - others


@rule(
    "world-size",
    "error",
    "WORLD_SIZE is not the number of ranks",
    source="PyTorch, torch.distributed, environment variable initialization",
)
def world_size(job: Job) -> Iterator[Hit]:
    """If WORLD_SIZE is too large, the ranks wait for others that never start. If too small, they fail to start."""
    direct = [launch for launch in job.trainings if launch.launcher == "python" and launch.step]
    for assignment in job.script.settings("WORLD_SIZE"):
        number = assignment.value.number if assignment.value else None
        for launch in direct:
            world = job.world_size(launch)
            if number and world and world[0] * world[1] != number and not assignment.conditional:
                yield Hit(
                    assignment.line,
                    f"WORLD_SIZE is {number}, but srun starts {world[0]} x {world[1]} = {world[0] * world[1]} ranks",
                    "WORLD_SIZE=$SLURM_NTASKS",
                )
