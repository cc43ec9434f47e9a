"""The schedule of a pipeline, replayed: when each stage computes, and how long it waits for others.

The order of passes is Megatron-Core's: 1F1B with one chunk per stage, else the interleaved schedule
(megatron/core/pipeline_parallel/schedules.py). The order depends on the layout only and is kept for other durations.
Many microbatches repeat a period, so only as many are replayed as show it.

A stage waits until a result is sent, although the interleaved schedule could compute meanwhile. On two H100s, 12 chunks
of GPT 1.3B took 2.4% longer than 4, with a smaller bubble (benchmarks/planner/data/own.csv).
"""

from __future__ import annotations

import functools
import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from trainer.contract.record import record

MIN_SHOWN = 16
"""Microbatches that are replayed at least for a picture, so that steps with few are complete."""
Durations = Sequence[Sequence[float]]
"""Seconds of a pass, by stage and chunk."""


@record
class Interval:
    """One forward or backward pass of a chunk on a microbatch. Chunks and microbatches count from 0."""

    stage: int
    chunk: int
    microbatch: int
    is_forward: bool
    start: float
    end: float

    @property
    def key(self) -> tuple[int, int, int, bool]:
        """Which pass it is: stage, chunk, microbatch and direction."""
        return self.stage, self.chunk, self.microbatch, self.is_forward

    def moved(self, microbatches: int, seconds: float) -> Interval:
        """The same pass on a later microbatch."""
        return Interval(
            self.stage,
            self.chunk,
            self.microbatch + microbatches,
            self.is_forward,
            self.start + seconds,
            self.end + seconds,
        )


@record
class Timeline:
    """A replayed step, in seconds from its start. Tuples are by stage."""

    total: float
    """End of the last backward pass."""
    computing: tuple[float, ...]
    """Time of the passes."""
    transferring: tuple[float, ...]
    """Time in which a stage sends and does not compute."""
    chunk_ends: tuple[tuple[float, ...], ...]
    """End of the last backward pass of each chunk."""
    intervals: tuple[Interval, ...] = ()
    """The passes, if they were asked for, without those of rounds that repeat."""
    cut: tuple[float, float] | None = None
    """Start and end of the time whose passes are not in `intervals`, because they repeat those before it."""

    @property
    def slowest(self) -> int:
        """The stage that computes longest."""
        return max(range(len(self.computing)), key=lambda stage: self.computing[stage])

    @property
    def bubble(self) -> float:
        """Time in which the slowest stage waits for other stages."""
        return self.total - self.computing[self.slowest] - self.transferring[self.slowest]

    @property
    def ends(self) -> tuple[float, ...]:
        """End of the last backward pass of each stage."""
        return tuple(max(ends) for ends in self.chunk_ends)


class Pass(NamedTuple):
    """A forward or backward pass in the order of its stage."""

    chunk: int
    microbatch: int
    is_forward: bool


