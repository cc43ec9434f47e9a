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
        yield Hit(
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

    %x, %u and %N do not differ between jobs with the same name, user or node.
    """
    for name in ("output", "error"):
        value = job.script.options.get(name, "")
        appends = job.script.options.get("open-mode") == "append"
        has_job = re.search(r"%\d*[AJj]", value.replace("%%", ""))
        is_named = value and not value.startswith("/dev/") and not PLACEHOLDER.search(value)
        if is_named and not has_job and not appends:
            yield Hit(
                job.script.option_line(name),
                f"every job of this script truncates {value} and writes to it",
                "put %j into the name",
                cause="log",
            )


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
        yield Hit(
            job.script.option_line(name),
            f"Slurm up to 22.05 does not create the directory of {value}: if it is missing, the job ends without a log",
            "use Slurm 23.02 or newer, or a directory without %"
            if "%" in directory
            else f"mkdir -p {directory} before sbatch",
            cause="directory",
        )


def _is_made(job: Job, directory: str) -> bool:
    """True if a command or a comment of the script creates a directory."""
    path = rf"\bmkdir\b.*[\s/\"']{re.escape(directory)}(?![\w.-])"
    return any(re.search(path, line) for line in job.script.lines)
