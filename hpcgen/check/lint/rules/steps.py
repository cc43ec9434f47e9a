"""How srun starts the work, what the batch shell finds, and how the end of the work is noticed."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from hpcgen.check.lint.job import Job
from hpcgen.check.lint.rule import Hit, rule
from hpcgen.check.lint.script import Assignment, Command
from hpcgen.check.lint.words import Word

SHORT_JOB_S = 600
"""Time limit of a job in which nobody loses much by waiting."""


@rule(
    "no-kill-on-bad-exit",
    "warning",
    "one dead rank leaves the others waiting",
    source="Slurm, man srun, --kill-on-bad-exit; slurm.conf, KillOnBadExit",
)
def no_kill_on_bad_exit(job: Job) -> Iterator[Hit]:
    """When one task dies, the others wait for it in a collective until a timeout, or until the job's limit.

    --kill-on-bad-exit=1 (-K) ends the step at once. A job that --time ends within ten minutes is not reported.
    """
    limit_s = job.time_limit_s
    if job.exported("SLURM_KILL_BAD_EXIT") or (limit_s is not None and limit_s <= SHORT_JOB_S):
        return
    talks = job.script.settings("MASTER_ADDR") or any(
        item.name.startswith("NCCL_") for item in job.script.exports
    )
    # the tasks of a program that is not known wait for each other where the script says how they meet
    others = [step for step in job.parallel_steps if step not in job.work_steps] if talks else []
    for step in (*job.work_steps, *others):
        tasks = job.num_tasks(step)
        many = tasks > 1 if tasks else job.has_many_tasks(step) or job.may_be_multi_node
        if many and not step.option("kill-on-bad-exit") and not step.is_open:
            yield Hit(
                step.line,
                "when one task fails, the others wait for it until a timeout or the time limit",
                "srun --kill-on-bad-exit=1",
            )


@rule(
    "cpus-not-inherited",
    "note",
    "tasks may get one CPU",
    source="Slurm, RELEASE_NOTES of 22.05; CHANGELOG/slurm-23.11.md, which takes it back",
    slurm=("22.05", "23.02"),
)
def cpus_not_inherited(job: Job) -> Iterator[Hit]:
    """In Slurm 22.05 and 23.02, srun does not take --cpus-per-task from the job.

    Where tasks are bound to cores, each gets one CPU: by --cpu-bind=cores, by --exact, by --hint=nomultithread, or by
    TaskPluginParam=Autobind of the cluster. Otherwise the tasks share all CPUs of the job.

    Without --slurm-version, only srun that itself has --exact, --hint=nomultithread, --cpu-bind=cores or
    --cpu-bind=threads is reported, as a note. With it, that is a warning, and any other srun a note.

    Slurm 23.11 takes the number from SLURM_CPUS_PER_TASK again, as releases before 22.05 did.
    """
    cpus = job.number("cpus-per-task")
    if not cpus or cpus == 1 or job.exported("SRUN_CPUS_PER_TASK"):
        return
    for step in job.work_steps:
        binding = step.option("cpu-bind")
        is_bound = binding is not None and "mask" in binding.text
        by_cores = binding is not None and re.search(r"\b(cores|threads)\b", binding.text)
        hint = step.option("hint")
        binds = step.option("exact") or by_cores or (hint is not None and hint.text == "nomultithread")
        if (
            not is_bound
            and not step.option("cpus-per-task", "exclusive", "cpus-per-gpu")
            and not step.is_open
        ):
            yield Hit(
                step.line,
                f"srun of Slurm 22.05 and 23.02 ignores --cpus-per-task={cpus} of the job: where tasks are bound to "
                "cores (--cpu-bind=cores, --exact, --hint=nomultithread, Autobind), each gets one CPU",
                f"srun --cpus-per-task={cpus}",
                severity="warning" if binds else None,
                needs_release=not binds,
            )


@rule(
    "step-tasks",
    "warning",
    "srun ignores its --ntasks-per-node",
    source='Slurm, src/srun/opt.c, "can\'t honor --ntasks-per-node"; measured on 22.05',
)
def step_tasks(job: Job) -> Iterator[Hit]:
    """In a job whose directives set the tasks, --ntasks-per-node on srun alone changes nothing.

    srun warns, and starts the tasks of the job. --ntasks beside it decides.
    """
    for step in job.work_steps:
        option = step.option("ntasks-per-node")
        wanted = option.value.number if option and option.value else None
        has = job.tasks_per_node(step)
        # with --nodes, newer releases honor it
        decided = not job.sets_tasks or step.option("ntasks", "nodes")
        if option and wanted and has and wanted != has and not decided:
            yield Hit(
                option.word.line,
                f"srun ignores --ntasks-per-node={wanted} and starts the job's {has} per node",
                f"srun --ntasks=$((SLURM_NNODES * {wanted})) --ntasks-per-node={wanted}",
            )


@rule("kill-srun", "warning", "killing srun kills the tasks at once", source="measured on Slurm 22.05")
def kill_srun(job: Job) -> Iterator[Hit]:
    """srun answers SIGTERM, SIGHUP and SIGINT by killing every task with SIGKILL: a training saves nothing.

    It forwards SIGUSR1 and SIGUSR2 to the tasks of all nodes. Other programs, such as servers, are not reported.
    """
    pids = _pids_of_trainings(job)
    handlers = {
        command.words[1].text: command.words[2:]
        for command in job.script.commands
        if command.name == "trap" and len(command.words) > 2
    }
    for command in job.script.commands:
        at_exit = all(word.text in ("EXIT", "0") for word in handlers.get(command.function, ()))
        if command.name == "kill" and not (command.function and at_exit):
            options = [word.text for word in command.words[1:] if word.text.startswith("-")]
            kills = _is_deadly(options) and any(pids & set(word.variables) for word in command.words)
        else:
            at_exit = all(word.text in ("EXIT", "0") for word in command.words[2:])
            kills = command.name == "trap" and not at_exit and _kills_in_trap(command, pids)
        if kills:
            yield Hit(
                command.line,
                "this signal makes srun kill the training with SIGKILL, before it can save",
                "kill -USR2 to the srun, which forwards it",
            )


def _pids_of_trainings(job: Job) -> set[str]:
    """Variables with the process id of an srun that trains."""
    training = {id(launch.step.command) for launch in job.trainings if launch.step}
    starts = {(command.line, False) for command in job.script.commands if command.background}
    for step in job.steps:
        if step.background:
            starts -= {(step.line, False)}
            starts.add((step.line, id(step.command) in training))
    pids = set()
    for assignment in job.script.assignments:
        before = sorted(start for start in starts if start[0] <= assignment.line)
        is_pid = assignment.value and assignment.value.source.strip('"') in ("$!", "${!}")
        if is_pid and before and before[-1][1]:
            pids.add(assignment.name)
    return pids


def _kills_in_trap(command: Command, pids: set[str]) -> bool:
    return any(
        found[2] in pids and _is_deadly(found[1].split())
        for found in re.finditer(r"\bkill\s+((?:-\S+\s+)*)[\"']?\$\{?(\w+|!)", command.words[1].text)
    )


def _is_deadly(options: list[str]) -> bool:
    """Whether kill with these options sends TERM, HUP or INT; TERM without any."""
    text = " ".join(options).upper().replace("SIG", "")
    return not options or bool(re.fullmatch(r"-(S )?(TERM|HUP|INT|15|1|2)( --)?", text))


_AT_ONCE = frozenset((
    "echo", "printf", "date", "exit", "true", ":", "cd", "export", "set", "unset", "trap", "touch", "mkdir",
    "hostname", "declare", "readonly",
))  # fmt: skip
"""Commands that end at once."""


@rule("no-wait", "error", "the script does not wait for its step", source="man bash, JOB CONTROL")
def no_wait(job: Job) -> Iterator[Hit]:
    """A batch script that ends takes its steps along: srun in the background needs a wait.

    Only reported where everything after the step ends at once. A loop or another program may be the wait.
    """
    for step in job.work_steps:
        command = step.command
        after = next(
            (job.script.commands[i + 1 :] for i, found in enumerate(job.script.commands) if found is command),
            (),
        )
        may_not_run = command.function or (command.conditional and not command.in_loop)
        if step.background and not may_not_run and all(found.name in _AT_ONCE for found in after):
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


@rule(
    "step-outside-srun", "error", "one node of many runs the program", source="Slurm, man sbatch, DESCRIPTION"
)
def step_outside_srun(job: Job) -> Iterator[Hit]:
    """A batch script runs on the first node alone. srun starts a program on all of them.

    Launchers that reach the other nodes themselves, such as mpirun or deepspeed, are not reported.
    """
    nodes = job.nodes or 0
    through = {
        "srun", "mpirun", "mpiexec", "orterun", "prun", "horovodrun", "pdsh", "clush", "ssh", "ray", "parallel-ssh",
        "parallel", "jsrun", "aprun", "ibrun", "source", ".",
    }  # fmt: skip
    if nodes < 2 or any(command.name in through for command in job.script.commands) or job.steps:
        return
    for launch in job.trainings:
        is_certain = launch.command.words[0].certain and not launch.command.conditional
        if launch.launcher in ("torchrun", "accelerate", "python") and is_certain:
            yield Hit(
                launch.line,
                f"without srun, {launch.launcher} runs on the first of the {nodes} nodes only",
                "start it with srun",
            )


@rule(
    "too-many-agents",
    "error",
    "every task starts all ranks of its node",
    source="PyTorch, torch/distributed/run.py, --nproc-per-node",
)
def too_many_agents(job: Job) -> Iterator[Hit]:
    """torchrun starts the ranks of a node itself, so a node needs one task: eight tasks of it start 64 ranks.

    srun needs --ntasks for that: its --ntasks-per-node=1 alone is ignored in a job of eight tasks a node.
    """
    for launch in job.launches:
        ranks = launch.option("nproc-per-node")
        if launch.launcher != "torchrun" or launch.step is None or not ranks or ranks.text in ("1", ""):
            continue
        tasks = job.tasks_per_node(launch.step)
        if tasks and tasks > 1 and not launch.step.is_open:
            yield Hit(
                launch.line,
                f"each of the {tasks} tasks of a node is a torchrun that starts {ranks.text} ranks",
                'srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 torchrun, or python without torchrun',
            )


# ---- what the batch shell finds ----


@rule(
    "script-directory",
    "error",
    "the script is not where it was",
    source="Slurm, slurm.conf, SlurmdSpoolDir; measured on 22.05",
)
def script_directory(job: Job) -> Iterator[Hit]:
    """sbatch copies the script: $0 and ${BASH_SOURCE[0]} lie in a directory of slurmd's, with nothing else in it.

    SLURM_SUBMIT_DIR is where sbatch was called; `scontrol show job` has the script's path.
    """
    if not job.script.is_batch or any(map(_submits_or_asks, job.script.commands)):
        return
    holders = _own_directories(job)
    made = {item.line for item in job.script.assignments}
    for command in job.script.commands:
        if command.name in ("echo", "printf") or command.status == "substituted" or command.conditional:
            continue
        if command.name == "cd" and command.line in made:
            continue  # in NAME=$(cd ... && pwd): what counts is where NAME is used
        if _OTHER_WAY.search(job.script.lines[command.line - 1]):
            continue
        for word in command.words:
            name = next((name for name in word.variables if name in holders), "")
            if name or _is_own_directory(word):
                yield Hit(
                    holders.get(name, word.line),
                    "sbatch copies the script into a directory of slurmd's, where no other file is",
                    '"$SLURM_SUBMIT_DIR", or an absolute path',
                )
                return


def _own_directories(job: Job) -> dict[str, int]:
    """Variables that certainly hold the script's directory or a path from there, and the lines of `dirname`."""
    settings = Counter(item.name for item in job.script.assignments)
    holders: dict[str, int] = {}
    for item in job.script.assignments:
        if item.value is None or item.conditional or settings[item.name] > 1:
            continue
        if _is_own_directory(item.value):
            holders[item.name] = item.line
        elif not _OTHER_WAY.search(item.value.source):
            for name in re.findall(r"\$\{?(\w+)\}?", item.value.source):
                if name in holders:
                    holders[item.name] = holders[name]
    return holders


