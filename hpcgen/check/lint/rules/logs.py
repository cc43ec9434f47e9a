"""Log files: --output, --error and --open-mode."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpcgen.check.lint.job import Job
from hpcgen.check.lint.rule import Hit, rule
from hpcgen.check.lint.words import PLACEHOLDER


@rule(
    "log-truncated",
    "warning",
    "a requeued job loses its log",
    source="Slurm, man sbatch, --open-mode; slurm.conf, JobFileAppend",
)
def log_truncated(job: Job) -> Iterator[Hit]:
    """A requeued job keeps its job ID, so %j names the same file, which Slurm truncates by default."""
    if job.requeues and job.script.is_batch and job.script.options.get("open-mode") != "append":
        yield Hit.at(
            job.script.option_line("requeue"),
            "when the job is requeued, Slurm truncates its log",
            "#SBATCH --open-mode=append",
        )


@rule(
    "log-shared",
    "warning",
    "jobs overwrite each other's log",
    source="Slurm, man sbatch, --output and --open-mode",
)
def log_shared(job: Job) -> Iterator[Hit]:
    """An output file without %j (%A for arrays) is the same for every job of the script: the next job truncates it.

    %x, %u and %N do not differ between jobs with the same name, user or node. The same holds for --output of srun.
    """
    if job.script.options.get("open-mode") == "append":
        return
    for name in ("output", "error"):
        value = job.script.options.get(name, "")
        if value and _is_shared(value):
            yield Hit.at(
                job.script.option_line(name), _TRUNCATES.format(value), "put %j into the name", cause="log"
            )
    for step in job.steps:
        mode = step.option("open-mode")
        for name in ("output", "error"):
            option = step.option(name)
            word = option.value if option else None
            is_own = (
                word is not None and word.known and word.certain and not word.assumed and "/" in word.text
            )
            if word and is_own and _is_shared(word.text) and not (mode and mode.text.startswith("a")):
                yield Hit.at(
                    word.line,
                    _TRUNCATES.format(word.text),
                    "put %j into the name",
                    cause=f"log of {step.line}",
                )


_TRUNCATES = "every job of this script truncates {} and writes to it"


def _is_shared(path: str) -> bool:
    """True if an output file is the same for every job."""
    has_job = re.search(r"%\d*[AJj]", path.replace("%%", ""))
    return not (has_job or path.startswith("/dev/") or PLACEHOLDER.search(path))


@rule(
    "log-directory",
    "note",
    "the directory of the log may be missing",
    source="Slurm, man sbatch, --output; CHANGELOG/slurm-23.02.md, which creates the directory",
    slurm=("", "22.05"),
)
def log_directory(job: Job) -> Iterator[Hit]:
    """Up to 22.05, Slurm opens the log before the script runs, and does not create its directory.

    Without the directory, the job ends at once without a log. mkdir in the script is too late. Slurm 23.02 creates the
    directory. Not reported: a script with a comment that shows the mkdir, and a script that needs a newer release, for
    example because of --gres-flags=allow-task-sharing.
    """
    for name in ("output", "error"):
        value = job.script.options.get(name, "")
        directory = value.removeprefix("./").rpartition("/")[0]
        is_relative = directory and not value.startswith("/") and "$" not in value
        if not is_relative or PLACEHOLDER.search(value) or _is_made(job, directory):
            continue
        yield Hit.at(
            job.script.option_line(name),
            f"Slurm up to 22.05 does not create the directory of {value}: if it is missing, the job ends without a log",
            "use Slurm 23.02 or newer, or a directory without %"
            if "%" in directory
            else f"mkdir -p {directory} before sbatch",
            cause="directory",
        )


def _is_made(job: Job, directory: str) -> bool:
    """True if a comment, or a script that submits itself, shows how to create a directory before the job."""
    path = rf"\bmkdir\b.*[\s/\"']{re.escape(directory)}(?![\w.-])"
    submits = any(command.name == "sbatch" for command in job.script.commands)
    return any(re.search(path, line) for line in job.script.lines if submits or line.lstrip().startswith("#"))
