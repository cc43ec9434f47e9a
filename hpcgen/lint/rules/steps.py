"""How srun starts the work, how its end is noticed, and where the ranks meet."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpcgen.lint.job import Job
from hpcgen.lint.launch import Step
from hpcgen.lint.rule import Hit, rule
from hpcgen.lint.script import Assignment, Command
from hpcgen.lint.words import Word

SRUN = "Slurm, man srun"
FIRST_EPHEMERAL_PORT, LAST_EPHEMERAL_PORT = 32768, 60999
"""Linux, net.ipv4.ip_local_port_range: ports that any outgoing connection may take."""


@rule("no-kill-on-bad-exit", "warning", "one dead rank leaves the others waiting", source=SRUN)
def no_kill_on_bad_exit(job: Job) -> Iterator[Hit]:
    """When one task dies, the others wait for it in a collective until a timeout, or until the job's limit.

    --kill-on-bad-exit=1 (-K) ends the step at once.
    """
    if job.exported("SLURM_KILL_BAD_EXIT"):
        return
    for step in job.work_steps:
        many = (job.num_tasks(step) or 0) > 1 or job.may_be_multi_node
        if many and not step.option("kill-on-bad-exit") and not step.is_open:
            yield Hit(
                step.line, "when one task dies, the others go on waiting for it", "srun --kill-on-bad-exit=1"
            )


@rule("cpus-not-inherited", "warning", "tasks get one CPU", source="Slurm 22.05, release notes")
def cpus_not_inherited(job: Job) -> Iterator[Hit]:
    """Since Slurm 22.05 srun does not take --cpus-per-task from the job: a task gets one CPU."""
    cpus = job.number("cpus-per-task")
    if not cpus or cpus == 1 or job.exported("SRUN_CPUS_PER_TASK"):
        return
    for step in job.work_steps:
        if not step.option("cpus-per-task", "exclusive", "cpus-per-gpu") and not step.is_open:
            yield Hit(
                step.line,
                f"srun does not inherit --cpus-per-task={cpus}: each task gets one CPU",
                f"srun --cpus-per-task={cpus}, or export SRUN_CPUS_PER_TASK={cpus}",
            )


@rule("step-tasks", "warning", "srun starts fewer tasks than it says", source="measured on Slurm 22.05")
def step_tasks(job: Job) -> Iterator[Hit]:
    """--ntasks-per-node on srun does not add tasks to a job that asked for fewer: --ntasks does."""
    for step in job.work_steps:
        option = step.option("ntasks-per-node")
        wanted = option.value.number if option and option.value else None
        has = job.ntasks_per_node
        if option and wanted and has and wanted > has and not step.option("ntasks"):
            yield Hit(
                option.word.line,
                f"the job has {has} task a node, and srun --ntasks-per-node={wanted} alone starts no more",
                "give --ntasks as well",
            )


@rule("kill-srun", "error", "killing srun kills the tasks at once", source="measured on Slurm 22.05")
def kill_srun(job: Job) -> Iterator[Hit]:
    """srun answers SIGTERM and SIGHUP by killing every task with SIGKILL: nothing is saved.

    It forwards SIGUSR1 and SIGUSR2 to the tasks of all nodes.
    """
    pids = {
        assignment.name
        for assignment in job.script.assignments
        if assignment.value and assignment.value.source.strip('"') in ("$!", "${!}")
    }
    if not any(step.background for step in job.steps):
        return
    texts = [(command, command.words) for command in job.script.commands]
    for command, words in texts:
        if command.name == "kill" and _kills(words) and any(pids & set(word.variables) for word in words):
            yield Hit(
                command.line, "srun kills every task at once when it gets this signal", "kill -USR2 the srun"
            )
        elif command.name == "trap" and len(words) > 1:
            yield from _kills_in_trap(command, pids)


def _kills_in_trap(command: Command, pids: set[str]) -> Iterator[Hit]:
    for found in re.finditer(r"\bkill\s+((?:-\S+\s+)*)[\"']?\$\{?(\w+|!)", command.words[1].text):
        signal = found[1].split()
        if (found[2] in pids or found[2] == "!") and _is_deadly(signal):
            yield Hit(
                command.line, "srun kills every task at once when it gets this signal", "kill -USR2 the srun"
            )


def _kills(words: tuple[Word, ...]) -> bool:
    return _is_deadly([word.text for word in words[1:] if word.text.startswith("-")])


def _is_deadly(options: list[str]) -> bool:
    """Whether kill with these options sends TERM, HUP or INT; TERM without any."""
    text = " ".join(options).upper().replace("SIG", "")
    return not options or bool(re.fullmatch(r"-(S )?(TERM|HUP|INT|15|1|2)( --)?", text))


@rule("no-wait", "error", "the script does not wait for its step", source="man bash, JOB CONTROL")
def no_wait(job: Job) -> Iterator[Hit]:
    """A batch script that ends takes its steps along: srun in the background needs a wait."""
    if any(command.name == "wait" for command in job.script.commands):
        return
    for step in job.work_steps:
        if step.background:
            yield Hit(
                step.line, "the script ends without waiting for this step, and Slurm kills it", "wait for it"
            )


@rule("wait-interrupted", "warning", "the trap ends the wait", source="man bash, SIGNALS")
def wait_interrupted(job: Job) -> Iterator[Hit]:
    """A trap interrupts `wait`: it returns at once, and the script goes on while the step still saves."""
    traps = [command for command in job.script.commands if command.name == "trap" and len(command.words) > 2]
    in_trap = any(re.search(r"\bwait\b", command.words[1].text) for command in traps)
    waits = [command for command in job.script.commands if command.name == "wait"]
    signals = {word.text for command in traps for word in command.words[2:]} - {"EXIT", "ERR", "0"}
    background = any(step.background for step in job.work_steps)
    if background and signals and len(waits) == 1 and not waits[0].in_loop and not in_trap:
        yield Hit(
            waits[0].line,
            "when the trap runs, this wait returns, and the script ends while the step still saves",
            'while kill -0 "$pid" 2>/dev/null; do wait "$pid"; done',
        )


@rule("step-outside-srun", "error", "one node of many runs the program", source=SRUN)
def step_outside_srun(job: Job) -> Iterator[Hit]:
    """A batch script runs on the first node alone. What all nodes are to run, srun must start."""
    nodes = job.nodes or 0
    through = {"srun", "mpirun", "mpiexec", "pdsh", "clush", "ssh", "ray", "parallel-ssh"}
    if nodes < 2 or any(command.name in through for command in job.script.commands) or job.steps:
        return
    for launch in job.trainings:
        yield Hit(
            launch.line,
            f"{launch.launcher} runs on the first of {nodes} nodes alone, and waits for the others",
            "start it with srun",
        )


@rule("too-many-agents", "error", "every task starts all ranks of its node", source="PyTorch, torchrun")
def too_many_agents(job: Job) -> Iterator[Hit]:
    """torchrun starts the ranks of a node itself, so a node needs one task: eight tasks of it start 64 ranks."""
    for launch in job.launches:
        ranks = launch.option("nproc-per-node")
        if launch.launcher != "torchrun" or launch.step is None or not ranks or ranks.text == "1":
            continue
        option = launch.step.option("ntasks-per-node")
        alone = launch.step.option("ntasks")
        tasks = option.value.number if option and option.value else job.ntasks_per_node
        if alone and alone.value and job.nodes and alone.value.number == job.nodes:
            continue
        if tasks and tasks > 1:
            yield Hit(
                launch.line,
                f"each of the {tasks} tasks of a node starts {ranks.text} ranks",
                "srun --ntasks-per-node=1 torchrun, or python without torchrun",
            )


_OF_A_TASK = frozenset(("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID"))


@rule("rank-of-batch-shell", "error", "every task gets the batch shell's rank", source="Slurm, man srun")
def rank_of_batch_shell(job: Job) -> Iterator[Hit]:
    """SLURM_PROCID, SLURM_NODEID and SLURM_LOCALID differ from task to task. In an argument of srun the batch shell,
    which runs on the first node, puts in its own: 0. Every task gets rank 0, and waits for the others for ever.

    In single quotes, a shell of each task puts in the task's.
    """
    holders = {name: frozenset((name,)) for name in _OF_A_TASK}
    for assignment in job.script.assignments:
        if assignment.value and (names := _OF_A_TASK.intersection(assignment.value.variables)):
            holders[assignment.name] = names
    for step in job.steps:
        outer = step.command.outer
        if outer is not None and job.script.commands[outer].name == "srun":
            continue  # a task's shell puts it in
        given = [option.value for option in step.all("export") if option.value]
        for word in (*given, *step.program):
            names = frozenset[str]().union(*(holders.get(name, ()) for name in word.variables))
            for name in sorted(name for name in names if not _is_0_for_all(job, step, name)):
                yield Hit(
                    word.line,
                    f"the batch shell puts in its own {name}, which is 0, for every task",
                    f"srun bash -c 'torchrun --node_rank \"${name}\" ...', in single quotes",
                )


def _is_0_for_all(job: Job, step: Step, name: str) -> bool:
    """Whether the step is so small that each of its tasks has 0."""
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
    """Every port of a rendezvous: its line, and where its value is from."""
    for assignment in job.script.assignments:
        if assignment.name == "MASTER_PORT":
            yield assignment.line, assignment.value, assignment
    for launch in job.launches:
        for name in ("master-port", "rdzv-endpoint", "main-process-port"):
            option = launch.option(name)
            if option and option.value:
                yield option.value.line, option.value, None


def _port(word: Word | None) -> int | None:
    """The number a word ends with: 29500, host:29500."""
    found = re.search(r"(?:^|:)(\d{2,5})$", word.text) if word else None
    return int(found[1]) if found else None


@rule("fixed-port", "warning", "two jobs meet at one port", source="torch.distributed")
def fixed_port(job: Job) -> Iterator[Hit]:
    """With a fixed port, a second job on the node, or what a crashed one left, takes the place of the first.

    A port from the job's number differs from job to job: $((10000 + SLURM_JOB_ID % 20000)).
    """
    said: set[int] = set()
    for line, word, assignment in _ports(job) if job.script.is_batch else ():
        port = _port(word)
        if port is None or word is None or port in said:
            continue
        is_own = (
            not word.variables if assignment else not any("PORT" in name.upper() for name in word.variables)
        )
        if is_own:
            said.add(port)
            yield Hit(line, f"the port {port} is the same for every job", "$((10000 + SLURM_JOB_ID % 20000))")


@rule("ephemeral-port", "warning", "the port may be taken", source="Linux, net.ipv4.ip_local_port_range")
def ephemeral_port(job: Job) -> Iterator[Hit]:
    """From 32768 to 60999 the kernel gives ports to outgoing connections: now and then the job's is taken."""
    for line, word, assignment in _ports(job):
        least = greatest = _port(word) if word and not word.assumed else None
        if assignment and assignment.interval:
            least, greatest = assignment.interval.least, assignment.interval.greatest
        if least is None or greatest is None:
            continue
        if greatest >= FIRST_EPHEMERAL_PORT and least <= LAST_EPHEMERAL_PORT:
            ports = f"the port {least}" if least == greatest else f"a port between {least} and {greatest}"
            yield Hit(
                line,
                f"{ports} may be one that the kernel gave to an outgoing connection",
                f"stay below {FIRST_EPHEMERAL_PORT}",
            )


