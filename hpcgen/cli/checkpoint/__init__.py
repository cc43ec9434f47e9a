"""hpcgen checkpoint: list, inspect and manage the checkpoints of a run."""

from __future__ import annotations

import click

from hpcgen.cli.lazy import LazyGroup

SECTIONS = {
    "Commands": {
        "list": "hpcgen.cli.checkpoint.list",
        "inspect": "hpcgen.cli.checkpoint.inspect",
        "prune": "hpcgen.cli.checkpoint.prune",
        "pin": "hpcgen.cli.checkpoint.pin",
        "unpin": "hpcgen.cli.checkpoint.pin",
        "export": "hpcgen.cli.checkpoint.export",
        "import": "hpcgen.cli.checkpoint.import_model",
    }
}
"""Heading of the help -> command -> module."""


@click.group("checkpoint", cls=LazyGroup, sections=SECTIONS)
def command() -> None:
    """List, inspect, prune, pin and convert checkpoints.

    Only export and import need torch.
    """
