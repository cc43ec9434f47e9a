"""Batch sizes compared with Megatron-LM's calculator, and the position at which a resumed run continues."""

from __future__ import annotations

import dataclasses
import itertools
from itertools import islice

import pytest
from megatron.core import num_microbatches_calculator

from trainer.contract.config import TrainingConfig
from trainer.contract.model.batch_size import (
    Batches,
    batch_sizes,
    covering,
    rampup_problems,
    steps_within,
    total_samples,
)


def ramp(*rampup: int, last: int = 256, train_iters: int = 400) -> TrainingConfig:
    return TrainingConfig(
        micro_batch_size=2, global_batch_size=last, train_iters=train_iters, rampup_batch_size=rampup or None
    )


@pytest.mark.skipif(
    not hasattr(num_microbatches_calculator, "RampupBatchsizeNumMicroBatchesCalculator"),
    reason="megatron-core 0.19 has none",
)
@pytest.mark.parametrize(
    "rampup", [(16, 16, 10_000), (32, 32, 977), (64, 96, 5), (16, 48, 30_000), (248, 8, 1)]
)
def test_every_batch_size_is_that_of_megatron_lm(rampup: tuple[int, int, int]) -> None:
    training = ramp(*rampup)
    theirs = num_microbatches_calculator.RampupBatchsizeNumMicroBatchesCalculator(
        global_batch_size=256,
        micro_batch_size=2,
        data_parallel_size=4,
        decrease_batch_size_if_needed=False,
        rank=0,
        start_global_batch_size=rampup[0],
        batch_size_increment=rampup[1],
        ramup_samples=rampup[2],
    )
    consumed = 0
    for batch in Batches(training):
        theirs.update(consumed, consistency_check=True)
        assert (batch.first, batch.size) == (consumed, theirs.get_current_global_batch_size())
        assert batch.size in batch_sizes(training)
        consumed += batch.size
    assert total_samples(training) == consumed


def test_a_ramp_that_starts_at_its_end_is_ignored() -> None:
    """Megatron-LM's calculator divides by zero here."""
    assert {batch.size for batch in Batches(ramp(256, 8, 1000))} == {256}


def test_a_resumed_run_reads_the_samples_of_an_uninterrupted_one() -> None:
    training = ramp(16, 16, 10_000)
    undisturbed = list(Batches(training))
    for done in (1, 57, 399):
        assert list(Batches(training, done, undisturbed[done].first)) == undisturbed[done:]


def test_another_batch_size_continues_at_the_next_sample() -> None:
    *_, last = islice(Batches(ramp(last=128)), 10)
    consumed = last.first + last.size
    after = dataclasses.replace(ramp(last=256), train_iters=12)
    assert [(b.first, b.size) for b in Batches(after, 10, consumed)] == [(1280, 256), (1536, 256)]


@pytest.mark.parametrize(
    ("rampup", "problem"),
    [
        ((16, 16), "must be three numbers: start, increment and samples"),
        ((512, 16, 100), "starts above global_batch_size = 256"),
        ((16, 100, 100), "does not reach global_batch_size = 256: 256 - 16 is not a multiple of 100"),
        ((16, 16, 100), None),
        ((), None),
    ],
)
def test_a_ramp_must_reach_the_batch(rampup: tuple[int, ...], problem: str | None) -> None:
    assert [found.reason for found in rampup_problems(ramp(*rampup))] == [problem] * bool(problem)


def test_samples_determine_the_number_of_steps() -> None:
    assert steps_within(ramp(), 1000, limit=40) == 3
    assert steps_within(ramp(), 10**9, limit=40) == 40
    growing = ramp(64, 64, 192)  # 64, 128, 256, ...
    assert [steps_within(growing, samples, limit=40) for samples in (63, 64, 191, 192, 448)] == [
        0,
        1,
        1,
        2,
        3,
    ]


@pytest.mark.parametrize(
    "rampup", [(16, 16, 100_000), (1, 1, 9_999), (64, 96, 7), (256, 1, 5), (2, 254, 10**6)]
)
def test_steps_are_counted_as_they_are_taken(rampup: tuple[int, ...]) -> None:
    training, samples = ramp(*rampup), 123_456
    ends = itertools.accumulate(
        batch.size for batch in Batches(dataclasses.replace(training, train_iters=10**6))
    )
    taken = sum(1 for _ in itertools.takewhile(lambda end: end <= samples, ends))
    assert steps_within(training, samples, limit=10**6) == taken
    # 15 trillion tokens in sequences of 4096: more steps than anybody would count one by one
    more = 15 * 10**12 // 4096
    assert steps_within(training, samples + more * 256, limit=10**12) - steps_within(
        training, samples + 10**6 * 256, limit=10**12
    ) == (more - 10**6)


@pytest.mark.parametrize("rampup", [(), (16, 16, 10_000)])
def test_a_resumed_run_requests_the_samples_of_an_uninterrupted_one(rampup: tuple[int, ...]) -> None:
    training = ramp(*rampup)
    for done, batch in enumerate(Batches(training)):
        if done % 50 == 0:
            assert covering(training, done, batch.first) == training


@pytest.mark.parametrize(("consumed", "train_iters"), [(1000 * 8, 232), (10, 201), (0, 200)])
def test_after_a_changed_batch_size_a_run_requests_the_samples_still_to_be_read(
    consumed: int, train_iters: int
) -> None:
    """200 of 400 steps are left, with 256 samples each. The plan counts samples from the first one."""
    training = ramp()
    asked = total_samples(covering(training, 200, consumed))
    assert asked == train_iters * 256
    assert 0 <= asked - (consumed + 200 * 256) < 256
