"""Asks Slurm's commands, and other programs of the site, each with a time limit."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

from trainer.contract.record import record

TIMEOUT_S = 15.0
"""Seconds after which a program that does not answer is ended. Slurm's own timeouts take minutes."""
UNKNOWN_JOB = "Invalid job id"
"""Part of squeue's message about a job that ended a while ago."""

Settings = Mapping[str, str]
"""Settings of a cluster, as `scontrol show config` lists them."""


@record
class Answer:
    """The output of a program, or why there is no answer."""

    text: str = ""
    """Its standard output, without empty lines at the ends."""
    messages: str = ""
    """Its standard error, without blanks at the ends."""
    problem: str = ""
    """Why there is no answer; "" if there is one."""

    @property
    def lines(self) -> list[str]:
        """The lines of the standard output. Only newlines end them: the name of a job may contain other separators."""
        return self.text.split("\n") if self.text else []

    @property
    def all_lines(self) -> list[str]:
        """The lines of both outputs. Which of them a command of Slurm uses differs between releases."""
        return [*self.lines, *self.messages.splitlines()]


def ask(*command: str, given: str = "", environment: Mapping[str, str] | None = None) -> Answer:
    """Runs a command with `given` as its standard input and additional variables.

    Variables such as SQUEUE_PARTITION are left out: they would hide jobs.
    """
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("SQUEUE_", "SACCT_"))}
    try:
        done = subprocess.run(
            command,
            input=given,
            env=kept | dict(environment or {}),
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        return Answer(problem=f"{command[0]} is not installed here")
    except PermissionError:
        return Answer(problem=f"{command[0]} may not be run here")
    except subprocess.TimeoutExpired:
        return Answer(problem=f"{command[0]} does not answer within {TIMEOUT_S:.0f} s")
    answer = Answer(text=done.stdout.strip("\n"), messages=done.stderr.strip())
    if done.returncode == 0:
        return answer
    said = (answer.messages or answer.text).splitlines()
    problem = f"{command[0]} fails: {said[-1] if said else f'status {done.returncode}'}"
    return Answer(text=answer.text, messages=answer.messages, problem=problem)


def ask_settings() -> tuple[Settings, str]:
    """The settings of the cluster, and why Slurm does not tell them. A value "(null)" becomes ""."""
    answer = ask("scontrol", "show", "config")
    if answer.problem:
        return {}, answer.problem
    pairs = [line.split("=", 1) for line in answer.lines if "=" in line]
    values = {name.strip(): value.strip() for name, value in pairs}
    return {name: "" if value == "(null)" else value for name, value in values.items()}, ""


def ask_node_names(nodes: str) -> tuple[list[str], str]:
    """The names in a list such as ndv5-[1-4], and why Slurm does not understand it."""
    answer = ask("scontrol", "show", "hostnames", nodes)
    return ([], answer.problem) if answer.problem else (answer.lines, "")
