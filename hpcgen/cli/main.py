"""The `hpcgen` command: which subcommands there are, and how a user's mistake ends."""

from __future__ import annotations

import errno
import gc
import os
import sys
from collections.abc import Sequence

import click

from hpcgen.cli.lazy import LazyGroup
from hpcgen.errors import HpcgenError, JobFailed
from hpcgen.text import harmless
from hpcgen.version import __version__

COMMANDS = {
    "init": "hpcgen.cli.init",
    "validate": "hpcgen.cli.validate",
    "render": "hpcgen.cli.render",
    "submit": "hpcgen.cli.submit",
    "lint": "hpcgen.cli.lint",
    "explain": "hpcgen.cli.explain",
    "env": "hpcgen.cli.env",
    "cluster": "hpcgen.cli.cluster",
    "topology": "hpcgen.cli.topology",
    "templates": "hpcgen.cli.templates",
    "presets": "hpcgen.cli.presets",
    "data": "hpcgen.cli.data",
    "checkpoint": "hpcgen.cli.checkpoint",
    "report": "hpcgen.cli.report",
    "schema": "hpcgen.cli.schema",
    "install-code": "hpcgen.cli.install_code",
    "completion": "hpcgen.cli.completion",
}
"""Subcommand -> its module, in the order of the help."""
_ALLOCATIONS_BEFORE_COLLECTION = 50_000
"""Python's default, 700, costs `render` 15 ms of walking objects that stay until the process ends."""


@click.group(cls=LazyGroup, commands_in=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hpcgen")
def cli() -> None:
    """Slurm batch scripts and a Megatron-Core trainer for GPT-class models.

    A first run: hpcgen init, edit run.yaml, hpcgen validate -c run.yaml, hpcgen render train -c run.yaml | sbatch
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and ends the process: 0, 1 for a job that failed, 2 for a user's mistake."""
    gc.set_threshold(_ALLOCATIONS_BEFORE_COLLECTION)
    color = (
        False if os.environ.get("NO_COLOR") else None
    )  # https://no-color.org; None asks whether it is a terminal
    try:
        status = cli.main(args=arguments, prog_name="hpcgen", standalone_mode=False, color=color)
    except HpcgenError as error:
        messages = error.mistakes
        for message in messages:
            click.secho(harmless(message, keep="\n\t"), fg="red", err=True, color=color)
        if len(messages) > 1:
            click.echo(f"{len(messages)} mistakes; nothing was written or submitted", err=True)
        sys.exit(2)
    except JobFailed as failure:
        click.secho(str(failure), fg="red", err=True, color=color)
        sys.exit(1)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        click.echo("interrupted", err=True)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of a pipe went away: not our mistake
        sys.exit(141)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO, errno.EDQUOT):
            raise  # ours: with its traceback
        click.secho(f"cannot write: {error.strerror}", fg="red", err=True, color=color)
        os._exit(1)  # not through the interpreter's end, which would try to flush what cannot be written
    sys.exit(status if isinstance(status, int) else 0)
