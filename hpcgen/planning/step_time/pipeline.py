"""The schedule of a pipeline, replayed: when each stage computes, and how long it waits for others.

The order of passes is Megatron-Core's: 1F1B with one chunk per stage, else the interleaved schedule
(megatron/core/pipeline_parallel/schedules.py). Many microbatches repeat a period, so only as many are replayed as show
it.

A stage waits until a result is sent, although the interleaved schedule could compute meanwhile. On two H100s, 12 chunks
of GPT 1.3B took 2.4% longer than 4, with a smaller bubble (benchmarks/planner/data/own.csv).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
        """Identity of the pass: stage, chunk, microbatch and direction."""
        return self.stage, self.chunk, self.microbatch, self.is_forward

    def moved(self, microbatches: int, seconds: float) -> Interval:
        """This pass on a later microbatch."""
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
        long = _Replay(step, left + replayed * step.num_stages)
        short = _Replay(step, left + (replayed - 1) * step.num_stages, long)
        # If the slowest stage never waits in the last round, further rounds take as long. In the first rounds, waiting
        # stages hide a part of its work.
        if math.isclose(long.total - short.total, step.round_s):
            timeline = long.timeline(with_intervals=with_intervals)
            if not with_intervals or _is_repeated(short.timeline(with_intervals=True), timeline, step):
                return _extended(timeline, step, rounds - replayed)
        replayed *= 2
    return _Replay(step, num_microbatches).timeline(with_intervals=with_intervals)


def replay_completely(
    forward: Durations, backward: Durations, num_microbatches: int, transfer: Sequence[float]
) -> Timeline:
    """Replays every pass of a step, also those that repeat."""
    return _Replay(_Step(forward, backward, transfer), num_microbatches).timeline(with_intervals=True)


def _is_repeated(short: Timeline, long: Timeline, step: _Step) -> bool:
    """True if all stages of `long` repeat the passes of `short` in the round that it has in addition."""
    starts = {each.key: each.start for each in long.intervals}
    return all(
        math.isclose(each.start, starts[each.key], rel_tol=1e-6, abs_tol=1e-9)
        for each in _spread(short, step, 1)
    )


def _extended(timeline: Timeline, step: _Step, rounds: int) -> Timeline:
    """A step with `rounds` more rounds of microbatches."""
    later = rounds * step.round_s
    computing, transferring = (
        tuple(last + each for last, each in zip(seconds, added, strict=True))
        for seconds, added in zip(
            (timeline.computing, timeline.transferring), step.work(rounds * step.num_stages), strict=True
        )
    )
    ends = tuple(tuple(end + later for end in ends) for ends in timeline.chunk_ends)
    intervals = _spread(timeline, step, rounds)
    cut = (timeline.total / 2, timeline.total / 2 + later) if intervals else None
    return Timeline(timeline.total + later, computing, transferring, ends, intervals, cut)


def _spread(timeline: Timeline, step: _Step, rounds: int) -> tuple[Interval, ...]:
    """The passes of a step, of which the second half is `rounds` later."""
    return tuple(
        each
        if each.start < timeline.total / 2
        else each.moved(rounds * step.num_stages, rounds * step.round_s)
        for each in timeline.intervals
    )


def least_ends(
    forward: Durations, backward: Durations, num_microbatches: int, transfer: Sequence[float]
) -> list[float]:
    """Times before which no stage has ended and sent its last gradient, in any replay with these arguments.

    A stage waits until the first microbatch arrives, works without a gap, and ends before the stage that precedes it.
    """
    work, filled, last = [], 0.0, len(forward) - 1
    for stage, (ahead, back) in enumerate(zip(forward, backward, strict=True)):
        # the last stage does not send the last chunk on, and the first stage no gradient of the first one
        sending = (len(ahead) - (stage == last)) * transfer[stage]
        sending += (len(back) - (stage == 0)) * transfer[stage - 1]
        work.append(filled + num_microbatches * (sum(ahead) + sum(back) + sending))
        filled += ahead[0] + transfer[stage]
    ends = work
    for stage in reversed(range(last)):
        sending = transfer[stage - 1] if stage > 0 else 0.0
        ends[stage] = max(work[stage], ends[stage + 1] + backward[stage][0] + sending)
    return ends


def passes(num_stages: int, stage: int, num_chunks: int, num_microbatches: int) -> list[Pass]:
    """The passes of a stage in their order: warm-up, then forward and backward in turn, then cool-down."""
    table = _forward_order(num_stages, num_chunks, num_microbatches)
    forwards = (Pass(chunk, microbatch, True) for chunk, microbatch in table)
    backwards = (Pass(num_chunks - 1 - chunk, microbatch, False) for chunk, microbatch in table)
    return [
        next(forwards if is_forward else backwards)
        for is_forward in _directions(num_stages, stage, num_chunks, len(table))
    ]


def _directions(num_stages: int, stage: int, num_chunks: int, total: int) -> list[bool]:
    """The order of a stage's `total` forward passes (True) and as many backward passes."""
    warmup = _warmup(num_stages, stage, num_chunks, total)
    return [True] * warmup + [True, False] * (total - warmup) + [False] * warmup


