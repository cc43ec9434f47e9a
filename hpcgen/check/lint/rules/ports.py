"""Ports of the rendezvous."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from hpcgen.check.lint.arithmetic import Interval, interval_of_source
from hpcgen.check.lint.job import Job
from hpcgen.check.lint.launch import Step
from hpcgen.check.lint.rule import Hit, rule
from hpcgen.check.lint.script import Assignment
from hpcgen.check.lint.words import Word

FIRST_EPHEMERAL_PORT, LAST_EPHEMERAL_PORT = 32768, 60999
"""Linux, net.ipv4.ip_local_port_range: ports for outgoing connections."""


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