def _submits_or_asks(command: Command) -> bool:
    """Whether a command submits a job, or asks Slurm for the script's path."""
    if command.name in ("echo", "printf"):
        return False
    texts = [word.text for word in command.words]
    asks = command.name == "scontrol" and any(re.match(r"job(s|id)?\b", text) for text in texts)
    if command.name in ("bash", "eval", "sh", "ssh", "xargs") and re.search(r"\bsbatch\b", " ".join(texts)):
        return True
    return asks or any(re.match(r"(\S*/)?sbatch(\s|$)", text) for text in texts)


def _is_own_directory(word: Word) -> bool:
    """Whether a word is made from the directory of the script, without another way."""
    own = r"dirname\s+(--\s+)?\"?(\$0|\$\{0\}|\$\{?BASH_SOURCE(\[0\])?\}?)"
    return bool(re.search(own, word.source)) and not _OTHER_WAY.search(word.source)


_OTHER_WAY = re.compile(r"\$\{\w+:?-|SLURM_")
"""In ${SLURM_SUBMIT_DIR:-$(cd "$(dirname "$0")" && pwd)}, the script's directory is for runs outside of Slurm."""


_DIRECTORIES = (
    "save",
    "load",
    "output-dir",
    "save-dir",
    "checkpoint-dir",
    "ckpt-dir",
    "run-dir",
    "work-dir",
    "resume",
)
"""Options of trainings that name where checkpoints are."""


