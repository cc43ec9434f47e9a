"""Arguments for checkpoints and their directories, with shell completion."""

from __future__ import annotations

from pathlib import Path

import click
from click.shell_completion import CompletionItem

from trainer.contract.files.run_directory import RunDirectory


def complete_checkpoints(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """The iter_ directories in the typed directory and its `checkpoints`, or any directory if there are none."""
    typed = Path(incomplete)
    parents = [typed] if incomplete.endswith("/") else [typed.parent, typed]
    found = [
        str(path)
        for parent in parents
        for directory in (parent, parent / RunDirectory.CHECKPOINTS)
        for path in sorted(directory.glob("iter_*"))
        if path.is_dir() and str(path).startswith(incomplete.removesuffix("/"))
    ]
    return [CompletionItem(path) for path in found] or [CompletionItem(incomplete, type="dir")]


destination_option = click.option(
    "-o",
    "--to",
    "destination",
    required=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="New directory.",
)
directory_argument = click.argument(
    "directory", metavar="DIR", type=click.Path(path_type=Path), shell_complete=complete_checkpoints
)
path_argument = click.argument(
    "path", metavar="PATH", type=click.Path(path_type=Path), shell_complete=complete_checkpoints
)
paths_argument = click.argument(
    "paths",
    metavar="PATH...",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path),
    shell_complete=complete_checkpoints,
)
