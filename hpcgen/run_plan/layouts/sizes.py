"""A run on other numbers of nodes, and the numbers that Slurm accepts."""

from __future__ import annotations

from collections.abc import Sequence

from hpcgen.config.loader import Run, with_values
from hpcgen.errors import ConfigErrors, Problem
from hpcgen.planning.layouts.nodes import ladder, most_nodes
from hpcgen.planning.request import allocation_problems, make_allocation
from hpcgen.run_plan.layouts.result import NODES
from hpcgen.run_plan.plan import located_in
from hpcgen.stages.train import TRAIN


def sized(run: Run, num_nodes: int) -> Run:
    """The run on another number of nodes."""
    return with_values(run, {NODES: num_nodes}, "--nodes")


def _mistakes(run: Run) -> list[Problem]:
    """Mistakes that Slurm would refuse, such as more nodes than the partition has."""
    problems = allocation_problems(TRAIN, run.config, run.cluster, run.node_type)
    return [located_in(run, problem) for problem in problems]


def require_possible(runs: Sequence[Run]) -> None:
    """Checks the allocation of each run before the first search.

    Raises:
        ConfigErrors: Slurm would refuse them. Lists all mistakes.
    """
    if mistakes := [mistake for run in runs for mistake in _mistakes(run)]:
        raise ConfigErrors(mistakes)


def most_nodes_of(run: Run) -> int:
    """The limit of the run's jobs without spare nodes."""
    allocation = make_allocation(TRAIN, run.config, run.cluster, run.node_type)
    return max(1, most_nodes(allocation.settings, run.cluster) - allocation.spare_nodes)


def possible_runs(run: Run, fewest: int = 1) -> list[Run]:
    """The run on each number of nodes from `fewest` that Slurm accepts: those of `ladder`, and the run's own.

    Raises:
        ConfigErrors: Slurm would accept none.
    """
    most = most_nodes_of(run)
    own = make_allocation(TRAIN, run.config, run.cluster, run.node_type).nodes
    counts = sorted({*ladder(most), min(own, most)})
    sizes = [sized(run, count) for count in counts if count >= fewest]
    runs = [each for each in sizes if not _mistakes(each)]
    if not runs and fewest == 1:
        require_possible([run])
    return runs
