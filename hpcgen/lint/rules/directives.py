"""What the #SBATCH lines say, and what sbatch makes of it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from hpcgen.lint.job import Job
from hpcgen.lint.rule import Hit, rule
from hpcgen.lint.sbatch import (
    MOVED_OPTIONS,
    SBATCH_OPTIONS,
    SBATCH_OPTIONS_OF_SOME,
    SRUN_OPTIONS,
    Directive,
    first_command,
    matching_options,
)
from hpcgen.wording import counted

SBATCH = "Slurm, man sbatch"
MIN_SIGNAL_LEAD_S = 60
MIN_CPUS_PER_GPU = 4
DEFAULT_MAX_ARRAY_INDEX = 1000
SIMILARITY = 0.8
"""Of a misspelt option to the right one, as difflib counts it."""


@rule("directive-after-command", "error", "sbatch does not see a directive", source=SBATCH)
def directive_after_command(job: Job) -> Iterator[Hit]:
    """sbatch stops reading at the first line that is neither blank nor a comment: `set -e` or `module load`.

    Every directive below it is a comment: the job starts without its nodes, its GPUs or its time limit.
    """
    end = first_command(job.script.lines)
    for directive in job.script.directives:
        if not directive.effective:
            yield Hit(
                directive.line,
                f"sbatch stops reading at the first command, on line {end}: --{directive.name} has no effect",
                f"move it above line {end}",
            )


@rule(
    "directive-unknown",
    "error",
    "sbatch refuses an option",
    source="Slurm 22.05 to 25.11, src/common/slurm_opt.c",
)
def directive_unknown(job: Job) -> Iterator[Hit]:
    """sbatch ends with "unrecognized option", and there is no job. Options of srun are none of sbatch's.

    The beginning of a name is taken where it can be one option only.
    """
    for directive in _unknown(job):
        name, matching = directive.name, matching_options(directive.name)
        written = f"--{name}" if len(name) > 1 else f"-{name}"
        right = MOVED_OPTIONS.get(name) or _similar(name)
        if name in SRUN_OPTIONS:
            yield Hit(directive.line, f"{written} is srun's, and sbatch refuses it", "give it to srun")
        elif right:
            yield Hit(directive.line, f"sbatch has no {written}", f"did you mean --{right}?")
        elif matching:
            several = ", ".join(f"--{option}" for option in matching)
            yield Hit(
                directive.line, f"{written} can be {several}: sbatch refuses it", "write the whole name"
            )
        elif len(name) == 1:
            yield Hit(directive.line, f"sbatch has no {written}", "look it up: man sbatch")


@rule("directive-plugin", "note", "an option that sbatch itself does not have", source=SBATCH)
def directive_plugin(job: Job) -> Iterator[Hit]:
    """No release has it, nor one like it: a plugin (SPANK) may; without one sbatch refuses the script."""
    for directive in _unknown(job):
        name = directive.name
        is_like = name in SRUN_OPTIONS or name in MOVED_OPTIONS or _similar(name) or matching_options(name)
        if len(name) > 1 and not is_like:
            yield Hit(directive.line, f"--{name} is no option of sbatch", "make sure that a plugin has it")


def _unknown(job: Job) -> Iterator[Directive]:
    """Directives in effect that sbatch and pyxis do not have."""
    for directive in job.script.directives:
        is_pyxis = directive.name.startswith(("container-", "no-container-"))
        if directive.effective and not is_pyxis and matching_options(directive.name) != (directive.name,):
            yield directive


def _similar(name: str) -> str | None:
    """The option that a misspelt one was meant to be."""
    if len(name) == 1 or matching_options(name):
        return None
    known = SBATCH_OPTIONS | SBATCH_OPTIONS_OF_SOME
    return next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=SIMILARITY)), None)


@rule("directive-spelling", "warning", "a line looks like a directive and is none", source=SBATCH)
def directive_spelling(job: Job) -> Iterator[Hit]:
    """Only `#SBATCH` in capitals at the very beginning of a line is a directive; the rest are comments.

    `##SBATCH` and `# SBATCH`, which people write to turn a directive off, are not reported.
    """
    for number, line in enumerate(job.script.lines[: first_command(job.script.lines) - 1], start=1):
        found = re.match(r"(\s*)#(\w+)\s+-{1,2}[A-Za-z]", line)
        if not found or (found[1] == "" and found[2] == "SBATCH"):
            continue
        word = found[2].upper()
        is_meant = word == "SBATCH" or (
            sorted(word) == sorted("SBATCH") or word in ("SBATH", "SBACH", "SBATC")
        )
        if is_meant:
            yield Hit(
                number,
                f"{line.split()[0]!r} is a comment to sbatch",
                "write #SBATCH at the beginning of the line",
            )


@rule("directive-cut", "error", "an unquoted # cuts a directive", source="Slurm, src/sbatch/opt.c")
def directive_cut(job: Job) -> Iterator[Hit]:
    """In a directive an unquoted `#` begins a comment even within a word: nvcr.io#nvidia/pytorch becomes nvcr.io."""
    for directive in job.script.directives:
        if directive.cut:
            yield Hit(
                directive.line,
                f"sbatch takes {directive.cut} for a comment: --{directive.name} is only {directive.value}",
                "quote the value, or write \\#",
            )


