"""#SBATCH lines, and how sbatch reads them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpcgen.check.lint.job import Job
from hpcgen.check.lint.rule import Hit, rule
from hpcgen.check.lint.sbatch import (
    MOVED_OPTIONS,
    SRUN_OPTIONS,
    Directive,
    duration_as_time,
    first_command,
    stray_words,
)
from hpcgen.config.sbatch_options import matching_options, misspelled_option, release_with
from hpcgen.text import counted

STRAY_FIX = "quote a value that contains blanks, and put # before a comment"
MIN_CPUS_PER_GPU = 2
GOOD_CPUS_PER_GPU = 4
DEFAULT_MAX_ARRAY_INDEX = 1000


@rule(
    "directive-after-command",
    "error",
    "sbatch does not see a directive",
    source="Slurm, man sbatch, DESCRIPTION",
)
def directive_after_command(job: Job) -> Iterator[Hit]:
    """sbatch stops reading at the first line that is neither blank nor a comment, such as `set -e` or `module load`.

    Every directive below it is a comment: the job starts without its nodes, GPUs or time limit.
    """
    end = first_command(job.script.lines)
    for directive in job.script.directives:
        if not directive.effective:
            yield Hit.at(
                directive.line,
                f"--{directive.name} has no effect, because sbatch stops reading at the first command, on line {end}",
                f"move the directives above line {end}",
                cause="after the first command",
            )


@rule(
    "directive-unknown",
    "error",
    "sbatch refuses an option",
    source="Slurm 22.05 to 25.11, src/common/slurm_opt.c",
)
def directive_unknown(job: Job) -> Iterator[Hit]:
    """sbatch fails with "unrecognized option" and submits no job. sbatch does not have all options of srun.

    sbatch accepts an abbreviation that matches one option only. For a word that belongs to no option, it fails with
    "Invalid directive found in batch script".
    """
    for line, word, before in stray_words(job.script.lines):
        place = next((name for name in _PLACES.findall(job.script.lines[line - 1]) if word in name), "")
        why, fix = f"{word!r} belongs to no option: sbatch refuses the directive", STRAY_FIX
        if place:
            why, fix = f"`{place}` is a placeholder: sbatch refuses the directive", "replace it"
        elif before and before.name == "time" and (time := duration_as_time(f"{before.value} {word}")):
            fix = f"--time={time}"
        yield Hit.at(line, why, fix, cause="stray word")
    for directive in _unknown(job):
        name, matching = directive.name, matching_options(directive.name)
        written = f"--{name}" if len(name) > 1 else f"-{name}"
        right = MOVED_OPTIONS.get(name) or misspelled_option(name)
        if name in SRUN_OPTIONS:
            yield Hit.at(
                directive.line, f"{written} is an option of srun, which sbatch refuses", "pass it to srun"
            )
        elif right:
            yield Hit.at(directive.line, f"sbatch has no {written}", f"did you mean --{right}?")
        elif matching:
            several = ", ".join(f"--{option}" for option in matching)
            yield Hit.at(
                directive.line,
                f"{written} is ambiguous ({several}): sbatch refuses it",
                "write the full name",
            )
        elif len(name) == 1:  # a long name may be an option of a SPANK plugin
            yield Hit.at(directive.line, f"sbatch has no {written}", "see man sbatch")
    for directive in job.script.directives:
        release = release_with(directive.name, directive.value or "")
        if release and directive.effective:
            why = f"sbatch of Slurm before {release} does not have --{directive.name}"
            why += f"={directive.value}" if directive.name == "gres-flags" else ""
            yield Hit.at(directive.line, why, "remove it", before=release)


_PLACES = re.compile(r"<[^<>]*>|\{[^{}]*\}")
"""Placeholders, which contain blanks: <your partition>, { partition }."""


def _unknown(job: Job) -> Iterator[Directive]:
    """Directives in effect that sbatch and pyxis do not have."""
    for directive in job.script.directives:
        is_pyxis = directive.name.startswith(("container-", "no-container-"))
        if directive.effective and not is_pyxis and matching_options(directive.name) != (directive.name,):
            yield directive


@rule(
    "directive-spelling",
    "warning",
    "a line looks like a directive but is a comment",
    source="Slurm, src/sbatch/opt.c, _next_line",
)
def directive_spelling(job: Job) -> Iterator[Hit]:
    """Only `#SBATCH` in upper case at the very beginning of a line is a directive. Other spellings are comments.

    `##SBATCH` and `# SBATCH`, which are used to disable a directive, are not reported.
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
            yield Hit.at(
                number,
                f"{line.split()[0]!r} is a comment to sbatch",
                "write #SBATCH at the beginning of the line",
            )