@rule(
    "directory-by-date",
    "warning",
    "a requeued job looks for its checkpoints elsewhere",
    source="Slurm, man sbatch, --requeue",
)
def directory_by_date(job: Job) -> Iterator[Hit]:
    """A requeued job runs the script again: $(date) gives another directory, without the checkpoints.

    SLURM_JOB_ID stays the same.
    """
    for launch in job.trainings if job.requeues else ():
        for name, flag in launch.flags.items():
            word = flag.value
            if name.replace("_", "-") in _DIRECTORIES and word and re.search(r"(\$\(|`)date\b", word.text):
                yield Hit(
                    word.line,
                    f"--{name} contains the date: a requeued job starts in another directory, without checkpoints",
                    "$SLURM_JOB_ID in place of the date",
                    cause="date",
                )


@rule(
    "few-gpus",
    "warning",
    "GPUs stay idle",
    source="CUDA, CUDA_VISIBLE_DEVICES; Slurm, gres.html, GPU Management",
)
def few_gpus(job: Job) -> Iterator[Hit]:
    """CUDA_VISIBLE_DEVICES=0,1 hides the other GPUs that the job has asked for. Slurm sets it to all of them.

    Where Slurm manages the GPUs, srun overrides the value in each step, and the line only misleads its readers.
    """
    gpus, name = job.gpus_per_node, "CUDA_VISIBLE_DEVICES"
    if not gpus or not job.trainings:
        return
    settings = [
        item
        for item in job.script.settings(name)
        if not item.conditional and not item.function and item.outer is None
    ]
    for setting in settings:
        visible = _devices(setting)
        if 0 < len(visible) < gpus:
            why = f"the job asks for {gpus} GPUs of a node, and uses {len(visible)}"
            if all(launch.step for launch in job.trainings):
                why = (
                    f"the job asks for {gpus} GPUs of a node, and this names {len(visible)} of them: the others are "
                    "idle, unless Slurm manages the GPUs and srun overrides the variable"
                )
            yield Hit(setting.line, why, "remove it, or ask for fewer")
    own = [
        item
        for launch in job.trainings
        for item in launch.command.environment
        if item.name == name and launch.step is None
    ]
    used = set().union(*map(_devices, own))
    if not settings and len(own) == len(job.trainings) and all(map(_devices, own)) and len(used) < gpus:
        yield Hit(
            own[0].line,
            f"the job asks for {gpus} GPUs of a node, and uses {len(used)}",
            "remove it, or ask for fewer",
        )