@rule("directive-variable", "error", "a variable in a directive", source=SBATCH)
def directive_variable(job: Job) -> Iterator[Hit]:
    """sbatch reads directives before any shell does: $HOME is five letters. File names have %j, %N and %u instead."""
    for directive in job.script.directives:
        if directive.effective and (found := re.search(r"\$\{?\w+\}?|\$\(", directive.value or "")):
            yield Hit(
                directive.line,
                f"sbatch does not expand {found[0]} in --{directive.name}",
                "write the value, or give the option to sbatch on its command line",
            )


@rule("directive-twice", "warning", "a directive is given twice", source=SBATCH)
def directive_twice(job: Job) -> Iterator[Hit]:
    """Of an option given twice, the last one holds; the other misleads whoever reads the script."""
    if any(directive.name == "hetjob" for directive in job.script.directives):
        return
    seen: dict[str, tuple[int, str | None]] = {}
    for directive in job.script.directives:
        if not directive.effective:
            continue
        line, value = seen.get(directive.name, (0, directive.value))
        if value != directive.value:
            yield Hit(
                directive.line,
                f"--{directive.name} is {value} on line {line}, and {directive.value} here, which holds",
                "remove one of them",
            )
        seen[directive.name] = directive.line, directive.value


@rule("empty-script", "error", "sbatch refuses an empty script", source=SBATCH)
def empty_script(job: Job) -> Iterator[Hit]:
    """sbatch refuses a file of nothing but white space: most likely writing it has failed."""
    if not any(line.strip() for line in job.script.lines):
        yield Hit(1, "there is nothing in the script: sbatch refuses it", "write it again")


@rule("no-shebang", "error", "sbatch refuses the script", source=SBATCH)
def no_shebang(job: Job) -> Iterator[Hit]:
    """sbatch only takes a script whose first line is #! and an interpreter."""
    if job.script.is_batch and not job.script.lines[0].startswith("#!"):
        yield Hit(
            1,
            "the first line is not #! and an interpreter: sbatch refuses the script",
            "begin with #!/bin/bash",
        )


@rule("dos-line-ends", "error", "sbatch refuses the script", source=SBATCH)
def dos_line_ends(job: Job) -> Iterator[Hit]:
    """sbatch refuses scripts with the line ends of Windows, and bash takes the carriage return for a letter."""
    number = next(
        (index for index, line in enumerate(job.script.lines, start=1) if line.endswith("\r")), None
    )
    if number:
        yield Hit(number, "the line ends with a carriage return, as on Windows", "sed -i 's/\\r$//' SCRIPT")


@rule("no-time-limit", "warning", "the job has no time limit", source=SBATCH)
def no_time_limit(job: Job) -> Iterator[Hit]:
    """Without --time a job gets the partition's default: minutes on one cluster, without end on another.

    A limit lets Slurm start the job in gaps (backfill), and ends one that hangs.
    """
    if job.script.is_batch and not {"time", "time-min"} & job.script.options.keys():
        yield Hit(
            job.script.first_directive, "the job has no time limit of its own", "#SBATCH --time=1-00:00:00"
        )


def _signal(job: Job) -> tuple[str, str, int] | None:
    """--signal: its prefix ("B", "R", ""), the name of the signal, and the seconds before the limit."""
    value = job.script.options.get("signal")
    if value is None:
        return None
    prefix, _, rest = value.rpartition(":")
    name, _, lead = rest.partition("@")
    name = {"10": "USR1", "12": "USR2", "15": "TERM"}.get(name, name.upper().removeprefix("SIG"))
    return prefix.upper(), name, int(lead) if lead.isdigit() else MIN_SIGNAL_LEAD_S