@rule("directive-cut", "error", "an unquoted # cuts a directive", source="Slurm, src/sbatch/opt.c")
def directive_cut(job: Job) -> Iterator[Hit]:
    """In a directive, an unquoted `#` begins a comment even within a word: nvcr.io#nvidia/pytorch becomes nvcr.io."""
    for directive in job.script.directives:
        if directive.cut.strip("#"):  # a lone # is meant as a comment
            yield Hit.at(
                directive.line,
                f"sbatch reads {directive.cut} as a comment, so --{directive.name} is only {directive.value}",
                "quote the value, or write \\#",
            )


@rule(
    "directive-variable", "error", "a variable in a directive", source="Slurm, man sbatch, filename pattern"
)
def directive_variable(job: Job) -> Iterator[Hit]:
    """sbatch reads directives without a shell, so it does not expand $HOME. File names can use %j, %N and %u instead.

    In sbatch <<EOF, without quotes around EOF, the submitting shell expands them first (man bash, Here Documents).
    """
    if job.script.is_expanded:
        return
    for directive in job.script.directives:
        if directive.effective and (found := re.search(r"\$\{?\w+\}?|\$\(", directive.value or "")):
            yield Hit.at(
                directive.line,
                f"sbatch does not expand {found[0]} in --{directive.name}",
                "write the value, or pass the option on the command line of sbatch",
                cause=found[0],
            )


@rule(
    "directive-twice",
    "warning",
    "a directive is given twice",
    source="Slurm, src/common/slurm_opt.c; for --mail-type 24.11 and 25.05",
)
def directive_twice(job: Job) -> Iterator[Hit]:
    """If an option is given twice, sbatch uses the last one, and the other misleads readers of the script.

    Not reported: components of a heterogeneous job, and --mail-type, which accumulates up to Slurm 24.11.
    """
    if any(re.match(r"#SBATCH\s+(hetjob|packjob)\b", line) for line in job.script.lines):
        return
    seen: dict[str, tuple[int, str | None]] = {}
    for directive in job.script.directives:
        if not directive.effective or directive.name == "mail-type":
            continue
        line, value = seen.get(directive.name, (0, directive.value))
        if value != directive.value:
            yield Hit.at(
                directive.line,
                f"--{directive.name}={directive.value} overrides --{directive.name}={value} on line {line}",
                "remove one of them",
            )
        seen[directive.name] = directive.line, directive.value


@rule(
    "empty-script",
    "error",
    "sbatch refuses an empty script",
    source="Slurm, src/sbatch/sbatch.c, _get_script_buffer",
)
def empty_script(job: Job) -> Iterator[Hit]:
    """sbatch refuses a file that contains only white space. Most likely, writing the file failed."""
    if not any(line.strip() for line in job.script.lines):
        yield Hit.at(1, "the script is empty, and sbatch refuses it", "write it again")


@rule("no-shebang", "error", "sbatch refuses the script", source="Slurm, src/sbatch/sbatch.c, has_shebang")
def no_shebang(job: Job) -> Iterator[Hit]:
    """sbatch only accepts a script whose first line is #! and an interpreter."""
    if job.script.is_batch and not job.script.lines[0].startswith("#!"):
        yield Hit.at(
            1,
            "the first line is not #! and an interpreter: sbatch refuses the script",
            "begin with #!/bin/bash",
        )


@rule(
    "dos-line-ends",
    "error",
    "sbatch refuses the script",
    source="Slurm, src/sbatch/sbatch.c, contains_dos_linebreak",
)
def dos_line_ends(job: Job) -> Iterator[Hit]:
    """sbatch refuses scripts with Windows line endings, and bash reads the carriage return as part of a word."""
    number = next(
        (index for index, line in enumerate(job.script.lines, start=1) if line.endswith("\r")), None
    )
    if number:
        yield Hit.at(
            number, "the line ends with a carriage return, as on Windows", "sed -i 's/\\r$//' SCRIPT"
        )


@rule(
    "no-time-limit",
    "warning",
    "the job has no time limit",
    source="Slurm, man sbatch, --time; slurm.conf, DefaultTime",
)
def no_time_limit(job: Job) -> Iterator[Hit]:
    """Without --time, a job gets the partition's default: minutes on one cluster, unlimited on another.

    With a limit, Slurm can backfill the job, and ends it if it hangs. A script with a disabled --time directive
    (##SBATCH) is not reported: the limit is expected on the command line.
    """
    header = job.script.lines[: first_command(job.script.lines) - 1]
    turned_off = any(re.match(r"\s*#[#\s]+SBATCH\s(.*\s)?(-t|--time)", line) for line in header)
    if job.script.is_batch and not {"time", "time-min"} & job.script.options.keys() and not turned_off:
        yield Hit.at(
            job.script.first_directive,
            "no --time: the job gets the partition's default limit",
            "#SBATCH --time=<what the run needs>, e.g. 1-00:00:00",
        )


