"""Exposure of data parallelism: the reduction of gradients and the gathering of weights that no computation hides.

Source of the order: megatron/core/distributed and pipeline_parallel/schedules.py. Each chunk is reduced and gathered at
once, except the first one of the first stage: no other stage hides its transfers, so it has several buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from hpcgen.planning.memory.parameters import table_parameter_count, trained_parameter_counts
from hpcgen.planning.setup import Setup
from hpcgen.planning.step_time.collectives import Group, Groups, Links
from hpcgen.planning.step_time.pipeline import Durations, Timeline
from trainer.contract.record import record

BUCKET_PARAMETERS = 40_000_000
BUCKET_PARAMETERS_PER_RANK = 1_000_000
"""Size of a bucket: at least the first number, and the second one per data-parallel rank."""


@record
class DataParallel:
    """Exposed seconds of a step."""

    reduction: float
    """From the last backward pass until all gradients are reduced."""
    gather: float
    """Waiting for weights."""

    @property
    def total(self) -> float:
        """Both."""
        return self.reduction + self.gather


def data_parallel_time(
    setup: Setup, forward: Durations, backward: Durations, timeline: Timeline, links: Links
) -> DataParallel:
    """The exposure of a step whose passes have these durations, by stage and chunk."""
    traffic = _Traffic(setup, links, Groups.of(setup.layout, links.machine.nvlink_devices))
    weights = [_stage_weights(setup, stage) for stage in range(len(forward))]
    reductions, gathers = _by_chunk(traffic.reduction, weights), _by_chunk(traffic.gather, weights)
    buckets = traffic.num_buckets(weights[0][0])
    bucket = Weights(weights[0][0].dense / buckets, weights[0][0].experts / buckets)
    if not setup.parallelism.overlap_grad_reduce:
        reduction = _after_backward(reductions, timeline)
    else:
        reductions[0][0] = buckets * traffic.reduction(bucket)
        reduction = _during_backward(reductions, buckets, backward, timeline, links)
    if not setup.parallelism.overlap_param_gather:
        gather = max(map(sum, gathers))
    else:
        gathers[0][0] = buckets * traffic.gather(bucket)
        gather = _during_forward(gathers, buckets, forward, links)
    return DataParallel(max(0.0, reduction) + _tied_embedding(traffic), max(0.0, gather))


def least_reductions(setup: Setup, links: Links) -> list[float]:
    """Seconds of the reductions that follow the last backward pass of each of the first two stages."""
    traffic = _Traffic(setup, links, Groups.of(setup.layout, links.machine.nvlink_devices))
    first, *second = (
        _stage_weights(setup, stage) for stage in range(min(2, setup.layout.pipeline_model_parallel_size))
    )
    if not setup.parallelism.overlap_grad_reduce:
        return [sum(map(traffic.reduction, weights)) for weights in (first, *second)]
    buckets = traffic.num_buckets(first[0])
    bucket = Weights(first[0].dense / buckets, first[0].experts / buckets)
    return [traffic.reduction(bucket), *(traffic.reduction(weights[0]) for weights in second)]


class Weights(NamedTuple):
    """Parameters of a model chunk on one rank."""

    dense: float
    """Parameters outside experts."""
    experts: float


class WeightTransfers(NamedTuple):
    """Seconds of the reductions and gathers of a stage."""

    dense: float
    experts: float
    tied_embedding: float
    """Sum of the gradients of an embedding that the first and the last stage share; 0 on other stages."""


def weight_transfers(setup: Setup, links: Links, stage: int) -> WeightTransfers:
    """The transfers of data parallelism in a step, whether computation hides them or not."""
    traffic = _Traffic(setup, links, Groups.of(setup.layout, links.machine.nvlink_devices))
    dense, experts = map(sum, zip(*_stage_weights(setup, stage), strict=True))
    of_dense, of_experts = (
        traffic.reduction(part) + traffic.gather(part)
        for part in (Weights(dense, 0.0), Weights(0.0, experts))
    )
    is_end = stage in (0, setup.layout.pipeline_model_parallel_size - 1)
    return WeightTransfers(of_dense, of_experts, _tied_embedding(traffic) if is_end else 0.0)


def _stage_weights(setup: Setup, stage: int) -> list[Weights]:
    """The weights of each chunk of a stage, as if all its layers were equal."""
    counts = trained_parameter_counts(setup)[stage]
    numbers = [len(layers) for layers in setup.layout.layers_of_stage(stage)]
    shares = [number / max(1, sum(numbers)) for number in numbers]
    tables = [0.0] * len(numbers)
    tables[0 if stage == 0 else -1] = counts.tables
    return [
        Weights(table + share * counts.layers, share * counts.experts)
        for table, share in zip(tables, shares, strict=True)
    ]


def _tied_embedding(traffic: _Traffic) -> float:
    """Seconds to sum the gradients of an embedding that the first and the last stage share, after the reduction."""
    setup, pipeline = traffic.setup, traffic.groups.pipeline
    is_alone = pipeline.size == 1 or setup.model.untie_embeddings_and_output_weights
    if is_alone or not setup.trains_weights:
        return 0.0
    ends = Group(2, 1 if pipeline.crosses_network else 2)
    return traffic.links.all_reduce(table_parameter_count(setup) * setup.gradient_bytes, ends)


@record
class _Traffic:
    """Seconds of the collectives of a chunk."""

    setup: Setup
    links: Links
    groups: Groups

    def reduction(self, weights: Weights) -> float:
        """Sums the gradients of a chunk."""
        groups, size = self.groups, self.setup.gradient_bytes
        return self._reduction(weights.dense * size, groups.data) + self._reduction(
            weights.experts * size, groups.expert_data
        )

    def gather(self, weights: Weights) -> float:
        """Gathers the weights of a chunk after the optimizer's step."""
        if not self.is_sharded:
            return 0.0
        size = self.setup.value_bytes
        return self.links.all_gather(weights.dense * size, self.groups.data) + self.links.all_gather(
            weights.experts * size, self.groups.expert_data
        )

    def num_buckets(self, weights: Weights) -> int:
        """Buckets of a chunk that is reduced in buckets."""
        bucket = max(BUCKET_PARAMETERS, BUCKET_PARAMETERS_PER_RANK * self.groups.data.size)
        return max(1, round((weights.dense + weights.experts) / bucket))

    @property
    def is_sharded(self) -> bool:
        """True if each rank updates a part of the weights."""
        return self.setup.optimizer.sharding == "distributed"

    def _reduction(self, size: float, group: Group) -> float:
        links = self.links
        if not self.is_sharded:
            return links.all_reduce(size, group, in_switches=self.setup.parallelism.use_sharp)
        return links.reduce_scatter(size, group) + links.all_reduce(size / group.size, self.groups.instances)