def _devices(setting: Assignment) -> set[str]:
    """The GPUs that a list of indices names; none where it is not known."""
    word = setting.value
    is_list = word is not None and word.known and word.certain and re.fullmatch(r"\d+(,\d+)*", word.text)
    return set(word.text.split(",")) if word and is_list else set()


@rule(
    "resubmits-itself",
    "warning",
    "a job that fails resubmits itself for ever",
    source="Slurm, man sbatch, --dependency",
)
def resubmits_itself(job: Job) -> Iterator[Hit]:
    """A script that submits itself before its work does so again when the work ends at once.

    After the work, and only when it has made progress, the chain ends by itself; afterok ends it at a failure.
    """
    lines = [launch.line for launch in job.launches] + [step.line for step in job.parallel_steps]
    last = max(lines, default=0)
    for command in job.script.commands:
        texts = [word.text for word in command.words[1:]]
        own = any(map(_is_own_path, command.words[1:])) or _own_name(job, command) in texts
        is_always = not command.conditional and not command.function and command.line < last
        if command.name == "sbatch" and own and is_always and not any("afterok" in text for text in texts):
            yield Hit(
                command.line,
                "the script submits itself before its work: work that fails at once does so for ever",
                "submit after the work, and only when it has made progress",
            )


def _is_own_path(word: Word) -> bool:
    return bool(re.search(r"^\"?(\$0|\$\{0\}|\$\{?BASH_SOURCE)", word.source))