@rule(
    "few-cpus",
    "warning",
    "too few CPUs for the GPUs",
    source="Slurm, man sbatch, --cpus-per-task; the minimum of 2 per GPU is a rule of thumb",
)
def few_cpus(job: Job) -> Iterator[Hit]:
    """Each GPU's process launches kernels and has data loader and NCCL threads. One CPU is too few for them.

    Nodes with eight GPUs have about a hundred CPUs: request at least four per GPU. A script without --cpus-per-task
    is not reported, because the cluster may have a default per GPU (DefCpuPerGPU).
    """
    gpus, tasks = job.gpus_per_node, job.ntasks_per_node
    if not job.script.is_batch or not gpus or not tasks or not job.trainings:
        return
    given = job.number("cpus-per-task")
    if given is None or "cpus-per-gpu" in job.script.options:
        return
    cpus = given * tasks
    if cpus < MIN_CPUS_PER_GPU * gpus:
        yield Hit.at(
            job.script.option_line("cpus-per-task"),
            f"{counted(tasks, 'task')} x {counted(given, 'CPU')} = {cpus} for the {counted(gpus, 'GPU')} of a node",
            f"--cpus-per-task={-(-GOOD_CPUS_PER_GPU * gpus // tasks)}: {GOOD_CPUS_PER_GPU} for each of the {gpus} GPUs",
        )


@rule(
    "task-count",
    "warning",
    "the numbers of tasks contradict each other",
    source="Slurm, man sbatch, --ntasks-per-node",
)
def task_count(job: Job) -> Iterator[Hit]:
    """With --ntasks, --ntasks-per-node is only an upper limit: the job has --ntasks tasks."""
    tasks, per_node, nodes = job.number("ntasks"), job.number("ntasks-per-node"), job.number("nodes")
    if tasks and per_node and nodes and tasks != per_node * nodes:
        yield Hit.at(
            job.script.option_line("ntasks"),
            f"--ntasks={tasks} is not {counted(nodes, 'node')} x {counted(per_node, 'task')} = {nodes * per_node}",
            "remove --ntasks",
        )


@rule(
    "container-directive",
    "error",
    "the batch script itself runs in the container",
    source="pyxis, README, Usage; measured on pyxis 0.24",
)
def container_directive(job: Job) -> Iterator[Hit]:
    """A container option on a #SBATCH line runs the batch script in the container, which has no srun or scontrol."""
    calls = any(command.name in ("srun", "scontrol") for command in job.script.commands) or bool(job.steps)
    for directive in job.script.directives:
        if directive.effective and directive.name == "container-image" and calls:
            yield Hit.at(
                directive.line,
                "the batch script itself runs in the container, which has no srun",
                "pass the container options to srun",
            )


@rule(
    "array-index", "note", "an index beyond Slurm's default limit", source="Slurm, slurm.conf, MaxArraySize"
)
def array_index(job: Job) -> Iterator[Hit]:
    """MaxArraySize limits the index, not the number of tasks. Its default is 1001, so the last index is 1000."""
    value = job.script.options.get("array", "").partition("%")[0]
    indices = [int(number) for number in re.findall(r"\d{1,9}", value.partition(":")[0])]
    if indices and max(indices) > DEFAULT_MAX_ARRAY_INDEX:
        yield Hit.at(
            job.script.option_line("array"),
            f"Slurm refuses index {max(indices)} unless MaxArraySize is raised from its default of 1001",
            "use smaller indices and add an offset, or process several files per task",
        )


@rule("export-none", "warning", "steps get an empty environment", source="Slurm, man sbatch, --export")
def export_none(job: Job) -> Iterator[Hit]:
    """--export=NONE also applies to srun (SLURM_EXPORT_ENV): exports of the script do not reach the tasks."""
    if job.script.options.get("export", "").upper() not in ("NONE", "NIL"):
        return
    if "SLURM_EXPORT_ENV" in job.script.unset or job.script.settings("SLURM_EXPORT_ENV"):
        return
    for step in job.work_steps:
        if not step.option("export") and not step.is_open:
            yield Hit.at(
                step.line,
                "because of #SBATCH --export=NONE, the script's variables do not reach the tasks",
                "srun --export=ALL",
            )
