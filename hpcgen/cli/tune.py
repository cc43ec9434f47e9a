"""hpcgen tune: measure layouts on the nodes of the training, and write the fastest into the run file."""

from __future__ import annotations

from pathlib import Path

import click

from hpcgen.cli.options import json_option, run_options, templates_option


@click.command("tune")
@run_options
@click.option(
    "--top",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Number of layouts to measure, unless tune.candidates names them.",
)
@click.option(
    "--steps", type=click.IntRange(min=1), help="Measured steps of each layout.  [default: tune.steps]"
)
@click.option("--retry", is_flag=True, help="Repeat trials that did not fit, failed or hung.")
@click.option("--no-wait", is_flag=True, help="Submit the job and return.")
@click.option("--no-write", is_flag=True, help="Leave the run file as it is.")
@click.option("--dry-run", is_flag=True, help="Show the layouts and earlier results without measuring.")
@templates_option
@json_option
def command(
    config: Path,
    overrides: tuple[str, ...],
    top: int,
    steps: int | None,
    retry: bool,
    no_wait: bool,
    no_write: bool,
    dry_run: bool,
    templates: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Measures the layouts that hpcgen layouts finds, and the run's own, in one job on the nodes of the training. The
    fastest is written into the run file. Ctrl-C leaves the job running, and the same command follows it again. A layout
    that has a result is not measured again.
    """
    from hpcgen.cli.tune_run import tune

    tune(
        config,
        overrides,
        top,
        steps,
        templates,
        retry=retry,
        no_wait=no_wait,
        no_write=no_write,
        dry_run=dry_run,
        as_json=as_json,
    )
