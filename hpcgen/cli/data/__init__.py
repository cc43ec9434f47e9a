"""hpcgen data: from a corpus to .bin/.idx pairs."""

from __future__ import annotations

import click

from hpcgen.cli.lazy import LazyGroup

COMMANDS = {
    "plan": "hpcgen.cli.data.plan",
    "download": "hpcgen.cli.data.stages",
    "extract": "hpcgen.cli.data.stages",
    "concat": "hpcgen.cli.data.stages",
    "tokenize": "hpcgen.cli.data.tokenize",
    "prepare": "hpcgen.cli.data.stages",
    "status": "hpcgen.cli.data.status",
    "verify": "hpcgen.cli.data.verify",
    "inspect": "hpcgen.cli.data.inspect",
    "sample": "hpcgen.cli.data.sample",
}
"""Subcommand -> its module, in the order of the help."""


@click.group("data", cls=LazyGroup, commands_in=COMMANDS)
def command() -> None:
    """Prepare training data: plan, then the stages download, extract, concat and tokenize, or download and prepare."""
