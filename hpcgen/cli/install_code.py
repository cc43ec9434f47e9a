"""hpcgen install-code: install the Python code that compute nodes need besides their image."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click


@click.command("install-code")
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--python-version",
    metavar="X.Y",
    default=f"{sys.version_info.major}.{sys.version_info.minor}",
    help="Python version of the nodes or of the container image.  [default: the version that runs hpcgen]",
)
@click.option(
    "--architecture",
    type=click.Choice(["x86_64", "aarch64", "arm64"]),
    default="aarch64" if os.uname().sysname == "Linux" and os.uname().machine == "aarch64" else "x86_64",
    show_default=True,
    help="Instruction set of the nodes, which run Linux. arm64 is another name of aarch64.",
)
def command(directory: Path, python_version: str, architecture: str) -> None:
    """Installs hpcgen, the trainer, megatron-core and their dependencies into a new subdirectory of DIRECTORY. Prints
    the path of the subdirectory, whose name is a hash of its content. Use it as `code_dir` in a cluster profile.
    PyTorch, Transformer Engine, apex and their dependencies come from the image.
    """
    from hpcgen.install import code_dir

    machine = architecture.replace("arm64", "aarch64")
    click.echo(f"installing for Python {python_version} on {machine} into {directory}", err=True)
    with _phases() as on_phase:
        target = code_dir.install_code(directory.absolute(), python_version, on_phase, machine)
    click.echo(f"installed megatron-core {code_dir.megatron_core_version(target)}", err=True)
    click.echo(target)


@contextlib.contextmanager
def _phases() -> Iterator[Callable[[str], None]]:
    """A callback that shows the current phase on stderr: with its duration on a terminal, as a line elsewhere."""
    if not sys.stderr.isatty():
        yield lambda phase: click.echo(f"{phase} ...", err=True)
        return
    from hpcgen.cli.terminal import spinner

    with spinner() as on_phase:
        yield on_phase