def _own_name(job: Job, command: Command) -> str | None:
    """The name that the script's file has for a command; None where that may be another file.

    After a cd it is the script's when the job's name ends with it.
    """
    name = job.script.path.rpartition("/")[2]
    moves = any(found.name in ("cd", "pushd") and found.line <= command.line for found in job.script.commands)
    stem = name.partition(".")[0]
    is_job = bool(stem) and job.script.options.get("job-name", "").endswith(stem)
    return name if job.script.is_batch and name != "-" and (is_job or not moves) else None


# ---- what becomes of a failure ----

_CHECKS = re.compile(r"health|preflight|node[_-]?check|(^|[/_-])nhc([_.-]|$)|gpu[_-]?check", re.IGNORECASE)
_RUNNERS = ("bash", "sh", "srun", "python", "python3", "timeout", "source", ".")


@rule("check-ignored", "warning", "a health check's verdict is thrown away", source="man bash, Lists")
def check_ignored(job: Job) -> Iterator[Hit]:
    """A check whose exit status nobody reads lets the job run on the bad node that it found."""
    last = job.script.commands[-1] if job.script.commands else None
    for command in job.script.commands:
        check = _check(command)
        if command is last or command.function or command.outer is not None or not check:
            continue
        lost = command.status == "ignored" or (
            command.status == "piped" and "pipefail" not in job.script.shell_options
        )
        stops = "errexit" in job.script.shell_options
        if lost or (command.status == "plain" and not stops):
            yield Hit(command.line, f"the job goes on when `{check}` fails", f"{check} || exit 1")


def _check(command: Command) -> str:
    """The health check that a command is, up to the name that says so; "" for another command."""
    texts = [word.text for word in command.words]
    if command.name == "dcgmi":
        return " ".join(texts) if texts[1:2] == ["diag"] else ""
    for index, text in enumerate(texts[:5] if command.name in _RUNNERS else texts[:1]):
        if _CHECKS.search(text) and re.search(r"^[\w/.$-]+$", text) and not text.startswith("-"):
            return " ".join(texts[: index + 1])
    return ""


@rule("failure-in-pipe", "warning", "a failed training looks like a success", source="man bash, Pipelines")
def failure_in_pipe(job: Job) -> Iterator[Hit]:
    """The status of `srun ... | tee log` is tee's: the job ends as COMPLETED whatever became of the training."""
    if "pipefail" in job.script.shell_options:
        return
    # what another program than tee reads may be an answer of the nodes
    pipelines = [pipeline for pipeline in job.script.pipelines if pipeline[-1].name == "tee"]
    logged = {id(command) for pipeline in pipelines for command in pipeline}
    parallel = {id(step.command) for step in job.parallel_steps if step not in job.work_steps}
    working = {id(command) for command in job.work} - parallel | parallel & logged
    read = max((use.line for use in job.script.uses if use.name == "PIPESTATUS"), default=0)
    for command in job.script.commands:
        if id(command) in working and command.status == "piped" and read < command.end:
            yield Hit(
                command.line,
                "the job succeeds when this fails: the pipe has the status of its last command",
                "set -o pipefail",
            )


