"""hpcgen layouts: find the fastest layout of a run, and the number of nodes for a deadline or a budget."""

from __future__ import annotations

from pathlib import Path

import click

from hpcgen.cli.options import json_option, run_options
from hpcgen.cli.quantities import OWN, Budget, Deadline, Nodes, Row


@click.command("layouts")
@run_options
@click.option(
    "--nodes",
    type=Nodes(),
    default=(),
    metavar="N,N,...",
    help="Numbers of nodes to compare.  [default: the run's; with a deadline or a budget, those that may meet it]",
)
@click.option(
    "--top", type=click.IntRange(1, 1000), default=10, show_default=True, help="Number of layouts to show."
)
@click.option(
    "--finish-in",
    type=Deadline(),
    metavar="TIME",
    help="Choose the fewest nodes that finish the run in this time, such as 14d, 36h or 2w.",
)
@click.option(
    "--budget",
    type=Budget(),
    metavar="N",
    help="Choose the nodes that are fastest within this price in the profile's currency, or with 50000GPUh within "
    "these GPU-hours.",
)
@click.option(
    "--compare",
    nargs=2,
    type=Row(),
    metavar="ROW ROW",
    help=f"Compare two rows of the table side by side. {OWN} is the layout of the run file.",
)
@click.option(
    "--write",
    type=Row(),
    is_flag=False,
    flag_value="1",
    metavar="[ROW]",
    help="Write the layout of this row and the number of nodes into the run file.  [default row: 1]",
)
@click.option(
    "--html",
    type=click.Path(path_type=Path),
    metavar="FILE.html",
    help="Also write a page with pictures: memory, schedule, ranks, and curves over the number of nodes; - is standard "
    "output, without the tables.",
)
@json_option
def command(
    config: Path,
    overrides: tuple[str, ...],
    nodes: tuple[int, ...],
    top: int,
    finish_in: float | None,
    budget: tuple[float, bool] | None,
    compare: tuple[str, str] | None,
    write: str | None,
    html: Path | None,
    as_json: bool,
) -> None:
    """Tries every valid layout that fits into memory: TP, PP, VPP, CP, EP and ETP, the size of microbatches, and what
    is recomputed. Batch size, length, precision, optimizer and model do not change. Needs no GPU, no Slurm and no data.
    """
    from hpcgen.cli.layouts_run import show_layouts

    show_layouts(config, overrides, nodes, top, finish_in, budget, compare, write, html, as_json=as_json)
