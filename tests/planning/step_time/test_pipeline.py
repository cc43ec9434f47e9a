"""The replayed schedule of a pipeline."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import pairwise

import pytest

from hpcgen.planning.step_time.pipeline import Interval, Timeline, replay, replay_completely

FORWARD, BACKWARD = 1.0, 2.0


def equal_stages(stages: int, chunks: int, num_microbatches: int, transfer: float = 0.0) -> Timeline:
    return replay(
        [[FORWARD] * chunks] * stages, [[BACKWARD] * chunks] * stages, num_microbatches, [transfer] * stages
    )


@pytest.mark.parametrize(
    ("stages", "chunks", "num_microbatches"),
    [
        (1, 1, 7),
        (2, 1, 1),
        (2, 1, 16),
        (4, 1, 2),  # fewer microbatches than stages
        (64, 1, 512),
        (2, 2, 8),
        (2, 4, 16),
        (2, 12, 64),
        (8, 6, 8),
        (16, 8, 192),
    ],
)
def test_equal_stages(stages: int, chunks: int, num_microbatches: int) -> None:
    """The closed form of Narayanan et al.: the bubble is (PP - 1) / VPP passes of a stage."""
    found = equal_stages(stages, chunks, num_microbatches)
    passes = FORWARD + BACKWARD
    assert found.total == pytest.approx(num_microbatches * chunks * passes + (stages - 1) * passes)
    assert found.bubble == pytest.approx((stages - 1) * passes)
    assert found.ends[0] == found.total


def test_slowest_stage_limits_the_step() -> None:
    """Others wait for it with every microbatch. Once, it waits for its first gradient."""
    forward, backward = [[1.0], [1.0], [1.5], [1.0]], [[2.0], [2.0], [3.0], [2.0]]
    found = replay(forward, backward, 100)
    assert found.slowest == 2
    assert found.total == pytest.approx(100 * 4.5 + 2 * 3.0 + 1.5)
    assert found.computing[0] == pytest.approx(300)


def test_1f1b_waits_for_its_transfers() -> None:
    """A stage in the middle sends a hidden state and a gradient for each microbatch, and computes nothing meanwhile."""
    found = equal_stages(4, 1, 100, transfer=0.1)
    assert found.transferring[1] == pytest.approx(100 * 0.2)
    assert found.total >= 100 * 3.2


def test_more_chunks_send_more() -> None:
    """With slow transfers, the smaller bubble does not pay for them."""
    few, many = (
        replay([[12 / chunks] * chunks] * 2, [[24 / chunks] * chunks] * 2, 8, [0.5] * 2) for chunks in (4, 12)
    )
    assert many.transferring[0] == pytest.approx(
        (2 * 8 * 12 - 8) * 0.5
    )  # the first chunk returns no gradient
    assert many.bubble < few.bubble
    assert many.total > few.total


def random_steps() -> list[tuple[list[list[float]], list[list[float]], int, list[float]]]:
    """Uneven stages and chunks with slow transfers."""
    source, steps = random.Random(36), []
    for _ in range(60):
        stages = source.choice([1, 2, 3, 4, 8])
        chunks = source.choice([1, 2, 3]) if stages > 1 else 1
        rounds = source.choice([1, 2, 3, 5, 12, 20])
        left = source.randrange(stages) if chunks == 1 else 0
        forward = [[source.uniform(1, 1.5) for _ in range(chunks)] for _ in range(stages)]
        backward = [[2 * seconds * source.uniform(0.9, 1.1) for seconds in stage] for stage in forward]
        transfer = [source.choice([0, 0.1, 0.5]) for _ in range(stages)]
        steps.append((forward, backward, rounds * stages + left, transfer))
    return steps


def starts(timeline: Timeline) -> dict[tuple[int, int, int, bool], float]:
    """When each pass starts."""
    return {each.key: each.start for each in timeline.intervals}


def test_extrapolated_steps_are_those_of_a_complete_replay() -> None:
    for forward, backward, num_microbatches, transfer in random_steps():
        found = replay(forward, backward, num_microbatches, transfer, with_intervals=True)
        complete = replay_completely(forward, backward, num_microbatches, transfer)
        assert found.total == pytest.approx(complete.total)
        assert found.computing == pytest.approx(complete.computing)
        assert found.transferring == pytest.approx(complete.transferring)
        for ends, complete_ends in zip(found.chunk_ends, complete.chunk_ends, strict=True):
            assert ends == pytest.approx(complete_ends)
        all_starts = starts(complete)
        assert starts(found) == pytest.approx({key: all_starts[key] for key in starts(found)})
        begin, end = found.cut or (found.total, found.total)
        outside = {key for key, at in all_starts.items() if at < begin - 1e-6 or at > end + 1e-6}
        inside = {key for key, at in all_starts.items() if begin + 1e-6 < at < end - 1e-6}
        assert outside <= set(starts(found)) <= set(all_starts) - inside


def test_passes_wait_for_their_inputs_and_do_not_overlap() -> None:
    for forward, backward, num_microbatches, transfer in random_steps()[:20]:
        intervals = replay_completely(forward, backward, num_microbatches, transfer).intervals
        stages, chunks = len(forward), len(forward[0])
        assert len(intervals) == 2 * stages * chunks * num_microbatches
        of_stage: dict[int, list[Interval]] = defaultdict(list)
        ends = {}
        for each in intervals:
            of_stage[each.stage].append(each)
            ends[each.is_forward, each.chunk * stages + each.stage, each.microbatch] = each.end
        for each in intervals:
            position = each.chunk * stages + each.stage
            source = position - 1 if each.is_forward else position + 1
            if (end := ends.get((each.is_forward, source, each.microbatch))) is not None:
                lasting = transfer[source % stages if each.is_forward else each.stage]
                assert each.start >= end + lasting - 1e-9
        for mine in of_stage.values():
            mine.sort(key=lambda each: each.start)
            assert all(last.end <= following.start + 1e-9 for last, following in pairwise(mine))