def _warmup(num_stages: int, stage: int, num_chunks: int, total: int) -> int:
    """Number of forward passes before a stage takes turns."""
    warmup = num_stages - stage - 1
    if num_chunks > 1:
        warmup = 2 * warmup + (num_chunks - 1) * num_stages
    return min(warmup, total)


def _forward_order(num_stages: int, num_chunks: int, num_microbatches: int) -> list[tuple[int, int]]:
    """Chunk and microbatch of each forward pass of a stage. As many microbatches as there are stages run through all
    chunks before the next ones do."""
    return [
        (chunk, microbatch)
        for first in range(0, num_microbatches, num_stages)
        for chunk in range(num_chunks)
        for microbatch in range(first, min(first + num_stages, num_microbatches))
    ]


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

    def sending(self, *, is_forward: bool, stage: int, chunk: int) -> float:
        """Seconds to send the result of a pass."""
        ends = (self.num_stages - 1, self.num_chunks - 1) if is_forward else (0, 0)
        if (stage, chunk) == ends:
            return 0.0
        return self.transfer[stage if is_forward else stage - 1]

    def lasting(self, *, is_forward: bool, stage: int) -> list[float]:
        """Seconds of the passes of the chunks of a stage, with the sending of their results."""
        seconds = (self.forward if is_forward else self.backward)[stage]
        return [
            each + self.sending(is_forward=is_forward, stage=stage, chunk=chunk)
            for chunk, each in enumerate(seconds)
        ]

    def work(self, num_microbatches: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Seconds that each stage computes and transfers with this number of microbatches."""
        computing, transferring = [], []
        for stage, passes_of_stage in enumerate(zip(self.forward, self.backward, strict=True)):
            sending = [
                self.sending(is_forward=is_forward, stage=stage, chunk=chunk)
                for is_forward in (True, False)
                for chunk in range(self.num_chunks)
            ]
            computing.append(sum(num_microbatches * each for chunks in passes_of_stage for each in chunks))
            transferring.append(sum(num_microbatches * each for each in sending))
        return tuple(computing), tuple(transferring)

    @cached_property
    def round_s(self) -> float:
        """Seconds in which the slowest stage computes and sends a round of as many microbatches as there are stages."""
        return max(map(sum, zip(*self.work(self.num_stages), strict=True)))


class _Lane(NamedTuple):
    """The passes of a stage in one direction. All stages have them in the same order."""

    lasting: list[float]
    """Seconds of each pass, with the sending of its result."""
    needed: Sequence[int]
    """The entry of `arriving` that each pass waits for."""
    ends: list[float]
    """The start of the step, then the ends of the passes."""
    arriving: list[float]
    """The `ends` of the stage from which each pass gets its input."""


class _Replay:
    """All passes of a step with some microbatches."""

    def __init__(self, step: _Step, num_microbatches: int, longer: _Replay | None = None) -> None:
        """Replays the passes. A step that is `longer` usually begins with the same ones."""
        self._step = step
        self._num_microbatches = num_microbatches
        self.order = _forward_order(step.num_stages, step.num_chunks, num_microbatches)
        ends = [([0.0], [0.0]) for _ in step.forward]
        if longer is not None and longer.order[: len(self.order)] == self.order:
            ends = longer.first(len(self.order))
        self._forward, self._backward = (
            self._lanes([of_stage[direction] for of_stage in ends], is_forward=direction == 0)
            for direction in (0, 1)
        )
        left = [
            (_directions(step.num_stages, stage, step.num_chunks, len(self.order)), ahead, back)
            for stage, (ahead, back) in enumerate(zip(self._forward, self._backward, strict=True))
        ]
        while left:
            left = [of_stage for of_stage in left if not _advance(*of_stage)]

    def first(self, num_passes: int) -> list[tuple[list[float], list[float]]]:
        """Ends of the first forward passes of each stage, and of the backward passes between them."""
        stages, chunks = self._step.num_stages, self._step.num_chunks
        found = []
        for stage, (ahead, back) in enumerate(zip(self._forward, self._backward, strict=True)):
            num_backward = num_passes - _warmup(stages, stage, chunks, num_passes)
            found.append((ahead.ends[: 1 + num_passes], back.ends[: 1 + num_backward]))
        return found

    @cached_property
    def total(self) -> float:
        """End of the last pass."""
        return max(lane.ends[-1] for lane in (*self._forward, *self._backward))

    def timeline(self, *, with_intervals: bool) -> Timeline:
        """The step."""
        intervals = tuple(self._intervals()) if with_intervals else ()
        work = self._step.work(self._num_microbatches)
        return Timeline(self.total, *work, self._chunk_ends(), intervals)

    def _lanes(self, ends: list[list[float]], *, is_forward: bool) -> list[_Lane]:
        """The lanes of all stages in one direction."""
        step, order = self._step, self.order
        # A chunk gives its result to the next one after a turn of as many microbatches as there are stages.
        left = [self._num_microbatches - each // step.num_stages * step.num_stages for _, each in order]
        after_turns = [
            1 + index - min(step.num_stages, left[index]) if chunk else 0
            for index, (chunk, _) in enumerate(order)
        ]
        first = 0 if is_forward else step.num_stages - 1
        lanes = []
        for stage, of_stage in enumerate(ends):
            lasting = step.lasting(is_forward=is_forward, stage=stage)
            if not is_forward:
                lasting.reverse()  # the last chunk comes first
            lanes.append(
                _Lane(
                    [lasting[chunk] for chunk, _ in order],
                    after_turns if stage == first else range(1, 1 + len(order)),
                    of_stage,
                    ends[(stage + (-1 if is_forward else 1)) % step.num_stages],
                )
            )
        return lanes

    def _chunk_ends(self) -> tuple[tuple[float, ...], ...]:
        """Ends of the last backward pass of each chunk, before the sending of its result."""
        chunks = range(self._step.num_chunks)
        last = [1 + self.order.index((chunk, self._num_microbatches - 1)) for chunk in reversed(chunks)]
        return tuple(
            tuple(
                lane.ends[last[chunk]] - self._step.sending(is_forward=False, stage=stage, chunk=chunk)
                for chunk in chunks
            )
            for stage, lane in enumerate(self._backward)
        )

    def _intervals(self) -> Iterator[Interval]:
        step = self._step
        for is_forward, lanes in ((True, self._forward), (False, self._backward)):
            for stage, lane in enumerate(lanes):
                for (number, microbatch), end in zip(self.order, lane.ends[1:], strict=True):
                    chunk = number if is_forward else step.num_chunks - 1 - number
                    computing = (step.forward if is_forward else step.backward)[stage][chunk]
                    start = end - step.sending(is_forward=is_forward, stage=stage, chunk=chunk) - computing
                    yield Interval(stage, chunk, microbatch, is_forward, start, start + computing)


def _advance(directions: list[bool], ahead: _Lane, back: _Lane) -> bool:
    """Replays the passes of a stage until one waits for its input. Returns True if none is left."""
    lanes = back, ahead
    at = max(ahead.ends[-1], back.ends[-1])
    for number in range(len(ahead.ends) + len(back.ends) - 2, len(directions)):
        lasting, needed, ends, arriving = lanes[directions[number]]
        index = len(ends) - 1
        if needed[index] >= len(arriving):
            return False
        arrival = arriving[needed[index]]
        at = (arrival if arrival > at else at) + lasting[index]
        ends.append(at)
    return True
