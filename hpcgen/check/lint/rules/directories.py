"""Paths that differ in the job from what the script assumes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from hpcgen.check.lint.job import Job
from hpcgen.check.lint.rule import Hit, rule
from hpcgen.check.lint.script import Command
from hpcgen.check.lint.words import Word


@rule(
    "script-directory",
    "error",
    "the script's directory is not the one it was submitted from",
    source="Slurm, slurm.conf, SlurmdSpoolDir; measured on 22.05",
)
def script_directory(job: Job) -> Iterator[Hit]:
    """sbatch copies the script: $0 and ${BASH_SOURCE[0]} are in slurmd's spool directory, without other files.

    SLURM_SUBMIT_DIR is the directory where sbatch was called. `scontrol show job` prints the script's path.
    """
    if not job.script.is_batch or any(map(_submits_or_asks, job.script.commands)):
        return
    holders = _own_directories(job)
    made = {item.line for item in job.script.assignments}
    for command in job.script.commands:
        if command.name in ("echo", "printf") or command.status == "substituted" or command.conditional:
            continue
        if command.name == "cd" and command.line in made:
            continue  # NAME=$(cd ... && pwd): reported where NAME is used
        if _OTHER_WAY.search(job.script.lines[command.line - 1]):
            continue
        for word in command.words:
            name = next((name for name in word.variables if name in holders), "")
            if name or _is_own_directory(word):
                yield Hit(
                    holders.get(name, word.line),
                    "sbatch copies the script into slurmd's spool directory, which has no other files",
                    '"$SLURM_SUBMIT_DIR", or an absolute path',
                )
                return


def _own_directories(job: Job) -> dict[str, int]:
    """Variables that certainly contain the script's directory or a path in it -> the line of the `dirname`."""
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
    """True if a command submits a job, or asks Slurm for the script's path."""
    if command.name in ("echo", "printf"):
        return False
    texts = [word.text for word in command.words]
    asks = command.name == "scontrol" and any(re.match(r"job(s|id)?\b", text) for text in texts)
    if command.name in ("bash", "eval", "sh", "ssh", "xargs") and re.search(r"\bsbatch\b", " ".join(texts)):
        return True
    return asks or any(re.match(r"(\S*/)?sbatch(\s|$)", text) for text in texts)


def _is_own_directory(word: Word) -> bool:
    """True if a word contains the script's directory and has no alternative to it."""
    own = r"dirname\s+(--\s+)?\"?(\$0|\$\{0\}|\$\{?BASH_SOURCE(\[0\])?\}?)"
    return bool(re.search(own, word.source)) and not _OTHER_WAY.search(word.source)


_OTHER_WAY = re.compile(r"\$\{\w+:?-|SLURM_")
"""An alternative: ${SLURM_SUBMIT_DIR:-$(dirname "$0")} uses the script's directory only outside Slurm."""


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
"""Options of training programs that name the directory of checkpoints."""


@rule(
    "directory-by-date",
    "warning",
    "a requeued job looks for its checkpoints elsewhere",
    source="Slurm, man sbatch, --requeue",
)
def directory_by_date(job: Job) -> Iterator[Hit]:
    """A requeued job runs the script again: $(date) then names another directory, without the checkpoints.

    SLURM_JOB_ID stays the same across requeues.
    """
    for launch in job.trainings if job.requeues else ():
        for name, flag in launch.flags.items():
            word = flag.value
            if name.replace("_", "-") in _DIRECTORIES and word and re.search(r"(\$\(|`)date\b", word.text):
                yield Hit(
                    word.line,
                    f"--{name} contains the date: a requeued job starts in a new directory, without checkpoints",
                    "use $SLURM_JOB_ID instead of the date",
                    cause="date",
                )
