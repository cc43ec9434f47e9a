"""The search: which layouts are valid and fit, and in which order they are offered.

Predictions that differ by at most SAME_SPEED count as equal, and `Preference` decides. A layout that leaves too little
memory is ranked as if it took RISK longer.
"""

from __future__ import annotations

import bisect
import functools
import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from hpcgen.planning.layouts.result import RankedLayout, Search
from hpcgen.planning.layouts.space import AXES, Space, changes
from hpcgen.planning.memory import GIB, OTHER_GIB
from hpcgen.planning.memory.parameters import total_parameter_bytes
from hpcgen.planning.predicted_step import NoPrediction, layers_are_known
from hpcgen.planning.resources import DeviceMemory, memory_of
from hpcgen.planning.setup import Setup
from hpcgen.planning.step_time import Machine
from hpcgen.planning.step_time.estimate import Estimator
from trainer.contract.rules.engine import ERRORS
from trainer.contract.rules.facts import Facts

SAME_SPEED = 0.01
"""Largest relative difference of two predicted times that count as equal."""
ROOMY = 0.1
"""Share of free memory above which more is no advantage."""
RISK = 0.05
"""Share that is added to the time of a layout that leaves too little memory: the median error of predictions
(docs/planning.md). With SAME_SPEED, a safe layout that takes 6% longer still precedes it."""


def search(facts: Facts, machine: Machine, *, top: int = 10, vary: Sequence[str] = AXES) -> Search:
    """Searches for the `top` fastest layouts of a run on its number of nodes.

    Of the layouts with the same sizes of all axes, the one with the best recomputation and division of the layers is
    offered.

    Args:
        facts: the run. Its own layout may be invalid.
        machine: its machine.
        top: number of layouts to offer.
        vary: the axes to try other values of, of `space.AXES`.

    Raises:
        NoPrediction: the time of a step, the memory of the GPUs or the vocabulary is not known.
    """
    layers_are_known(facts.model)
    if facts.device_memory_gib is None:
        raise NoPrediction("the memory of a GPU is not known. Set gpu_memory_gib in the node type")
    if facts.resolved_model.padded_vocab_size is None:
        raise NoPrediction("the size of the vocabulary is not known. Set model.vocab_size")
    tree = _Tree(facts, machine, Space(facts, vary), top)
    tree.search()
    return Search(
        num_nodes=facts.world.count,
        best=tuple(ranked([*tree.best.values()], top)),
        own=tree.own(),
        num_valid=tree.num_valid,
        num_fitting=tree.num_fitting,
    )


def ranked(layouts: Sequence[RankedLayout], top: int) -> Iterator[RankedLayout]:
    """Yields the `top` best layouts, best first."""
    left = sorted(layouts, key=seconds)
    for _ in range(min(top, len(left))):
        limit = (1 + SAME_SPEED) * seconds(left[0])
        equal = [layout for layout in left if seconds(layout) <= limit]
        chosen = min(equal, key=Preference.of)
        left.remove(chosen)
        yield chosen


def seconds(layout: RankedLayout) -> float:
    """Seconds of a step, with the cost of a risk."""
    return layout.step.total * (1 + RISK if layout.is_risky else 1)


class Preference(NamedTuple):
    """Order of layouts of the same speed. Smaller values are better, and earlier fields decide."""

    is_risky: bool
    ranks: int
    """GPUs that share a model replica."""
    is_full: bool
    """True if less than ROOMY of the memory remains."""
    chunks: int
    """Chunks of a pipeline stage."""
    seconds: float

    @classmethod
    def of(cls, layout: RankedLayout) -> Preference:
        """The values of a layout."""
        axes, is_full = layout.layout, layout.free_share < ROOMY
        chunks = axes.virtual_pipeline_model_parallel_size
        return cls(layout.is_risky, axes.model_parallel_size, is_full, chunks, seconds(layout))


Divide = Callable[[], Iterable["Branch"]]
"""Divides a branch into smaller ones."""
Branch = tuple[float, Divide]
"""Layouts that have something in common, with seconds that no step of them falls below."""


