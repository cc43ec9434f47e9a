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
        for word in (*command.words, *([command.writes_to] if command.writes_to else [])):
            name = next((name for name in word.variables if name in holders), "")
            if name or _is_own_directory(word):
                yield Hit.at(
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
        elif not re.search(r"\$\{\w+:?-|SLURM_SUBMIT_DIR|\$\([^)]*SLURM_|`", item.value.source):
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
    """True if a word contains the script's directory in every case."""
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
                yield Hit.at(
                    word.line,
                    f"--{name} contains the date: a requeued job starts in a new directory, without checkpoints",
                    "use $SLURM_JOB_ID instead of the date",
                    cause="date",
                )


@rule(
    "requeue-overwrites",
    "warning",
    "a requeued job deletes its checkpoints",
    source="Slurm, man sbatch, --requeue",
)
def requeue_overwrites(job: Job) -> Iterator[Hit]:
    """A requeued job runs the script again: with --save_overwrite or rm -rf of its directory, it starts from zero.

    Not reported: programs with an option to resume.
    """
    for launch in job.trainings if job.requeues else ():
        names = {name.replace("_", "-"): flag for name, flag in launch.flags.items()}
        if any(re.match(r"(auto-)?(resume|load)", name) for name in names) or launch.is_open:
            continue
        for name, flag in names.items():
            is_off = flag.value is not None and flag.value.text.lower() in ("0", "false", "no")
            if (
                re.fullmatch(r"(save-)?overwrite(-(output-dir|existing|ckpt|checkpoints?))?", name)
                and not is_off
            ):
                why = f"--{flag.name} makes a requeued job start from zero and overwrite its checkpoints"
                yield Hit.at(flag.line, why, "remove it, and resume from the newest checkpoint")
        own = {flag.value.text for name, flag in names.items() if name in _DIRECTORIES and flag.value}
        for command in job.script.commands:
            deletes = command.name == "rm" and any(
                re.match(r"-\w*[rR]", word.text) for word in command.words[1:2]
            )
            # a condition is usually that of the first start
            if deletes and not command.conditional and not command.function and command.line < launch.line:
                for word in command.words[2:]:
                    if word.text.rstrip("/") in {text.rstrip("/") for text in own}:
                        why = "a requeued job deletes the directory of its checkpoints here"
                        yield Hit.at(command.line, why, "delete it before submitting the job")


@rule(
    "hosts-appended",
    "warning",
    "a file of hosts grows with every attempt",
    source="Slurm, man sbatch, --requeue; man bash, Appending Redirected Output",
)
def hosts_appended(job: Job) -> Iterator[Hit]:
    """Lines that >> adds to a host file stay for the next attempt or job, which may have other nodes.

    SLURM_JOB_ID stays the same across requeues. Not reported: a script that removes or empties the file first.
    """
    text = "\n".join("" if line.lstrip().startswith("#") else line for line in job.script.lines)
    used = set(re.findall(r"-(?:-?host-?file|-?machinefile)[=\s]+[\"']?([^\s\"']+)", text))
    for found in re.finditer(r">>\s*[\"']?([^\s\"';&|]+)", text):
        path = found[1]
        empties = rf"(\brm\s[^\n]*|\btruncate\s[^\n]*|\bmktemp\b[^\n]*|(?<!>)>\|?\s*[\"']?){re.escape(path)}"
        if path not in used or re.search(empties, text[: found.start()]):
            continue
        full = path + "".join(
            item.value.source
            for item in job.script.assignments
            if item.value and re.search(rf"\$\{{?{item.name}\b", path)
        )
        is_own = re.search(r"SLURM_JOB_?ID|SLURM_ARRAY", full)
        if re.search(r"mktemp|RANDOM|\bdate\b|\$\$", full) or (is_own and not job.requeues):
            continue
        who = "a requeued job" if is_own else "the next job"
        yield Hit.at(
            text.count("\n", 0, found.start()) + 1,
            f"{who} appends its nodes to those that are already in {path}",
            f"rm -f {path} before",
        )
