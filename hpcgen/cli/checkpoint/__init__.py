"""hpcgen checkpoint: list, inspect and manage the checkpoints of a run."""

from __future__ import annotations

import click

from hpcgen.cli.lazy import Lazy, LazyGroup

SECTIONS = {
    "Commands": {
        "list": Lazy("hpcgen.cli.checkpoint.list", "List the checkpoints of a run, newest first."),
        "inspect": Lazy("hpcgen.cli.checkpoint.inspect", "Show what a checkpoint contains."),
        "prune": Lazy(
            "hpcgen.cli.checkpoint.prune", "Remove checkpoints that the retention rules do not keep."
        ),
        "pin": Lazy("hpcgen.cli.checkpoint.pin", "Pin checkpoints, so that retention never deletes them."),
        "unpin": Lazy("hpcgen.cli.checkpoint.pin", "Unpin checkpoints, so that retention may delete them."),
        "export": Lazy("hpcgen.cli.checkpoint.export", "Write a checkpoint as a Hugging Face directory."),
        "import": Lazy(
            "hpcgen.cli.checkpoint.import_model", "Write a Hugging Face model as a checkpoint for training."
        ),
        "average": Lazy(
            "hpcgen.cli.checkpoint.average",
            "Write averaged weights of a run as a checkpoint.",
        ),
    }
}
"""Heading of the help -> command -> module and summary."""


@click.group("checkpoint", cls=LazyGroup, sections=SECTIONS)
def command() -> None:
    """Only export, import and average need torch."""