class _Tree:
    """The layouts of a search. The branch with the lowest bound is searched first, until it cannot have one of the best
    layouts."""

    def __init__(self, facts: Facts, machine: Machine, layouts: Space, top: int) -> None:
        self._facts = facts
        self._space = layouts
        self._top = top
        self._estimator = Estimator(machine)
        self.best: dict[Hashable, RankedLayout] = {}
        """The best layout with each combination of sizes."""
        self._is_enough: defaultdict[Hashable, dict[int, bool]] = defaultdict(dict)
        """True if a number of stages can hold the weights, by everything else that the weights depend on."""
        self.num_valid = 0
        self.num_fitting = 0

    def search(self) -> None:
        """Finds all layouts that may be offered."""
        number = itertools.count()
        heap: list[tuple[float, int, Divide]] = []
        todo: Iterable[Branch] = self._by_layers()
        while True:
            for bound, divide in todo:
                heapq.heappush(heap, (bound, next(number), divide))
            if not heap or heap[0][0] > self._limit:
                return
            todo = heapq.heappop(heap)[2]()

    def own(self) -> RankedLayout | None:
        """The layout of the run itself."""
        run = _Candidate(self._facts)
        return self._ranked(run) if run.is_valid and run.fits() else None

    @property
    def _limit(self) -> float:
        """Seconds of a step above which no layout is offered."""
        keys = heapq.nsmallest(self._top, map(seconds, self.best.values()))
        return (1 + SAME_SPEED) * keys[-1] if len(keys) == self._top else math.inf

    def _by_layers(self) -> Iterator[Branch]:
        for layers in self._space.layers():
            first = next(self._pipelines(layers), None)
            if first is not None:
                bound = self._estimator.least_time_of_pipelines(first.setup)
                yield bound, functools.partial(self._by_pipeline, layers)

    def _by_pipeline(self, layers: Facts) -> Iterator[Branch]:
        for run in self._pipelines(layers):
            yield self._estimator.least_time(run.setup), functools.partial(self._by_recomputation, run)

    def _pipelines(self, layers: Facts) -> Iterator[_Candidate]:
        """Yields a run with each pipeline, without recomputation. Pipelines that are too short for the weights are left
        out."""
        axes = layers.parallelism
        is_enough = self._is_enough[
            axes.tensor_model_parallel_size,
            axes.context_parallel_size,
            axes.expert_model_parallel_size,
            axes.expert_tensor_parallel_size,
        ]
        too_short = {stages for stages, enough in is_enough.items() if not enough}
        for pipeline in self._space.pipelines(layers, too_short):
            if pipeline.layout is not None:
                run = _Candidate(self._space.without_recomputation(pipeline))
                stages = pipeline.parallelism.pipeline_model_parallel_size
                if stages not in is_enough:
                    is_enough[stages] = run.fits_weights
                if is_enough[stages]:
                    yield run
                else:
                    self.num_valid = self.num_valid or int(run.is_valid)

    def _by_recomputation(self, run: _Candidate) -> Iterator[Branch]:
        """Tries a layout without recomputation. Unless it fits safely, two of each kind of recomputation follow: the
        fastest one that fits, and the fastest one that fits safely."""
        if self._try(run) or not run.is_valid:
            return
        for ways in self._space.recomputed(run.facts):
            candidates = [*map(_Candidate, ways)]
            fitting = bisect.bisect_left(candidates, True, key=_Candidate.fits)
            safe = bisect.bisect_left(candidates, True, fitting, key=_Candidate.fits_safely)
            for way in dict.fromkeys(candidates[fitting : fitting + 1] + candidates[safe : safe + 1]):
                bound = self._estimator.least_time(way.setup)
                if not self._is_known(way, bound):
                    yield bound, functools.partial(self._end, way, bound)

    def _end(self, run: _Candidate, bound: float) -> Iterable[Branch]:
        if not self._is_known(run, bound):
            self._try(run)
        return ()

    def _is_known(self, run: _Candidate, bound: float) -> bool:
        """True if a layout with the same sizes is better."""
        known = self.best.get(_identity(run.facts))
        return known is not None and seconds(known) <= bound

    def _try(self, run: _Candidate) -> bool:
        """Keeps a layout if it is valid, fits, and is the best one with its sizes. True if it fits safely."""
        if not run.is_valid:
            return False
        self.num_valid += 1
        if not run.fits():
            return False
        self.num_fitting += 1
        layout, identity = self._ranked(run), _identity(run.facts)
        if identity not in self.best or seconds(layout) < seconds(self.best[identity]):
            self.best[identity] = layout
        return not layout.is_risky

    def _ranked(self, run: _Candidate) -> RankedLayout:
        return RankedLayout(
            facts=run.facts,
            changes=changes(self._facts, run.facts),
            memory=run.memory.estimate,
            free_share=run.memory.free_gib / run.memory.available_gib,
            is_risky=not run.fits_safely(),
            step=self._estimator.step_time(run.setup),
        )


class _Candidate:
    """A run in a layout that is tried. All of its values are computed once, when they are needed."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    @cached_property
    def setup(self) -> Setup:
        """Everything that memory and time depend on. The layout must exist."""
        assert self.facts.layout is not None
        return Setup.of_facts(self.facts, self.facts.layout)

    @cached_property
    def is_valid(self) -> bool:
        """True if the run obeys all rules."""
        return not any(True for rule in ERRORS for _ in rule(self.facts))

    @cached_property
    def memory(self) -> DeviceMemory:
        """The memory of the fullest device."""
        return memory_of(self.setup, self._available_gib, self.facts.nvlink_devices)

    @property
    def fits_weights(self) -> bool:
        """False if weights, gradients and optimizer state alone do not fit, shared evenly by the pipeline stages."""
        stages = self.setup.layout.pipeline_model_parallel_size
        size = total_parameter_bytes(self.setup)
        return size / stages / GIB <= self._available_gib - OTHER_GIB

    def fits(self) -> bool:
        """True if the memory of the devices is enough."""
        return self.memory.free_gib >= 0

    def fits_safely(self) -> bool:
        """True if enough of it remains as well."""
        return not self.memory.is_tight

    @property
    def _available_gib(self) -> float:
        assert self.facts.device_memory_gib is not None
        return self.facts.device_memory_gib


def _identity(facts: Facts) -> Hashable:
    """The sizes of all axes."""
    axes = facts.parallelism
    return (
        axes.tensor_model_parallel_size,
        axes.pipeline_model_parallel_size,
        facts.parallelism.num_chunks,
        axes.context_parallel_size,
        axes.expert_model_parallel_size,
        axes.expert_tensor_parallel_size,
        facts.training.micro_batch_size,
    )