@rule("no-signal", "warning", "training is not warned of the time limit", source=SBATCH)
def no_signal(job: Job) -> Iterator[Hit]:
    """At its limit a job gets SIGTERM and, 30 seconds later, SIGKILL: too late for a checkpoint.

    --signal=B:USR2@300 tells the batch script five minutes before, which can ask the training to save.
    """
    saves_itself = any("exit-duration-in-mins" in launch.flags for launch in job.trainings)
    if job.script.is_batch and job.trainings and "signal" not in job.script.options and not saves_itself:
        yield Hit(
            job.script.first_directive,
            "nothing warns the training before the time limit: what it did since the last checkpoint is lost",
            "#SBATCH --signal=B:USR2@300, and a trap that asks for a checkpoint",
        )


@rule("signal-to-steps", "warning", "the warning kills what it should warn", source="measured on Slurm 22.05")
def signal_to_steps(job: Job) -> Iterator[Hit]:
    """Without B: the signal goes to every process of every step. It kills what does not handle it.

    torchrun handles TERM, INT, HUP and QUIT alone; the shell of `srun bash -c` dies; so do data loader workers
    that were started by spawn.
    """
    signal = _signal(job)
    if signal is None or "B" in signal[0] or signal[1] in ("TERM", "CONT"):
        return
    for launch in job.trainings:
        if launch.launcher != "python" or launch.command.outer is not None:
            through = launch.launcher if launch.launcher != "python" else "the shell of bash -c"
            yield Hit(
                job.script.option_line("signal"),
                f"--signal without B: sends {signal[1]} to {through}, which dies of it",
                f"--signal=B:{signal[1]}@..., and a trap that forwards it or writes a file the training looks for",
            )
            return


@rule("signal-usr1", "warning", "NCCL catches SIGUSR1", source="NCCL")
def signal_usr1(job: Job) -> Iterator[Hit]:
    """NCCL installs a handler of its own for SIGUSR1: a warning by that signal may never reach the training."""
    signal = _signal(job)
    if signal and signal[1] == "USR1" and job.trainings and job.uses_gpus:
        yield Hit(job.script.option_line("signal"), "NCCL handles SIGUSR1 itself", "use USR2")


@rule("signal-not-trapped", "error", "the warning kills the batch script", source="measured on Slurm 22.05")
def signal_not_trapped(job: Job) -> Iterator[Hit]:
    """B: sends the signal to the batch shell alone. One without a trap dies of it, and the job ends early."""
    signal = _signal(job)
    if not signal or "B" not in signal[0]:
        return
    trapped = {
        word.text.upper().removeprefix("SIG")
        for command in job.script.commands
        if command.name == "trap"
        for word in command.words[2:]
    }
    replaced = any(
        command.words[0].text == "exec" for command in job.script.commands if len(command.words) > 1
    )
    if signal[1] not in trapped and not replaced and job.script.error is None:
        yield Hit(
            job.script.option_line("signal"),
            f"nothing traps {signal[1]}: the batch shell dies of it, {signal[2]} s before the limit",
            f"trap '...' {signal[1]}, with srun in the background and a wait after it",
        )


@rule(
    "signal-too-late",
    "warning",
    "the warning leaves no time for a checkpoint",
    source="measured on Slurm 22.05",
)
def signal_too_late(job: Job) -> Iterator[Hit]:
    """The running step must end and a checkpoint be written between the warning and the limit.

    Sixty seconds and twice the slowest step and save is a good lead; Slurm may send it ten seconds early.
    """
    signal = _signal(job)
    if signal and job.trainings and signal[2] < MIN_SIGNAL_LEAD_S:
        yield Hit(
            job.script.option_line("signal"),
            f"{signal[2]} s before the limit are too few to end a step and write a checkpoint",
            f"at least @{MIN_SIGNAL_LEAD_S}: 60 s + 2 x (slowest step + slowest save)",
        )


@rule("foreground-step", "error", "the trap runs only after the step", source="man bash, SIGNALS")
def foreground_step(job: Job) -> Iterator[Hit]:
    """bash runs a trap when the command in the foreground has ended: with srun there, that is too late.

    srun ... & and `wait` let the trap run at once.
    """
    signal = _signal(job)
    if not signal or "B" not in signal[0]:
        return
    for step in job.work_steps:
        if not step.background and step.command.outer is None and step.command.words[0].text != "exec":
            yield Hit(
                step.line,
                f"srun runs in the foreground: the trap for {signal[1]} runs when it is over",
                'srun ... & pid=$!, then: while kill -0 "$pid" 2>/dev/null; do wait "$pid"; done',
            )


