"""`hpcgen install-code`: the code that compute nodes need besides their image, in one directory."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command("install-code")
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--python-version",
    metavar="X.Y",
    default=f"{sys.version_info.major}.{sys.version_info.minor}",
    show_default="the running one",
    help="The Python of the nodes or of the container image (Linux, x86_64).",
)
def command(directory: Path, python_version: str) -> None:
    """Put hpcgen, the trainer, megatron-core and their needs into a new directory below DIRECTORY.

    Its path, named by its content, is printed: it is the `code_dir` of a cluster profile. PyTorch,
    Transformer Engine, apex and what comes with them stay the image's.
    """
    from hpcgen.install import code_dir

    click.echo(f"installing for Python {python_version} into {directory} (pip fetches about 40 MB)", err=True)
    click.echo(code_dir.install_code(directory.absolute(), python_version))
