"""The search: which layouts are valid and fit, and in which order they are offered.

Predictions that differ by at most SAME_SPEED count as equal. Of such layouts, those that leave enough memory come
first, then those with fewer ranks per model replica, then those that leave more memory. A layout that leaves too little
memory is ranked as if it took RISK longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpcgen.planning.layouts import space
from hpcgen.planning.layouts.result import RankedLayout, Search
from hpcgen.planning.predicted_step import NoPrediction, layers_are_known
from hpcgen.planning.resources import DeviceMemory, device_memory
from hpcgen.planning.setup import Setup
from hpcgen.planning.step_time import Machine, estimate_step_time
from trainer.contract.rules.engine import ERRORS
from trainer.contract.rules.facts import Facts

SAME_SPEED = 0.01
"""Largest relative difference of two predicted times that count as equal."""
RISK = 0.03
"""Share by which a safe layout may be slower than one that leaves too little memory, and still precede it."""


def search(facts: Facts, machine: Machine, *, top: int = 10, vary: Sequence[str] = space.AXES) -> Search:
    """Searches for the `top` fastest layouts of a run on its number of nodes.

    Of the layouts that differ in their recomputation only, the best one is offered.

    Args:
        facts: the run. Its own layout may be invalid.
        machine: its machine.
        top: number of layouts to offer.
        vary: the axes to try other values of, of `space.AXES`.

    Raises:
        NoPrediction: the time of a step or the memory of the GPUs is not known.
    """
    layers_are_known(facts.model)
    if facts.device_memory_gib is None:
        raise NoPrediction("the memory of a GPU is not known. Set gpu_memory_gib in the node type")
    found = _Found(facts, machine)
    best = [
        min(ways, key=_key) for layout in space.layouts(facts, vary) if (ways := found.ways(layout, vary))
    ]
    return Search(
        num_nodes=facts.world.count,
        best=tuple(ranked(best, top)),
        own=found.own(),
        num_valid=found.num_valid,
        num_fitting=found.num_fitting,
    )


def ranked(layouts: Sequence[RankedLayout], top: int) -> Iterator[RankedLayout]:
    """Yields the `top` best layouts, best first."""
    left = sorted(layouts, key=_key)
    for _ in range(min(top, len(left))):
        limit = (1 + SAME_SPEED) * _key(left[0])
        equal = [layout for layout in left if _key(layout) <= limit]
        chosen = min(equal, key=_preference)
        left.remove(chosen)
        yield chosen


def _key(layout: RankedLayout) -> float:
    """Seconds of a step, with the cost of a risk."""
    return layout.step.total * (1 + RISK if layout.is_risky else 1)


def _preference(layout: RankedLayout) -> tuple[bool, int, float]:
    """Smaller values first, among layouts of the same speed."""
    return layout.is_risky, layout.layout.model_parallel_size, -layout.free_share


class _Found:
    """The layouts of a search, counted."""

    def __init__(self, facts: Facts, machine: Machine) -> None:
        self._facts = facts
        self._machine = machine
        self.num_valid = 0
        self.num_fitting = 0

    def own(self) -> RankedLayout | None:
        """The layout of the run itself."""
        memory = device_memory(self._facts) if _is_valid(self._facts) else None
        return None if memory is None or memory.free_gib < 0 else self._ranked(self._facts, memory)

    def ways(self, facts: Facts, vary: Sequence[str]) -> list[RankedLayout]:
        """A layout with each kind of recomputation that fits."""
        fitting = []
        for changed in space.recomputed(facts, vary):
            if not _is_valid(changed):
                continue
            self.num_valid += 1
            memory = device_memory(changed)
            if memory is not None and memory.free_gib >= 0:
                self.num_fitting += 1
                fitting.append(self._ranked(changed, memory))
        return fitting

    def _ranked(self, facts: Facts, memory: DeviceMemory) -> RankedLayout:
        assert facts.layout is not None
        return RankedLayout(
            facts=facts,
            changes=space.changes(self._facts, facts),
            memory=memory.estimate,
            free_share=memory.free_gib / memory.available_gib,
            is_risky=memory.is_tight,
            step=estimate_step_time(Setup.of_facts(facts, facts.layout), self._machine),
        )


def _is_valid(facts: Facts) -> bool:
    return not any(True for rule in ERRORS for _ in rule(facts))