@rule("log-truncated", "warning", "a requeued job loses its log", source=SBATCH)
def log_truncated(job: Job) -> Iterator[Hit]:
    """A requeued job keeps its number, so %j names the same file again, and Slurm truncates it by default."""
    requeues = "requeue" in job.script.options or any(
        command.name == "scontrol" and any(word.text == "requeue" for word in command.words)
        for command in job.script.commands
    )
    if requeues and job.script.is_batch and job.script.options.get("open-mode") != "append":
        yield Hit(
            job.script.option_line("requeue"),
            "when the job comes back from the queue, its log is truncated",
            "#SBATCH --open-mode=append",
        )


@rule("no-requeue", "note", "a lost node ends the job", source=SBATCH)
def no_requeue(job: Job) -> Iterator[Hit]:
    """With --requeue Slurm puts the job back into the queue when a node dies or another job preempts it.

    It does not cover a time limit or a failure: the script calls scontrol requeue for these. Many clusters
    requeue by default (JobRequeue=1); saying it keeps the job independent of that.
    """
    options = job.script.options
    if job.script.is_batch and job.trainings and not {"requeue", "no-requeue"} & options.keys():
        yield Hit(
            job.script.first_directive,
            "whether the job outlives a lost node is left to the cluster",
            "#SBATCH --requeue",
        )


@rule("log-shared", "warning", "jobs overwrite each other's log", source=SBATCH)
def log_shared(job: Job) -> Iterator[Hit]:
    """An output file without %j (%A for arrays) is the same for every job of the script: the next one truncates it.

    %x, %u and %N are the same again in the next job of that name, user or node.
    """
    for name in ("output", "error"):
        value = job.script.options.get(name, "")
        appends = job.script.options.get("open-mode") == "append"
        has_job = re.search(r"%\d*[AJj]", value.replace("%%", ""))
        if value and not has_job and not value.startswith("/dev/") and not appends:
            yield Hit(
                job.script.option_line(name),
                f"every job of this script writes to {value}",
                "put %j into the name",
            )


@rule("log-name", "note", "the job's name decides where the log goes", source=SBATCH)
def log_name(job: Job) -> Iterator[Hit]:
    """%x is the job's name, which the command line may set to anything: a / in it names another directory."""
    for name in ("output", "error"):
        if "%x" in job.script.options.get(name, ""):
            yield Hit(
                job.script.option_line(name), f"%x in --{name} puts the job's name into a path", "use %j"
            )


@rule("log-directory", "note", "the log's directory may be missing", source=SBATCH)
def log_directory(job: Job) -> Iterator[Hit]:
    """Slurm opens the log before the script runs, in the directory sbatch was called from.

    When the directory is not there, the job ends at once and leaves no log that says why: mkdir in the script
    comes too late.
    """
    for name in ("output", "error"):
        value = job.script.options.get(name, "")
        if "/" in value and not value.startswith(("/", "./")) and "$" not in value:
            yield Hit(
                job.script.option_line(name),
                f"{value} begins where sbatch is called, and its directory must be there before the job starts",
                "use an absolute path, and make the directory first",
            )


@rule(
    "few-cpus",
    "warning",
    "too few CPUs for the GPUs",
    source="Azure's GPT-3 175B example, 8 CPUs for 8 ranks",
)
def few_cpus(job: Job) -> Iterator[Hit]:
    """Each GPU's process launches kernels, and has data loader and NCCL threads: one CPU starves the GPU.

    Nodes of eight GPUs have about a hundred CPUs; --cpus-per-task=12 with eight tasks uses 96 of them. Without
    --cpus-per-task a task gets one.
    """
    gpus, tasks = job.gpus_per_node, job.ntasks_per_node
    if not job.script.is_batch or not gpus or not tasks or not job.trainings:
        return
    given = job.number("cpus-per-task")
    if given is None and ("exclusive" in job.script.options or "cpus-per-gpu" in job.script.options):
        return
    cpus = (given or 1) * tasks
    if cpus < MIN_CPUS_PER_GPU * gpus:
        yield Hit(
            job.script.option_line("cpus-per-task"),
            f"{tasks} x {given or 1} = {cpus} CPUs of a node are for {gpus} GPUs",
            "ask for all CPUs of the node, shared out over the tasks (12 each on a node of 96 with 8 tasks)",
        )