def _by_chunk(seconds: Callable[[Weights], float], weights: Sequence[Sequence[Weights]]) -> list[list[float]]:
    """The time of a collective of each chunk, by stage. Most chunks are equal."""
    known = {each: seconds(each) for each in {each for chunks in weights for each in chunks}}
    return [[known[each] for each in chunks] for chunks in weights]


def _after_backward(reductions: Durations, timeline: Timeline) -> float:
    """Seconds from the last backward pass until all stages have reduced their gradients."""
    ends = [end + sum(chunks) for end, chunks in zip(timeline.ends, reductions, strict=True)]
    return max(ends) - timeline.total


def _during_backward(
    reductions: Durations, buckets: int, backward: Durations, timeline: Timeline, links: Links
) -> float:
    """Likewise, if each chunk is reduced when the last microbatch has left it."""
    last = 0.0
    for stage, end in enumerate(timeline.ends):
        at = beside = 0.0
        for ready, seconds in _ready(stage, reductions[stage], buckets, backward[stage], timeline):
            start = max(at, ready)
            at = start + seconds
            beside += max(0.0, min(at, end) - start)
        last = max(last, max(at, end) + links.added(beside, beside))
    return last - timeline.total


def _ready(
    stage: int, reductions: Sequence[float], buckets: int, backward: Sequence[float], timeline: Timeline
) -> Iterator[tuple[float, float]]:
    """Yields when each reduction of a stage can start, and its seconds."""
    for chunk in reversed(range(len(reductions))):
        left, seconds = timeline.chunk_ends[stage][chunk], reductions[chunk]
        if stage == chunk == 0:
            for later in reversed(range(buckets)):
                yield left - backward[chunk] * later / buckets, seconds / buckets
        else:
            # All stages start at the same time: a stage waits for as many passes as there are stages before it.
            yield min(timeline.ends[stage], left + stage * backward[chunk]), seconds


def _during_forward(gathers: Durations, buckets: int, forward: Durations, links: Links) -> float:
    """Seconds by which the gathering of weights delays the first microbatch, and with it the step.

    All stages start it with the step, in the order of their chunks. Each chunk waits for its weights.
    """
    first, later = gathers[0][0] / buckets, gathers[0][0] * (buckets - 1) / buckets
    hidden = min(later, forward[0][0])
    passed = first + max(forward[0][0], later) + links.added(hidden, hidden)
    gathered = [0.0] * len(gathers)
    for chunk in range(len(gathers[0])):
        for stage, of_chunks in enumerate(gathers):
            gathered[stage] += of_chunks[chunk]
            if (stage, chunk) != (0, 0):
                passed = max(passed, gathered[stage]) + forward[stage][chunk]
    return passed - sum(map(sum, forward))
