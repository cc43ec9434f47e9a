"""Result of a search on several numbers of nodes: layouts, times and costs, and the number that meets a goal."""

from __future__ import annotations

from typing import Literal

from hpcgen.config.loader import Run, with_values
from hpcgen.planning.layouts.result import RankedLayout, Search
from hpcgen.planning.run_time import RunTime
from hpcgen.planning.step_time.machine import Machine
from hpcgen.run_plan.prediction import Prediction
from trainer.contract.record import record

NODES = "slurm.train.nodes"
"""The key that a number of nodes replaces."""
TIME_LIMIT = "slurm.train.time"
ORIGIN = "hpcgen layouts"
"""The place of values that the search chose, for messages."""
Kind = Literal["time", "cost", "gpu_hours"]


@record
class Goal:
    """Upper limit for the rest of a run."""

    of: Kind
    limit: float
    """Seconds, an amount in the profile's currency, or GPU-hours."""

    def value(self, prediction: Prediction, times: RunTime | None = None) -> float:
        """The time, cost or GPU-hours of a run with some of its predicted times. Default: the likely ones.

        With a goal of cost, the profile has a price.
        """
        times = times or prediction.likely
        return {
            "time": times.total_s,
            "cost": prediction.cost(times) or 0.0,
            "gpu_hours": times.gpu_hours,
        }[self.of]

    def is_met(self, prediction: Prediction) -> bool:
        """True if the likely value is within the limit."""
        return self.value(prediction) <= self.limit


@record(kw_only=True)
class NodesLayouts:
    """The layouts of a run on one number of nodes."""

    run: Run
    """The run on these nodes, with its own layout."""
    machine: Machine
    search: Search
    prediction: Prediction | None
    """The run with the first layout. None if no layout fits, or for the reason `no_prediction`."""
    no_prediction: str = ""

    @property
    def num_nodes(self) -> int:
        """Number of nodes that train, without spare ones."""
        return self.search.num_nodes

    @property
    def num_gpus(self) -> int:
        """Number of GPUs that train."""
        return self.num_nodes * self.machine.gpus_per_node

    @property
    def first(self) -> RankedLayout | None:
        """The fastest layout; None if none fits."""
        return next(iter(self.search.best), None)


@record(kw_only=True)
class RunLayouts:
    """The layouts of a run on all numbers of nodes that were tried."""

    run: Run
    on: tuple[NodesLayouts, ...]
    """In ascending order of the number of nodes. On at least one of them, a layout fits."""
    goal: Goal | None
    chosen: NodesLayouts | None
    """With a deadline, the fewest nodes that meet it. With a budget, the nodes that are fastest within it. Otherwise,
    the only number of nodes. None if no number meets the goal, or if there are several numbers and no goal."""

    @property
    def closest(self) -> NodesLayouts:
        """The number of nodes that comes closest to the goal: the fastest, or the cheapest with a budget."""
        assert self.goal is not None
        values = {self.goal.value(each.prediction): each for each in self.on if each.prediction is not None}
        return values[min(values)]


def with_layout(run: Run, layout: RankedLayout) -> Run:
    """The run with another layout."""
    return with_values(run, layout.changes, ORIGIN)
