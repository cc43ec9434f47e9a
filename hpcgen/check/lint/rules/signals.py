"""Signals that the batch shell keeps to itself."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpcgen.check.lint.job import Job
from hpcgen.check.lint.reader import read
from hpcgen.check.lint.rule import Hit, rule
from hpcgen.check.lint.rules.directives import signal_of
from hpcgen.check.lint.script import Command, Script

_ONLY_SAYS = frozenset((
    "echo", "printf", "date", "sleep", "true", ":", "wait", "sync", "hostname", "nvidia-smi", "squeue", "sacct", "[",
    "test", "return", "free", "df",
))  # fmt: skip
"""Commands that neither signal a process, nor leave a file, nor change the rest of the script."""
_FORWARDS = frozenset((
    "kill", "pkill", "killall", "scancel", "scontrol", "sbatch", "touch", "source", ".", "eval", "ssh", "xargs",
))  # fmt: skip
"""Commands elsewhere in the script that may tell the training after the trap has run."""


@rule(
    "signal-not-forwarded",
    "warning",
    "the training never gets the warning",
    source="Slurm, man sbatch, --signal: with B: no other process is signaled",
)
def signal_not_forwarded(job: Job) -> Iterator[Hit]:
    """B: sends the signal to the batch shell alone. A trap that only prints leaves the training without a warning.

    Its own signal handler never runs. Only reported where everything that the trap runs is known and harmless. A trap
    that sends a signal, requeues the job, writes a file, sets a variable or exits is not reported.
    """
    signal = signal_of(job)
    if not signal or "B" not in signal[0]:
        return
    traps = [
        command
        for command in job.script.commands
        if command.name == "trap"
        and len(command.words) > 2
        and signal[1] in {word.text.upper().removeprefix("SIG") for word in command.words[2:]}
    ]
    elsewhere = any(map(_forwards, job.script.commands)) or _goes_on(job)
    if elsewhere or not all(
        trap.words[1].known and _only_says(job.script, trap.words[1].text) for trap in traps
    ):
        return
    runs_on = any(launch.step is None or launch.step.background for launch in job.trainings)
    if traps and runs_on:
        yield Hit(
            traps[0].line,
            f"the trap for {signal[1]} sends nothing on: only the batch shell gets the signal, not the training",
            f"srun ... & pid=$!, and trap 'kill -{signal[1]} \"$pid\"' {signal[1]}",
        )


def _goes_on(job: Job) -> bool:
    """Whether the script works on after its last training, as it does when the trap has ended a wait."""
    last = max((job.outermost(launch.command).end for launch in job.trainings), default=0)
    usual = _ONLY_SAYS | {"exit", "kill", "trap"}
    commands = job.script.commands
    at_exit = any(command.name == "trap" and command.words[-1].text in ("EXIT", "0") for command in commands)
    after = [command.name for command in commands if command.line > last and not command.function]
    return at_exit or not usual.issuperset(after)


def _forwards(command: Command) -> bool:
    asks = command.name == "scontrol" and "show" in [word.text for word in command.words]
    looks = command.name == "kill" and [word.text for word in command.words[1:2]] == ["-0"]
    return command.name in _FORWARDS and not asks and not looks


def _only_says(script: Script, text: str) -> bool:
    """Whether the text of a trap does nothing but print and wait, its functions included."""
    handler = read(f"{text}\n")
    if not handler.commands or handler.assignments or handler.error or _writes(text):
        return False
    return all(
        command.name in _ONLY_SAYS or _function_only_says(script, command.name)
        for command in handler.commands
    )


def _function_only_says(script: Script, name: str) -> bool:
    function = script.functions.get(name)
    own = [command for command in script.commands if command.function == name]
    if function is None or not own or any(item.function == name for item in script.assignments):
        return False
    body = script.lines[function.line - 1 : max(command.end for command in own)]
    return all(command.name in _ONLY_SAYS for command in own) and not _writes("\n".join(body))


def _writes(text: str) -> bool:
    """Whether a redirection goes to a file."""
    return bool(re.search(r">(?!\s*(&\s*[12]|/dev/(null|stderr|stdout)))", text))
