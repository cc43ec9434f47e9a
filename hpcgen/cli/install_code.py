"""hpcgen install-code: install the Python code that compute nodes need besides their image."""

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
    show_default="the version that runs hpcgen",
    help="Python version of the nodes or of the container image (Linux, x86_64).",
)
def command(directory: Path, python_version: str) -> None:
    """Install the Python code that compute nodes need.

    Installs hpcgen, the trainer, megatron-core and their dependencies into a new subdirectory of DIRECTORY. Prints
    the path of the subdirectory, whose name is a hash of its content. Use it as `code_dir` in a cluster profile.
    PyTorch, Transformer Engine, apex and their dependencies come from the image.
    """
    from hpcgen.install import code_dir

    click.echo(
        f"installing for Python {python_version} into {directory} (pip downloads about 40 MB)", err=True
    )
    target = code_dir.install_code(directory.absolute(), python_version)
    click.echo(f"installed megatron-core {code_dir.megatron_core_version(target)}", err=True)
    click.echo(target)
