"""The `hpcgen` command: its subcommands, and how errors become messages and exit statuses."""

from __future__ import annotations

import errno
import gc
import io
import os
import sys
from collections.abc import Sequence

import click

from hpcgen.cli.lazy import Lazy, LazyGroup
from hpcgen.errors import FileErrors, HpcgenError, JobFailed
from hpcgen.text import counted, harmless
from hpcgen.version import __version__
from trainer.contract.files.regular_file import IrregularFileError

SECTIONS = {
    "Start": {
        "init": Lazy("hpcgen.cli.init", "Write a commented run file to PATH."),
        "presets": Lazy("hpcgen.cli.presets", "List the model presets and their parameter counts."),
        "schema": Lazy("hpcgen.cli.schema", "Print the JSON Schema of a run file or of a cluster's file."),
        "completion": Lazy("hpcgen.cli.completion", "Print the completion script for bash, zsh or fish."),
    },
    "Run": {
        "validate": Lazy("hpcgen.cli.validate", "Check a run file and summarize what its stages would do."),
        "layouts": Lazy(
            "hpcgen.cli.layouts", "Find the fastest layout, and how many nodes a deadline needs."
        ),
        "render": Lazy("hpcgen.cli.render", "Render the batch script of one stage."),
        "tune": Lazy("hpcgen.cli.tune", "Measure layouts on the nodes of a run, and keep the fastest."),
        "submit": Lazy("hpcgen.cli.submit", "Submit stages to Slurm, or run them on this machine."),
        "env": Lazy("hpcgen.cli.env", "Print a stage's environment for use in your own scripts."),
        "generate": Lazy("hpcgen.cli.generate", "Continue prompts with a trained model."),
    },
    "Data": {
        "data": Lazy("hpcgen.cli.data", "Prepare and inspect training data."),
        "checkpoint": Lazy("hpcgen.cli.checkpoint", "List, inspect, prune, pin and convert checkpoints."),
    },
    "Inspect": {
        "report": Lazy("hpcgen.cli.report", "Summarize training runs in one HTML file."),
        "answers": Lazy("hpcgen.cli.answers", "Show what a model answered while it trained."),
        "explain": Lazy("hpcgen.cli.explain", "Explain where a stage's environment variables come from."),
        "memory": Lazy("hpcgen.cli.memory", "Show which of DeepSpeed's ZeRO stages fit the nodes."),
        "lint": Lazy("hpcgen.cli.lint", "Check batch scripts for mistakes without running them."),
    },
    "Operate": {
        "status": Lazy("hpcgen.cli.status", "Show what runs do, and why they ended."),
        "runs": Lazy("hpcgen.cli.runs", "List runs below a directory, or those of a job or a node."),
        "logs": Lazy("hpcgen.cli.logs", "Show the root failure of a run and the lines of its ranks."),
        "ledger": Lazy("hpcgen.cli.ledger", "Show where the time of runs went."),
        "stop": Lazy("hpcgen.cli.stop", "Ask a run to save a checkpoint and to leave the queue."),
        "cancel": Lazy("hpcgen.cli.cancel", "Cancel all jobs of a run."),
        "resume": Lazy("hpcgen.cli.resume", "Submit a run again, as its last job was submitted."),
        "doctor": Lazy("hpcgen.cli.doctor", "Name what is wrong with a run or a cluster, and the fix."),
        "sweep": Lazy("hpcgen.cli.sweep", "Train several variants of a run, and compare them."),
        "bundle": Lazy("hpcgen.cli.bundle", "Pack what shows why a run failed, to send it to someone."),
    },
    "Cluster": {
        "cluster": Lazy("hpcgen.cli.cluster", "List, show, check and upgrade cluster profiles."),
        "topology": Lazy("hpcgen.cli.topology", "Show, draw and verify node types."),
        "templates": Lazy("hpcgen.cli.templates", "List, override and check job script templates."),
        "install-code": Lazy("hpcgen.cli.install_code", "Install the Python code that compute nodes need."),
    },
}
"""Heading of the help -> command -> module and summary."""
_UNUSABLE_PATH = (errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR)
"""Errors of a path that no file can have."""
_ALLOCATIONS_BEFORE_COLLECTION = 50_000
"""With Python's default of 700, the cyclic GC costs `render` 15 ms: it walks objects that stay in use until exit."""


@click.group(
    cls=LazyGroup,
    sections=SECTIONS,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="hpcgen")
def cli() -> None:
    """Slurm batch scripts and a Megatron-Core trainer for GPT-class models.

    \b
    A first run:
      hpcgen init                      (then edit run.yaml)
      hpcgen validate -c run.yaml
      hpcgen render train -c run.yaml | sbatch
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and exits: 0 on success, 1 if a job failed, 2 for a mistake in the input."""
    gc.set_threshold(_ALLOCATIONS_BEFORE_COLLECTION)
    color = (
        False if os.environ.get("NO_COLOR") else None
    )  # https://no-color.org; None lets Click detect a terminal
    try:
        status = cli.main(args=arguments, prog_name="hpcgen", standalone_mode=False, color=color)
    except HpcgenError as error:
        for mistake in error.mistakes:
            click.secho(harmless(str(mistake), keep="\n\t"), fg="red", err=True, color=color)
        if conclusion := _conclusion(error):
            click.echo(conclusion, err=True)
        sys.exit(2)
    except PermissionError as error:
        if error.filename is None:
            raise
        from hpcgen.files import without_access

        click.secho(harmless(without_access(error)), fg="red", err=True, color=color)
        sys.exit(2)
    except JobFailed as failure:
        click.secho(str(failure), fg="red", err=True, color=color)
        sys.exit(1)
    except click.ClickException as error:
        usage = io.StringIO()
        error.show(usage)
        click.echo(harmless(usage.getvalue(), keep="\n\t"), nl=False, err=True)
        sys.exit(error.exit_code)
    except click.Abort:
        click.echo("interrupted", err=True)
        sys.exit(130)
    except MemoryError:
        click.secho(
            "out of memory; run it where it has more (a job's --mem, ulimit -v)",
            fg="red",
            err=True,
            color=color,
        )
        sys.exit(1)
    except BrokenPipeError:
        sys.stderr.close()  # the reader closed the pipe, which is not an error
        sys.exit(141)
    except IrregularFileError as error:
        click.secho(harmless(str(error)), fg="red", err=True, color=color)
        sys.exit(2)
    except OSError as error:
        if error.filename is not None and error.errno in _UNUSABLE_PATH:
            shown = f"{error.filename}: {error.strerror}"
            click.secho(harmless(shown), fg="red", err=True, color=color)
            sys.exit(2)
        if error.errno not in (errno.ENOSPC, errno.EIO, errno.EDQUOT):
            raise  # a bug in hpcgen: keep the traceback
        click.secho(f"cannot write: {error.strerror}", fg="red", err=True, color=color)
        os._exit(1)  # sys.exit would flush the buffers, which fails again
    sys.exit(status if isinstance(status, int) else 0)


def _conclusion(error: HpcgenError) -> str:
    """The line after the mistakes, "" for a single one without a second round of checks."""
    number = len(error.mistakes)
    if isinstance(error, FileErrors):
        corrected = "it is corrected" if number == 1 else "they are corrected"
        return f"{counted(number, 'mistake')} in keys and values; the rules are checked when {corrected}"
    return f"{number} mistakes; nothing was written or submitted" if number > 1 else ""
