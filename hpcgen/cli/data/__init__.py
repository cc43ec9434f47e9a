"""hpcgen data: convert a corpus to .bin/.idx pairs, and inspect them."""

from __future__ import annotations

import click

from hpcgen.cli.lazy import Lazy, LazyGroup
from hpcgen.config.stages import STAGE_ROWS

SECTIONS = {
    "Prepare": {
        "plan": Lazy("hpcgen.cli.data.plan", "List the files of the corpus and freeze them in a manifest."),
        **{
            name: Lazy("hpcgen.cli.data.stages", f"{stage.summary[0].upper()}{stage.summary[1:]}.")
            for name, stage in STAGE_ROWS.items()
            if stage.is_array
        },
        "tokenize": Lazy(
            "hpcgen.cli.data.tokenize", "Tokenize INPUT files, or the concatenated files of a corpus."
        ),  # also tokenizes files that belong to no corpus
        "sample": Lazy("hpcgen.cli.data.sample", "Write a small corpus to OUT (.jsonl or .jsonl.zst)."),
    },
    "Inspect": {
        "status": Lazy(
            "hpcgen.cli.data.status", "Show the progress of the data stages and their failed tasks."
        ),
        "verify": Lazy(
            "hpcgen.cli.data.verify", "Read .bin/.idx pairs or exports completely and report problems."
        ),
        "inspect": Lazy(
            "hpcgen.cli.data.inspect", "Show statistics of a .bin/.idx pair, or one of its documents."
        ),
    },
    "Export": {
        "export": Lazy("hpcgen.cli.data.export", "Write .bin/.idx pairs as Parquet or Arrow datasets.")
    },
}
"""Heading of the help -> command -> module and summary."""


@click.group("data", cls=LazyGroup, sections=SECTIONS)
def command() -> None:
    """First plan the corpus. Then run the stages download and prepare, or download, extract, concat and tokenize."""