def _addresses(job: Job) -> Iterator[tuple[int, Word]]:
    """Where the ranks are to meet: MASTER_ADDR, and what a launcher is told that does not come from there."""
    for assignment in job.script.assignments:
        if assignment.name == "MASTER_ADDR" and assignment.value and not assignment.conditional:
            yield assignment.line, assignment.value
    for launch in job.launches:
        for name in ("rdzv-endpoint", "master-addr", "main-process-ip"):
            option = launch.option(name)
            if option and option.value and "MASTER_ADDR" not in option.value.variables:
                yield option.value.line, option.value
                break


@rule("localhost-master", "error", "every node meets itself", source="torch.distributed")
def localhost_master(job: Job) -> Iterator[Hit]:
    """With MASTER_ADDR=localhost each node waits for the others at its own address, until a timeout."""
    for line, word in _addresses(job) if job.is_multi_node else ():
        if re.match(r"(localhost|127\.\d+\.\d+\.\d+|::1)(:|$)", word.text):
            yield Hit(
                line,
                f"the ranks of {job.nodes} nodes cannot meet at {word.text}",
                'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            )


@rule("nodelist-as-host", "error", "a list of nodes is no host", source="Slurm, man scontrol")
def nodelist_as_host(job: Job) -> Iterator[Hit]:
    """SLURM_JOB_NODELIST is compressed (gpu-[1-4]); scontrol show hostnames gives the names."""
    for line, word in _addresses(job):
        if re.match(r'"?\$\{?SLURM_(JOB_|STEP_)?NODELIST\}?"?(:|$)', word.source) and job.nodes != 1:
            yield Hit(
                line,
                "the list of nodes is compressed (gpu-[1-4]) and names no host",
                '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            )


@rule("nodes-array", "error", "an array of one node", source="man bash, Arrays; PyTorch's Slurm example")
def nodes_array(job: Job) -> Iterator[Hit]:
    """$nodes of an array is its first element, which ($nodes) copies. Of a text, ("$nodes") is one element."""
    arrays = {item.name for item in job.script.assignments if item.items is not None}
    lists = {
        item.name
        for item in job.script.assignments
        if item.value and re.search(r"scontrol\s+show\s+host", item.value.source)
    }
    for assignment in job.script.assignments:
        if assignment.items is None or len(assignment.items) != 1:
            continue
        source = assignment.items[0].source
        found = re.fullmatch(r'("?)\$\{?(\w+)\}?"?', source)
        if found and found[2] in arrays and found[2] != assignment.name:
            yield Hit(
                assignment.line,
                f"${found[2]} is the first element of the array: {assignment.name} gets one node",
                f'{assignment.name}=("${{{found[2]}[@]}}")',
            )
        elif found and found[1] and found[2] in lists - arrays:
            yield Hit(
                assignment.line,
                f"{source} is one word, with all nodes in it",
                f'mapfile -t {assignment.name} < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
            )


@rule(
    "gpu-count",
    "warning",
    "SLURM_GPUS_PER_NODE may be no number",
    source="Slurm, man sbatch, OUTPUT ENVIRONMENT",
)
def gpu_count(job: Job) -> Iterator[Hit]:
    """SLURM_GPUS_PER_NODE is what --gpus-per-node says, "h100:8" included, and unset with --gres.

    SLURM_GPUS_ON_NODE is always a number.
    """
    if not job.script.is_batch or re.fullmatch(r"\d+", job.script.options.get("gpus-per-node", "")):
        return
    if "gpus-per-node" not in job.script.options and "gres" not in job.script.options:
        return
    given = job.script.options.get("gpus-per-node")
    reason = (
        f"SLURM_GPUS_PER_NODE is {given}, not a number"
        if given
        else "--gres leaves SLURM_GPUS_PER_NODE unset"
    )
    lines = {use.line for use in job.script.uses if use.name == "SLURM_GPUS_PER_NODE"}
    lines |= {use.line for use in job.script.arithmetic if use.name == "SLURM_GPUS_PER_NODE"}
    for line in sorted(lines):
        yield Hit(line, reason, "SLURM_GPUS_ON_NODE")


@rule("world-size", "error", "WORLD_SIZE is not the number of ranks", source="torch.distributed")
def world_size(job: Job) -> Iterator[Hit]:
    """With too large a WORLD_SIZE the ranks wait for others that never come; with too small a one they clash."""
    direct = [launch for launch in job.trainings if launch.launcher == "python" and launch.step]
    for assignment in job.script.settings("WORLD_SIZE"):
        number = assignment.value.number if assignment.value else None
        for launch in direct:
            world = job.world_size(launch)
            if number and world and world[0] * world[1] != number and not assignment.conditional:
                yield Hit(
                    assignment.line,
                    f"WORLD_SIZE is {number}, and srun starts {world[0]} x {world[1]} = {world[0] * world[1]} ranks",
                    "WORLD_SIZE=$SLURM_NTASKS",
                )


# ---- what becomes of a failure ----

_CHECKS = re.compile(
    r"health|preflight|node[_-]?check|(^|[/_-])nhc([_.-]|$)|dcgmi$|gpu[_-]?check", re.IGNORECASE
)


@rule("check-ignored", "warning", "a health check's verdict is thrown away")
def check_ignored(job: Job) -> Iterator[Hit]:
    """A check whose exit status nobody reads lets the job run on the bad node that it found."""
    for command in job.script.commands:
        words = [word.text for word in command.words if not word.text.startswith("-")]
        named = [text for text in words[:1] if _CHECKS.search(text)]
        if words[:1] and words[0].rpartition("/")[2] in (
            "bash",
            "sh",
            "srun",
            "python",
            "python3",
            "timeout",
            "source",
            ".",
        ):
            named += [
                text
                for text in words[1:4]
                if re.search(r"\.(sh|py)$|^[\w/.-]+$", text) and _CHECKS.search(text)
            ]
        if not named or command.function:
            continue
        lost = command.status == "ignored" or (
            command.status == "piped" and "pipefail" not in job.script.shell_options
        )
        stops = "errexit" in job.script.shell_options
        if lost or (command.status == "plain" and not stops):
            yield Hit(
                command.line, f"nothing looks at the exit status of {named[0]}", f"{named[0]} || exit 1"
            )


@rule("failure-in-pipe", "warning", "a failed training looks like a success", source="man bash, Pipelines")
def failure_in_pipe(job: Job) -> Iterator[Hit]:
    """The status of `srun ... | tee log` is tee's: the job ends as COMPLETED whatever became of the training."""
    if "pipefail" in job.script.shell_options:
        return
    working = {id(step.command) for step in job.work_steps} | {id(launch.command) for launch in job.trainings}
    for command in job.script.commands:
        if id(command) in working and command.status == "piped" and command.outer is None:
            yield Hit(command.line, "the pipe hides the exit status of this command", "set -o pipefail")


@rule("failure-hidden", "warning", "a failed training looks like a success", source="Slurm, man sbatch")
def failure_hidden(job: Job) -> Iterator[Hit]:
    """The job's state is the status of the script's last command: `echo done` after srun makes it COMPLETED.

    Jobs that wait for its success (afterok) then start on nothing.
    """
    if not job.script.is_batch or {"errexit"} & job.script.shell_options or not job.work_steps:
        return
    step = job.work_steps[-1]
    command = step.command
    later = [item for item in job.script.commands if item.line > command.end and not item.function]
    exits = [item for item in later if item.name == "exit" and len(item.words) > 1]
    if command.status != "plain" or command.function or command.outer is not None or step.background:
        return
    if command.conditional or not later or any(word.variables for item in exits for word in item.words):
        return
    yield Hit(
        command.line,
        f"the job ends with the status of line {later[-1].line}, not of this step",
        "srun ... || exit, or set -e",
    )


@rule("launch-twice", "note", "srun within srun")
def launch_twice(job: Job) -> Iterator[Hit]:
    """srun in the text of `srun bash -c` starts a step from every task."""
    for step in job.steps:
        outer = step.command.outer
        if outer is not None and job.script.commands[outer].name == "srun":
            yield Hit(step.line, "every task of the outer srun starts a step of its own", "call srun once")
