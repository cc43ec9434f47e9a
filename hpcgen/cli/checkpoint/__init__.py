"""hpcgen checkpoint: the checkpoints of a run: which there are, what each holds, which may go."""

from __future__ import annotations

import click

from hpcgen.cli.lazy import LazyGroup

COMMANDS = {
    "list": "hpcgen.cli.checkpoint.list",
    "inspect": "hpcgen.cli.checkpoint.inspect",
    "prune": "hpcgen.cli.checkpoint.prune",
    "pin": "hpcgen.cli.checkpoint.pin",
    "unpin": "hpcgen.cli.checkpoint.pin",
}
"""Subcommand -> its module, in the order of the help."""


@click.group("checkpoint", cls=LazyGroup, commands_in=COMMANDS)
def command() -> None:
    """List, inspect, verify, prune and pin the checkpoints of a run; no torch is needed."""
