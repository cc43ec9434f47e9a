"""Rules about waiting for the work, and about reporting its failure to Slurm."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpcgen.check.lint.job import Job
from hpcgen.check.lint.launch import Launch
from hpcgen.check.lint.mpi import STEP_PROGRAMS
from hpcgen.check.lint.rule import Hit, rule
from hpcgen.check.lint.script import Command, shebang_switches, switched
from hpcgen.check.lint.words import Word

_AT_ONCE = frozenset((
    "echo", "printf", "date", "exit", "true", ":", "cd", "export", "set", "unset", "trap", "touch", "mkdir",
    "hostname", "declare", "readonly",
))  # fmt: skip
"""Commands that end at once."""


@rule("no-wait", "error", "the script does not wait for its step", source="man bash, JOB CONTROL")
def no_wait(job: Job) -> Iterator[Hit]:
    """When a batch script ends, Slurm ends its steps: srun in the background needs a wait.

    Reported only if every command after the step ends at once, because a loop or another program may be the wait.
    """
    for step in job.work_steps:
        command = step.command
        after = next(
            (job.script.commands[i + 1 :] for i, found in enumerate(job.script.commands) if found is command),
            (),
        )
        may_not_run = command.function or (command.conditional and not command.in_loop)
        if step.background and not may_not_run and all(found.name in _AT_ONCE for found in after):
            yield Hit.at(
                step.line, "the script ends without waiting for this step, and Slurm kills it", "wait for it"
            )


@rule("wait-without-status", "warning", "a failed training looks like a success", source="man bash, wait")
def wait_without_status(job: Job) -> Iterator[Hit]:
    """`wait` without a process ID returns 0 even if the steps failed. As the last command, it makes the job succeed.

    Only reported if all work is in the background and only messages, if anything, follow.
    """
    if not job.script.is_batch or not job.work:
        return
    background = {id(step.command) for step in job.steps if step.background}
    if any(not (command.background or id(command) in background) or command.function for command in job.work):
        return  # the status of work in the foreground may be checked
    commands = [command for command in job.script.commands if command.outer is None]
    waits = [command for command in commands if command.name == "wait"]
    traps = [command for command in commands if command.name == "trap"]
    # wait PID and wait -n return the status of a process, and a trap may look at it
    if len(waits) != 1 or traps or [word.text for word in waits[0].words] != ["wait"]:
        return
    wait = waits[0]
    if wait.function or wait.conditional or wait.in_loop or wait.line < job.work[-1].line:
        return  # it may not run, or more work follows
    later = [command for command in commands if command.line > wait.line and not command.function]
    if all(command.name in ("echo", "printf", "date") or _exits_with_last(command) for command in later):
        yield Hit.at(
            wait.line,
            f"this returns 0 even if the step on line {job.work[-1].line} fails, so the job succeeds",
            'pid=$! after each step, and wait "$pid" || status=1 for each, then exit $status',
        )


def _exits_with_last(command: Command) -> bool:
    return command.name == "exit" and [word.text for word in command.words[1:]] in ([], ["0"], ["$?"])


@rule(
    "resubmits-itself",
    "warning",
    "a job that fails resubmits itself forever",
    source="Slurm, man sbatch, --dependency",
)
def resubmits_itself(job: Job) -> Iterator[Hit]:
    """A script that submits itself before its work keeps doing so when the work fails at once.

    Submitting after the work, and only if it made progress, ends the chain. afterok ends it at a failure.
    """
    lines = [launch.line for launch in job.launches] + [step.line for step in job.parallel_steps]
    last = max(lines, default=0)
    for command in job.script.commands:
        is_always = not command.conditional and not command.function and command.line < last
        if command.name != "sbatch" or not is_always:
            continue
        texts = [word.text for word in command.words[1:]]
        own = any(map(_is_own_path, command.words[1:])) or _own_name(job, command) in texts
        if own and not any("afterok" in text for text in texts):
            yield Hit.at(
                command.line,
                "the script submits itself before its work: if the work fails at once, this never ends",
                "submit after the work, and only if it made progress",
            )


def _is_own_path(word: Word) -> bool:
    return bool(re.search(r"^\"?(\$0|\$\{0\}|\$\{?BASH_SOURCE)", word.source))


def _own_name(job: Job, command: Command) -> str | None:
    """The file name by which a command refers to the script; None if it may be another file.

    After a cd, the name is the script's if the job's name ends with it.
    """
    name = job.script.path.rpartition("/")[2]
    moves = any(found.name in ("cd", "pushd") and found.line <= command.line for found in job.script.commands)
    stem = name.partition(".")[0]
    is_job = bool(stem) and job.script.options.get("job-name", "").endswith(stem)
    return name if job.script.is_batch and name != "-" and (is_job or not moves) else None


_CHECKS = re.compile(r"health|preflight|node[_-]?check|(^|[/_-])nhc([_.-]|$)|gpu[_-]?check", re.IGNORECASE)
_RUNNERS = ("bash", "sh", "srun", "python", "python3", "timeout", "source", ".")


@rule("check-ignored", "warning", "the result of a health check is ignored", source="man bash, Lists")
def check_ignored(job: Job) -> Iterator[Hit]:
    """If nothing reads the exit status of a check, the job runs on the bad node that it found."""
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
            yield Hit.at(command.line, f"the job continues when `{check}` fails", f"{check} || exit 1")


def _check(command: Command) -> str:
    """The health check that a command runs, up to the name that identifies it; "" if it runs none."""
    texts = [word.text for word in command.words]
    if command.name == "dcgmi":
        return " ".join(texts) if texts[1:2] == ["diag"] else ""
    for index, text in enumerate(texts[:5] if command.name in _RUNNERS else texts[:1]):
        if _CHECKS.search(text) and re.search(r"^[\w/.$-]+$", text) and not text.startswith("-"):
            return " ".join(texts[: index + 1])
    return ""


@rule("failure-in-pipe", "warning", "a failed training looks like a success", source="man bash, Pipelines")
def failure_in_pipe(job: Job) -> Iterator[Hit]:
    """The status of `srun ... | tee log` is that of tee: the job ends as COMPLETED even if the training fails.

    So is the status of a step with such a pipe in the text of its `bash -c`.
    """
    for launch in job.trainings:
        outer = _step_around(job, launch)
        if outer and launch.command.status == "piped" and not _has_switch(job, outer, "pipefail"):
            yield Hit.at(
                launch.line,
                "the step succeeds even if this fails: a pipe has the status of its last command",
                "set -eo pipefail at the start of the text",
            )
    if "pipefail" in job.script.shell_options:
        return
    # a pipe into a program other than tee may collect answers of the nodes
    pipelines = [pipeline for pipeline in job.script.pipelines if pipeline[-1].name == "tee"]
    logged = {id(command) for pipeline in pipelines for command in pipeline}
    parallel = {id(step.command) for step in job.parallel_steps if step not in job.work_steps}
    working = {id(command) for command in job.work} - parallel | parallel & logged
    read = max((use.line for use in job.script.uses if use.name == "PIPESTATUS"), default=0)
    for command in job.script.commands:
        if id(command) in working and command.status == "piped" and read < command.end:
            yield Hit.at(
                command.line,
                "the job succeeds even if this fails: a pipe has the status of its last command",
                "set -eo pipefail" if _replaced_by(job, command) else "set -o pipefail",
            )


def _step_around(job: Job, launch: Launch) -> Command | None:
    """The srun or mpirun whose `bash -c` text contains a launch."""
    number = launch.command.outer
    outer = None if number is None else job.script.commands[number]
    return outer if outer and outer.name in STEP_PROGRAMS else None


def _has_switch(job: Job, outer: Command, option: str) -> bool:
    """True if the shell of a `bash -c` has this option."""
    texts = [word.text for word in outer.words]
    shell = next((index for index, text in enumerate(texts) if re.search(r"(^|/)\w*sh$", text)), len(texts))
    switches = [*switched(texts[shell + 1 :])]
    if outer.file_text is not None:
        switches += shebang_switches(outer.file_text.text.partition("\n")[0])
    for item in job.script.commands:
        if item.name == "set" and item.outer is not None and job.script.commands[item.outer] is outer:
            switches += switched([word.text for word in item.words[1:]])
    return (option, True) in switches


@rule(
    "failure-hidden",
    "warning",
    "a failed training looks like a success",
    source="Slurm, Job Exit Codes (job_exit_code.html)",
)
def failure_hidden(job: Job) -> Iterator[Hit]:
    """The job's state is the status of the script's last command: `echo done` after srun makes it COMPLETED.

    Jobs that depend on its success (afterok) then start although it failed. The text of a step's `bash -c` has the
    same problem.
    """
    yield from _hidden_in_step(job)
    if not job.script.is_batch or {"errexit"} & job.script.shell_options or not job.work:
        return
    for command in job.work:
        if command.loop and command.status == "plain" and not _is_background(job, command):
            yield Hit.at(
                command.line,
                f"the loop over {command.loop} goes on after a failure, which only the last iteration reports",
                f"{command.name} ... || failed=1, and exit ${{failed:-0}} at the end",
            )
    command = job.work[-1]
    in_pipe = command.status == "piped" and "pipefail" in job.script.shell_options
    in_pipe = in_pipe and not any(
        use.name in ("?", "PIPESTATUS") and use.line > command.line for use in job.script.uses
    )
    last = _replaced_by(job, command)
    if last and (command.status == "plain" or in_pipe) and not _is_background(job, command):
        yield Hit.at(
            command.line,
            f"the job ends with the status of line {last.line}, so a failure here is not noticed",
            "set -e" if in_pipe else f"{command.name} ... || exit, or set -e",
        )


def _is_background(job: Job, command: Command) -> bool:
    return command.background or any(step.background for step in job.steps if step.command is command)


def _replaced_by(job: Job, command: Command) -> Command | None:
    """The last command of the job, if its status replaces the status of an earlier command. None otherwise."""
    at = next(index for index, item in enumerate(job.script.commands) if item is command)
    later = [
        item
        for item in job.script.commands[at + 1 :]
        if item.statement != command.statement
        and item.status != "substituted"
        and not item.function
        and not item.dead
        and item.outer is None
    ]
    exits = [item for item in later if item.name == "exit" and len(item.words) > 1]
    if command.conditional or command.function or not later:
        return None
    if any(word.variables for item in exits for word in item.words):
        return None
    if later[0].name == "exit" and later[0] not in exits:
        return None  # a bare exit has the status of the command before it
    if any(item.name == "trap" and item.words[-1].text == "ERR" for item in job.script.commands):
        return None
    return later[-1]


def _hidden_in_step(job: Job) -> Iterator[Hit]:
    """Trainings in the text of a step's `bash -c` that are followed by the command whose status the step has."""
    for launch in job.trainings:
        outer, command = _step_around(job, launch), launch.command
        in_pipe = command.status == "piped"
        if not outer or not (in_pipe or command.status == "plain") or command.background:
            continue
        if command.conditional != outer.conditional or _has_switch(job, outer, "errexit"):
            continue
        if in_pipe and not _has_switch(job, outer, "pipefail"):
            continue
        inner = [item for item in job.script.commands if item.outer == command.outer]
        at = next(index for index, item in enumerate(inner) if item is launch.command)
        later = [item for item in inner[at + 1 :] if item.statement != launch.command.statement]
        if later and not any(map(_may_report, later)):
            program, last = launch.program.rpartition("/")[2], later[-1]
            program = program if re.fullmatch(r"[\w.-]+", program) else launch.launcher
            # in a text with variables or continued lines, all commands have the same line
            lines = (
                [f" (line {line})" for line in (launch.line, last.line)]
                if last.line > launch.line
                else [""] * 2
            )
            yield Hit.at(
                launch.line,
                f"a failure of `{program}`{lines[0]} is not noticed: the step ends with the status of "
                f"`{last.name}`{lines[1]}",
                "set -e at the start of the text",
                cause=f"step {command.outer}",
            )


def _may_report(command: Command) -> bool:
    """True if a command can end its shell with a status that differs from the command's own."""
    succeeds = not command.conditional and [word.text for word in command.words] == ["exit", "0"]
    return command.name in ("exit", "exec", "wait", "trap") and not succeeds
