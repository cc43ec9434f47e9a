"""hpcgen memory: compare DeepSpeed's stages and offloads with the memory of the nodes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcgen import api
from hpcgen.cli.options import json_option, run_options, warn
from hpcgen.errors import HpcgenError

if TYPE_CHECKING:
    from hpcgen.planning.deepspeed.fit import Fit


@click.command("memory")
@run_options
@json_option
def command(config: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Lists the memory that each stage needs, with and without offload to the host and NVMe. The run file needs
    program.deepspeed with model or parameters. The estimates exclude activations.
    """
    from hpcgen.planning.deepspeed.fit import all_fits, configured_fit

    # the table shows what fits in place of a configuration that does not
    plan = api.plan(api.load_run(config, (*overrides, "memory_check=warning")))
    program = plan.config.program
    if program is None or program.deepspeed is None:
        raise HpcgenError(
            "the run has no section program.deepspeed",
            "hpcgen validate shows the estimate for hpcgen's own trainer",
            where=config,
        )
    [stage] = plan.stages.values()
    fits = list(all_fits(program.deepspeed, stage.allocation, plan.run.node_type))
    if not fits:
        raise HpcgenError(
            "program.deepspeed has neither model nor parameters",
            "set model to the model's config.json, or parameters to its number of parameters",
            where=config,
        )
    if as_json:
        click.echo(json.dumps([{**dataclasses.asdict(fit), "fits": fit.fits} for fit in fits], indent=1))
        return
    warn(plan.warnings)
    _print_table(fits, configured_fit(program.deepspeed, stage.allocation, plan.run.node_type))


def _print_table(fits: list[Fit], configured: Fit | None) -> None:
    """Prints a row for each setup. An asterisk marks the configured one."""
    from hpcgen.planning.memory import GIB

    def gib(value: float | None) -> str:
        return "?" if value is None else f"{value / GIB:,.1f}"

    click.echo("  stage  optimizer  parameters  GiB per GPU  GiB of host  GiB of NVMe  fits")
    for fit in fits:
        mark = "*" if fit == configured else " "
        needs = fit.estimate
        verdict = {True: "yes", False: "no", None: "?"}[fit.fits]
        cells = f"{gib(needs.gpu):>11}  {gib(needs.host):>11}  {gib(needs.nvme):>11}  {verdict}"
        click.echo(f"{mark} {fit.stage:>5}  {fit.offload_optimizer:<9}  {fit.offload_param:<10}  {cells}")
    click.echo(f"available{'':24}{gib(fits[0].gpu_bytes):>11}  {gib(fits[0].host_bytes):>11}")
