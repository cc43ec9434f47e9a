"""hpcgen render: render the batch script of one stage."""

from __future__ import annotations

from pathlib import Path

import click

from hpcgen import api
from hpcgen.cli.options import (
    StageChoice,
    read_run,
    run_or_cluster_options,
    stage_list,
    templates_option,
    warn,
    write_output,
)


@click.command("render", epilog=stage_list())
@click.argument("stage", type=StageChoice(), metavar="STAGE")
@run_or_cluster_options
@templates_option
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default="-",
    help="File to write, atomically.  [default: -, standard output]",
)
def command(
    stage: str,
    config: Path | None,
    cluster: str | None,
    run_dir: str | None,
    overrides: tuple[str, ...],
    templates: tuple[Path, ...],
    output: Path,
) -> None:
    """\b
    hpcgen render train -c run.yaml | sbatch
    hpcgen render nccl-test --cluster azure-ndv5 | sbatch

    Stages that need no run file, such as nccl-test, need only a cluster profile.
    """
    plan = api.plan(read_run(stage, config, cluster, run_dir, overrides), [stage])
    script = api.render(plan, stage, templates)
    warn(plan.warnings)
    unset = api.unset_secrets(plan)
    warn(
        tuple(
            f"{name} is listed as a secret but not set in this shell. Export it before sbatch"
            for name in unset
        )
    )
    if not Path(plan.config.paths.run_dir).is_dir():
        warn(
            (
                f"run directory {plan.config.paths.run_dir} does not exist. Create it before sbatch, "
                "or the job fails without a log",
            )
        )
    write_output(output, script, mode=0o755)
