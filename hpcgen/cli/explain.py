"""hpcgen explain: print each environment variable of a stage with its value, layer, origin and reason."""

from __future__ import annotations

from pathlib import Path

import click

from hpcgen.cli.options import StageChoice, json_option, run_or_cluster_options


@click.command("explain")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@run_or_cluster_options
@click.option(
    "--stage",
    type=StageChoice(),
    metavar="STAGE",
    help="Stage; see hpcgen render --help.  [default: as for hpcgen validate]",
)
@click.option(
    "--diff",
    "other",
    metavar="OTHER",
    help="Show the differences from OTHER: a script that an older hpcgen rendered, the run directory of hpcgen submit, "
    "an older version such as 0.2.0, another run file, or with --cluster another profile. --set does not apply to "
    "other run files.",
)
@json_option
def command(
    names: tuple[str, ...],
    config: Path | None,
    cluster: str | None,
    run_dir: str | None,
    overrides: tuple[str, ...],
    stage: str | None,
    other: str | None,
    as_json: bool,
) -> None:
    """For example: hpcgen explain -c run.yaml 'NCCL_*'

    For each variable, prints the value, the layer and file that set it, the reason, and the values it overrides.
    NAME may contain * and ?. Default: all variables.
    """
    from hpcgen.cli.explain_run import show_explanation

    show_explanation(names, config, cluster, run_dir, overrides, stage, other, as_json=as_json)