def replay(
    forward: Durations,
    backward: Durations,
    num_microbatches: int,
    transfer: Sequence[float] = (),
    *,
    with_intervals: bool = False,
) -> Timeline:
    """Replays a step.

    Args:
        forward: seconds of a forward pass, by stage and chunk.
        backward: likewise.
        num_microbatches: number of microbatches of the step.
        transfer: seconds to send a hidden state or its gradient between stage i and the next one; the last entry is for
            the last and the first stage. Default: 0. The next pass of the sending stage waits for it.
        with_intervals: also return the passes.
    """
    step = _Step(forward, backward, transfer or (0.0,) * len(forward))
    rounds, left = divmod(num_microbatches, step.num_stages)
    # In the interleaved schedule, the warm-up takes up to two rounds, and slow transfers show in the fourth.
    replayed = 4 if step.num_chunks > 1 else 2
    if with_intervals:
        replayed = max(replayed, MIN_SHOWN // step.num_stages)
    while replayed < rounds:
        short, long = (
            step.replayed(left + number * step.num_stages, with_intervals)
            for number in (replayed - 1, replayed)
        )
        if step.is_periodic(short, long):
            return step.extended(short, long, rounds - replayed)
        replayed *= 2
    return step.replayed(num_microbatches, with_intervals)


def replay_completely(
    forward: Durations, backward: Durations, num_microbatches: int, transfer: Sequence[float]
) -> Timeline:
    """Replays every pass of a step, also those that repeat."""
    return _Step(forward, backward, transfer).replayed(num_microbatches, with_intervals=True)


def least_total(
    forward: Durations, backward: Durations, num_microbatches: int, transfer: Sequence[float]
) -> float:
    """A time that no replay falls below: each stage waits until the first microbatch arrives, works without a gap, and
    ends before the stages that precede it. The arguments are those of `replay`."""
    total = before = 0.0
    last = len(forward) - 1
    for stage, (ahead, back) in enumerate(zip(forward, backward, strict=True)):
        # the last stage does not send the last chunk on, and the first stage no gradient of the first one
        sending = (len(ahead) - (stage == last)) * transfer[stage]
        sending += (len(back) - (stage == 0)) * transfer[stage - 1]
        total = max(total, before + num_microbatches * (sum(ahead) + sum(back) + sending))
        before += ahead[0] + back[0] + (transfer[stage] if stage < last else 0.0)
        before += transfer[stage - 1] if stage > 0 else 0.0
    return total


def passes(num_stages: int, stage: int, num_chunks: int, num_microbatches: int) -> list[Pass]:
    """The passes of a stage in their order: warm-up, then forward and backward in turn, then cool-down."""
    table = _forward_order(num_stages, num_chunks, num_microbatches)
    warmup = num_stages - stage - 1
    if num_chunks > 1:
        warmup = 2 * warmup + (num_chunks - 1) * num_stages
    warmup = min(warmup, len(table))
    num_steady = len(table) - warmup
    forwards = [Pass(chunk, microbatch, True) for chunk, microbatch in table]
    backwards = [Pass(num_chunks - 1 - chunk, microbatch, False) for chunk, microbatch in table]
    steady = [each for pair in zip(forwards[warmup:], backwards, strict=False) for each in pair]
    return forwards[:warmup] + steady + backwards[num_steady:]


def _forward_order(num_stages: int, num_chunks: int, num_microbatches: int) -> list[tuple[int, int]]:
    """Chunk and microbatch of each forward pass of a stage. As many microbatches as there are stages run through all
    chunks before the next ones do."""
    return [
        (chunk, microbatch)
        for first in range(0, num_microbatches, num_stages)
        for chunk in range(num_chunks)
        for microbatch in range(first, min(first + num_stages, num_microbatches))
    ]


class _Kind(NamedTuple):
    """Time of the passes of a chunk in one direction."""

    stage: int
    computing: float
    """Seconds of the pass."""
    sending: float
    """Seconds to send its result."""


@record(eq=False)
class _Step:
    """The durations of a step."""

    forward: Durations
    backward: Durations
    transfer: Sequence[float]

    @property
    def num_stages(self) -> int:
        return len(self.forward)

    @property
    def num_chunks(self) -> int:
        return len(self.forward[0])

    def replayed(self, num_microbatches: int, with_intervals: bool = False) -> Timeline:
        """The step with this number of microbatches, pass by pass."""
        graph = _graph(self.num_stages, self.num_chunks, num_microbatches)
        lasting = [kind.computing + kind.sending for kind in self._kinds]
        ends = [0.0] * (len(graph.nodes) + 1)
        for node, (before, source, kind) in enumerate(graph.nodes):
            ready, arrival = ends[before], ends[source]
            ends[node] = (ready if ready > arrival else arrival) + lasting[kind]
        chunk_ends = tuple(
            tuple(ends[node] - self._kinds[graph.nodes[node][2]].sending for node in chunks)
            for chunks in graph.last
        )
        intervals = self._intervals(graph, ends) if with_intervals else ()
        return Timeline(max(ends), *self._work(graph.counts), chunk_ends, intervals)

    def is_periodic(self, short: Timeline, long: Timeline) -> bool:
        """True if the slowest stage never waits in the last round of `long`, so that further ones take as long.

        In the first rounds, waiting stages hide a part of its work. If intervals were asked for, all stages must repeat
        their passes.
        """
        if not math.isclose(long.total - short.total, self._round_s):
            return False
        starts = {each.key: each.start for each in long.intervals}
        return all(
            math.isclose(each.start, starts[each.key], rel_tol=1e-6, abs_tol=1e-9)
            for each in self._spread(short, 1)
        )

    def extended(self, short: Timeline, long: Timeline, rounds: int) -> Timeline:
        """The step with `rounds` more rounds of microbatches than `long`."""
        later = rounds * self._round_s
        computing, transferring = (
            tuple(last + rounds * each for last, each in zip(seconds, of_round, strict=True))
            for seconds, of_round in zip(
                (long.computing, long.transferring), self._work(self._round), strict=True
            )
        )
        ends = tuple(tuple(end + later for end in ends) for ends in long.chunk_ends)
        intervals = self._spread(long, rounds)
        cut = (long.total / 2, long.total / 2 + later) if intervals else None
        return Timeline(long.total + later, computing, transferring, ends, intervals, cut)

    def _spread(self, timeline: Timeline, rounds: int) -> tuple[Interval, ...]:
        """The passes of a replayed step, of which the second half is `rounds` later."""
        seconds = rounds * self._round_s
        return tuple(
            each if each.start < timeline.total / 2 else each.moved(rounds * self.num_stages, seconds)
            for each in timeline.intervals
        )

    @property
    def _round(self) -> dict[int, int]:
        """Number of passes of each kind in a round of as many microbatches as there are stages."""
        return dict.fromkeys(range(len(self._kinds)), self.num_stages)

    @cached_property
    def _round_s(self) -> float:
        """Seconds in which the slowest stage computes and sends a round."""
        return max(map(sum, zip(*self._work(self._round), strict=True)))

    def _work(self, counts: Mapping[int, int]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """How long each stage computes and transfers, from the number of passes of each kind."""
        computing, transferring = [0.0] * self.num_stages, [0.0] * self.num_stages
        for number, count in counts.items():
            kind = self._kinds[number]
            computing[kind.stage] += count * kind.computing
            transferring[kind.stage] += count * kind.sending
        return tuple(computing), tuple(transferring)

    @cached_property
    def _kinds(self) -> list[_Kind]:
        """All kinds, in the order of `_kind_number`."""
        kinds, last = [], (self.num_stages - 1, self.num_chunks - 1)
        for stage in range(self.num_stages):
            for chunk in range(self.num_chunks):
                for seconds, link, sends in (
                    (self.forward[stage][chunk], stage, (stage, chunk) != last),
                    (self.backward[stage][chunk], stage - 1, (stage, chunk) != (0, 0)),
                ):
                    kinds.append(_Kind(stage, seconds, self.transfer[link] if sends else 0.0))
        return kinds

    def _intervals(self, graph: _Graph, ends: list[float]) -> tuple[Interval, ...]:
        found = []
        for each, (_, _, number), end in zip(graph.passes, graph.nodes, ends, strict=False):
            kind = self._kinds[number]
            start = end - kind.sending - kind.computing
            found.append(
                Interval(
                    kind.stage, each.chunk, each.microbatch, each.is_forward, start, start + kind.computing
                )
            )
        return tuple(found)


def _kind_number(num_chunks: int, stage: int, each: Pass) -> int:
    return (stage * num_chunks + each.chunk) * 2 + (not each.is_forward)


@record(eq=False)
class _Graph:
    """The passes of a step as nodes, in an order in which each node comes after those that it waits for."""

    nodes: list[tuple[int, int, int]]
    """The previous node of the stage, the node whose result it needs, and its kind. Node -1 is the start of a step."""
    passes: list[Pass]
    """The pass of each node."""
    counts: Counter[int]
    """Number of nodes of each kind."""
    last: list[list[int]]
    """Node of the last backward pass, by stage and chunk."""


@functools.lru_cache(maxsize=64)
def _graph(num_stages: int, num_chunks: int, num_microbatches: int) -> _Graph:
    todo = [deque(passes(num_stages, stage, num_chunks, num_microbatches)) for stage in range(num_stages)]
    num_positions = num_stages * num_chunks
    placed: dict[tuple[bool, int, int], int] = {}
    previous = [-1] * num_stages
    nodes: list[tuple[int, int, int]] = []
    placed_passes: list[Pass] = []

    def source(stage: int, each: Pass) -> int | None:
        """The node whose result a pass needs; None if it is not placed."""
        position = each.chunk * num_stages + stage + (-1 if each.is_forward else 1)
        if position in (-1, num_positions):
            return -1
        return placed.get((each.is_forward, position, each.microbatch))

    while any(todo):
        for stage, left in enumerate(todo):
            while left and (needed := source(stage, left[0])) is not None:
                each = left.popleft()
                position = each.chunk * num_stages + stage
                placed[each.is_forward, position, each.microbatch] = len(nodes)
                nodes.append((previous[stage], needed, _kind_number(num_chunks, stage, each)))
                placed_passes.append(each)
                previous[stage] = len(nodes) - 1
    last = [
        [placed[False, chunk * num_stages + stage, num_microbatches - 1] for chunk in range(num_chunks)]
        for stage in range(num_stages)
    ]
    return _Graph(nodes, placed_passes, Counter(kind for _, _, kind in nodes), last)
