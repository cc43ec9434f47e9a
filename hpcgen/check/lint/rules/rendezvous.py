"""The rank of each task and the rendezvous of the ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpcgen.check.lint.arithmetic import Refused
from hpcgen.check.lint.filters import Unknown
from hpcgen.check.lint.job import Job
from hpcgen.check.lint.launch import Step
from hpcgen.check.lint.rule import Hit, Severity, rule
from hpcgen.check.lint.sample import Sample
from hpcgen.check.lint.words import Word

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

    If such a variable is an argument of srun, or is exported as RANK before srun, every task gets 0. In single quotes,
    the shell of each task expands it. torchrun reads --node_rank only with --rdzv_backend=static, its default, and
    without --standalone.
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
                yield Hit.at(
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
                yield Hit.at(
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
            yield Hit.at(
                backend.word.line,
                "--rdzv_backend=c10d without --rdzv_endpoint: every node waits at its own localhost:29400",
                '--rdzv_endpoint="$MASTER_ADDR:$MASTER_PORT"',
            )


def addresses_of(job: Job) -> Iterator[tuple[int, Word]]:
    """Addresses of the rendezvous: MASTER_ADDR if it is set once, and addresses that launchers get in other ways."""
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
            yield Hit.at(
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
    """SLURM_JOB_NODELIST is compressed (gpu-[1-4]), so it is neither a host nor a list to split at commas or blanks.

    scontrol show hostnames prints the names. The rule computes the address of sample jobs. It is only a warning if the
    script yields a host for some lists of nodes.
    """
    names = '$(scontrol show hostnames "$SLURM_JOB_NODELIST"'
    places = [(*place, f"{names} | head -n 1)") for place in addresses_of(job)]
    places += [(*place, f"split the output of {names})") for place in _hosts_elsewhere(job)]
    for line, word, fix in places if job.may_be_multi_node else ():
        wrong = [address for address in _addresses(job, word) if not _is_host(address)]
        if wrong:
            yield Hit.at(
                line,
                f"the list of nodes is compressed (gpu-[1-4]) and is not a host name: this yields {wrong[0]}",
                fix,
                severity="warning" if len(wrong) < len(_NODE_LISTS) else None,
            )


_NODE_LISTS = ("gpu-[1-4]", "gpu-[1,3]", "node[01-04]", "node[01,03]")
"""Lists of nodes as Slurm writes them."""
_HOSTS = frozenset(f"{prefix}{number}" for prefix in ("gpu-", "node0") for number in range(1, 5))


def _is_host(address: str) -> bool:
    return address.rpartition("//")[2] in _HOSTS


def _addresses(job: Job, word: Word) -> list[str]:
    """The address for each of the sample lists. Empty if the address does not come from the list, or if only a run can
    tell.

    A script that works for one site's names is not tested with other names, because it may depend on their length or
    characters.
    """
    found = []
    for nodes in _NODE_LISTS:
        names = ("SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_STEP_NODELIST")
        sample = Sample(job.script, dict.fromkeys(names, nodes), is_cut_by_position=False)
        try:
            found.append(sample.text_before_colon(word.text))
        except (Unknown, Refused):
            return []
    if len(set(found)) == 1:
        return []
    sites = (found[:2], found[2:])
    return [] if any(all(map(_is_host, addresses)) for addresses in sites) else found


def _hosts_elsewhere(job: Job) -> Iterator[tuple[int, Word]]:
    """Hosts to which the script connects: with ssh, or with srun on some nodes of the job but not all."""
    for command in job.script.commands:
        if command.name == "ssh":
            operands = [word for word in command.words[1:] if not word.text.startswith("-")]
            yield from ((word.line, word) for word in operands[:1])
    for step in job.steps:
        option = step.option("nodelist")
        if option and option.value and not re.fullmatch(r'"?\$\{?SLURM_\w*NODELIST\}?"?', option.value.text):
            yield option.value.line, option.value


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
            yield Hit.at(
                assignment.line,
                f"${found[2]} is the first element of an array, so {assignment.name} has only one node",
                f'{assignment.name}=("${{{found[2]}[@]}}")',
            )
        elif found[1] and found[2] in lists - arrays:
            yield Hit.at(
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
    lines |= {use.line for use in job.script.reads if use.in_arithmetic and use.name == "SLURM_GPUS_PER_NODE"}
    severity: Severity | None = "note" if lines <= _printed(job, "SLURM_GPUS_PER_NODE") else None
    for line in sorted(lines):
        yield Hit.at(line, reason, "use SLURM_GPUS_ON_NODE", severity=severity)


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
                yield Hit.at(
                    assignment.line,
                    f"WORLD_SIZE is {number}, but srun starts {world[0]} x {world[1]} = {world[0] * world[1]} ranks",
                    "WORLD_SIZE=$SLURM_NTASKS",
                )