@rule(
    "failure-hidden",
    "warning",
    "a failed training looks like a success",
    source="Slurm, Job Exit Codes (job_exit_code.html)",
)
def failure_hidden(job: Job) -> Iterator[Hit]:
    """The job's state is the status of the script's last command: `echo done` after srun makes it COMPLETED.

    Jobs that wait for its success (afterok) then start on nothing. So does a step with the text of its `bash -c`.
    """
    yield from _hidden_in_step(job)
    if not job.script.is_batch or {"errexit"} & job.script.shell_options or not job.work:
        return
    command = job.work[-1]
    later = [item for item in job.script.commands if item.line > command.end and not item.function]
    exits = [item for item in later if item.name == "exit" and len(item.words) > 1]
    if command.status != "plain" or command.function or command.background:
        return
    if any(step.background for step in job.steps if step.command is command):
        return
    if command.conditional or not later or any(word.variables for item in exits for word in item.words):
        return
    if later[0].name == "exit" and later[0] not in exits:
        return  # with the status of the command before it
    if any(item.name == "trap" and item.words[-1].text == "ERR" for item in job.script.commands):
        return
    yield Hit(
        command.line,
        f"the job ends with the status of line {later[-1].line}, so a failure here goes unnoticed",
        f"{command.name} ... || exit, or set -e",
    )


def _hidden_in_step(job: Job) -> Iterator[Hit]:
    """Trainings in the text of `srun bash -c` after which another command gives the step its status."""
    commands = job.script.commands
    for launch in job.launches:
        number = launch.command.outer
        outer = None if number is None or not launch.trains else commands[number]
        if (
            outer is None
            or outer.name != "srun"
            or launch.command.status != "plain"
            or launch.command.background
        ):
            continue
        inner = [item for item in commands if item.outer == number]
        if launch.command.conditional != outer.conditional or _stops_at_failure(outer, inner):
            continue
        at = next(index for index, item in enumerate(inner) if item is launch.command)
        later = [item for item in inner[at + 1 :] if item.statement != launch.command.statement]
        exits = [item for item in later if item.name in ("exit", "exec", "wait", "trap")]
        if later and not exits:
            program, last = launch.program.rpartition("/")[2], later[-1]
            program = program if re.fullmatch(r"[\w.-]+", program) else launch.launcher
            # in a text with variables or continued lines, all commands have one line
            lines = (
                [f" (line {line})" for line in (launch.line, last.line)]
                if last.line > launch.line
                else [""] * 2
            )
            yield Hit(
                launch.line,
                f"a failure of `{program}`{lines[0]} goes unnoticed: the step ends with the status of "
                f"`{last.name}`{lines[1]}",
                "set -e at the start of the text",
                cause=f"step {number}",
            )


def _stops_at_failure(outer: Command, inner: Sequence[Command]) -> bool:
    """Whether the shell of a `bash -c` ends at the first failure."""
    texts = [word.text for word in outer.words]
    shell = next(index for index, text in enumerate(texts) if re.search(r"(^|/)\w*sh$", text))
    options = itertools.takewhile(lambda text: text.startswith("-"), texts[shell + 1 :])
    sets = [word.text for item in inner if item.name == "set" for word in item.words[1:]]
    return any(text == "errexit" or re.fullmatch(r"-[a-z]*e[a-z]*", text) for text in (*options, *sets))


@rule("launch-twice", "note", "srun within srun", source="Slurm, man srun, DESCRIPTION")
def launch_twice(job: Job) -> Iterator[Hit]:
    """srun in the text of `srun bash -c` starts a step from every task."""
    for step in job.steps:
        outer = step.command.outer
        if outer is not None and job.script.commands[outer].name == "srun":
            yield Hit(step.line, "every task of the outer srun starts a step of its own", "call srun once")
