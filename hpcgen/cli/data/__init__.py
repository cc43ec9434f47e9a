"""hpcgen data: convert a corpus to .bin/.idx pairs, and inspect them."""

from __future__ import annotations

import click

from hpcgen.cli.lazy import LazyGroup
from hpcgen.config.stages import STAGE_ROWS

SECTIONS = {
    "Prepare": {
        "plan": "hpcgen.cli.data.plan",
        **{name: "hpcgen.cli.data.stages" for name, stage in STAGE_ROWS.items() if stage.is_array},
        "tokenize": "hpcgen.cli.data.tokenize",  # also tokenizes files that belong to no corpus
        "sample": "hpcgen.cli.data.sample",
    },
    "Inspect": {
        "status": "hpcgen.cli.data.status",
        "verify": "hpcgen.cli.data.verify",
        "inspect": "hpcgen.cli.data.inspect",
    },
    "Export": {"export": "hpcgen.cli.data.export"},
}
"""Heading of the help -> command -> module."""


@click.group("data", cls=LazyGroup, sections=SECTIONS)
def command() -> None:
    """Prepare and inspect training data.

    First plan the corpus. Then run the stages download and prepare, or download, extract, concat and tokenize.
    """
