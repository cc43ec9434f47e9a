"""Asks programs of the site, each with a time limit."""

from __future__ import annotations

import subprocess

from trainer.contract.record import record

TIMEOUT_S = 15.0
"""Seconds after which a program that does not answer is ended."""


@record
class Answer:
    """The output of a program, or why there is no answer."""

    text: str
    problem: str = ""

    @property
    def lines(self) -> list[str]:
        """The lines of the output."""
        return self.text.splitlines()


def ask(*command: str, given: str = "") -> Answer:
    """Runs a command with `given` as its standard input. Its messages are part of the answer."""
    try:
        done = subprocess.run(
            command,
            input=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        return Answer("", f"{command[0]} is not installed here")
    except PermissionError:
        return Answer("", f"{command[0]} may not be run here")
    except subprocess.TimeoutExpired:
        return Answer("", f"{command[0]} does not answer within {TIMEOUT_S:.0f} s")
    text = done.stdout.strip()
    if done.returncode:
        last = text.splitlines()[-1] if text else f"status {done.returncode}"
        return Answer(text, f"{command[0]} fails: {last}")
    return Answer(text)