@rule("not-exclusive", "note", "other jobs may share the nodes", source=SBATCH)
def not_exclusive(job: Job) -> Iterator[Hit]:
    """A job with all eight GPUs of a node may still share its CPUs, memory and network with others."""
    if job.script.is_batch and (job.gpus_per_node or 0) >= 8 and "exclusive" not in job.script.options:
        yield Hit(
            job.script.first_directive,
            "the job takes all GPUs of its nodes, and other jobs may use the rest",
            "#SBATCH --exclusive",
        )


@rule("exclusive-memory", "note", "exclusive nodes, but not their memory", source="measured on Slurm 22.05")
def exclusive_memory(job: Job) -> Iterator[Hit]:
    """--exclusive gives all CPUs, but only the memory that was asked for, or the cluster's default for it."""
    options = job.script.options
    memory = {"mem", "mem-per-cpu", "mem-per-gpu"}
    if "exclusive" in options and not memory & options.keys():
        yield Hit(
            job.script.option_line("exclusive"),
            "the job gets the default memory, not the node's",
            "#SBATCH --mem=0",
        )


@rule(
    "propagated-limits", "note", "the login node's limits come along", source="Slurm, PropagateResourceLimits"
)
def propagated_limits(job: Job) -> Iterator[Hit]:
    """Where PropagateResourceLimits=ALL, the submitting shell's ulimits hold in the job.

    A login node's 64 kB of locked memory keeps InfiniBand from registering buffers.
    """
    if job.is_multi_node and job.uses_gpus and "propagate" not in job.script.options:
        yield Hit(
            job.script.first_directive,
            "the ulimits of the submitting shell may hold in the job",
            "#SBATCH --propagate=NONE",
        )


@rule("task-count", "warning", "the numbers of tasks contradict each other", source=SBATCH)
def task_count(job: Job) -> Iterator[Hit]:
    """With --ntasks, --ntasks-per-node is only an upper limit: the job has as many tasks as --ntasks says."""
    tasks, per_node, nodes = job.number("ntasks"), job.number("ntasks-per-node"), job.number("nodes")
    if tasks and per_node and nodes and tasks != per_node * nodes:
        yield Hit(
            job.script.option_line("ntasks"),
            f"--ntasks={tasks} is not {counted(nodes, 'node')} x {counted(per_node, 'task')} = {nodes * per_node}",
            "leave --ntasks out",
        )


@rule("container-directive", "error", "the batch script itself runs in the container", source="pyxis, README")
def container_directive(job: Job) -> Iterator[Hit]:
    """A container option on a #SBATCH line puts the batch script into the container, where no srun or scontrol is."""
    calls = any(command.name in ("srun", "scontrol") for command in job.script.commands) or bool(job.steps)
    for directive in job.script.directives:
        if directive.effective and directive.name == "container-image" and calls:
            yield Hit(
                directive.line,
                "the batch script itself runs in the container, which has no srun",
                "give the container options to srun",
            )


@rule("array-index", "note", "an index beyond Slurm's default limit", source="Slurm, MaxArraySize")
def array_index(job: Job) -> Iterator[Hit]:
    """MaxArraySize limits the index, not the number of tasks, and is 1001 by default: 1000 is the last index."""
    value = job.script.options.get("array", "").partition("%")[0]
    indices = [int(number) for number in re.findall(r"\d{1,9}", value.partition(":")[0])]
    if indices and max(indices) > DEFAULT_MAX_ARRAY_INDEX:
        yield Hit(
            job.script.option_line("array"),
            f"the index {max(indices)} is refused where MaxArraySize is the default of 1001",
            "use smaller indices and add an offset, or give each task several files",
        )


@rule("export-none", "warning", "steps get an empty environment", source=SBATCH)
def export_none(job: Job) -> Iterator[Hit]:
    """--export=NONE holds for srun as well (SLURM_EXPORT_ENV): what the script exports does not reach the tasks."""
    if job.script.options.get("export", "").upper() not in ("NONE", "NIL"):
        return
    if "SLURM_EXPORT_ENV" in job.script.unset or job.script.settings("SLURM_EXPORT_ENV"):
        return
    for step in job.work_steps:
        if not step.option("export") and not step.is_open:
            yield Hit(
                step.line, "--export=NONE keeps the script's variables from the tasks", "srun --export=ALL"
            )
