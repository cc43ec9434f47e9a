"""hpcgen bundle: pack what shows why a run failed, to send it to someone."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click

from hpcgen import api
from hpcgen.cli.run_argument import run_directory
from hpcgen.errors import HpcgenError
from hpcgen.files import private_file, publish, require_target, require_writable
from hpcgen.redaction import secret_values
from hpcgen.runs.secrets import secrets_of
from hpcgen.text import counted, harmless, size_text


@click.command("bundle")
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", metavar="FILE", type=click.Path(path_type=Path), help="Default: NAME-bundle.tar.gz."
)
def command(run: Path, output: Path | None) -> None:
    """RUN is a run directory, or a run file with the directory in paths.run_dir.

    Packs the events, the ends of the logs, stacks, metrics, configuration and node reports of the newest attempts into
    a .tar.gz that only you can read. Tokens and passwords are removed. It contains no data and no checkpoints.
    contents.json in it lists the files, and what was left out.
    """
    from hpcgen.runs.bundle import collect

    directory = run_directory(run)
    if not directory.is_dir():
        raise HpcgenError("is not a directory", "name a run directory or its run file", where=directory)
    name = directory.resolve().name
    target = output or Path(f"{name}-bundle.tar.gz")
    require_target(target)
    require_writable(target)
    try:
        bundle = collect(directory, run if run != directory else None, _secrets(run, directory), time.time())
    except OSError as error:
        raise HpcgenError(f"cannot be read ({error.strerror})", where=directory) from error
    try:
        with private_file(target) as file:
            os.fchmod(file.fileno(), 0o600)
            bundle.write(file, f"{name}-bundle")
            size = file.tell()
            publish(file, target)
    except OSError as error:
        raise HpcgenError(f"cannot be written ({error.strerror})", where=target) from error
    click.echo(f"{target}: {counted(len(bundle.members) + 1, 'file')}, {size_text(size)}")
    click.echo("left out:")
    for path, reason in bundle.left_out:
        click.echo(f"  {harmless(path)}: {reason}")
    click.echo("What looks like a secret was removed. Look through the files before you send them.")


def _secrets(run: Path, directory: Path) -> tuple[str, ...]:
    """Values of the secrets of a run, and of those that its run file names now."""
    named = api.load_run(run).config.secrets if run.is_file() else ()
    return (*secret_values(os.environ, named), *secrets_of(directory))
