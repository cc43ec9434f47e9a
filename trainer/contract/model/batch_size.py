"""Batch size of each step. It is constant, or grows over the run with training.rampup_batch_size."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator

from trainer.contract.config import TrainingConfig
from trainer.contract.problem import Problem
from trainer.contract.record import record


@record
class Batch:
    """Samples of one optimizer step: [first, first + size) of the shuffled training set."""

    first: int
    size: int


def batch_size_at(training: TrainingConfig, consumed_samples: int) -> int:
    """Global batch size of the step that begins after `consumed_samples`.

    Each increment of the ramp-up lasts for the same number of samples.
    Source: Megatron-LM, megatron/core/num_microbatches_calculator.py.
    """
    if training.rampup_batch_size is None:
        return training.global_batch_size
    start, increment, samples = training.rampup_batch_size
    if consumed_samples > samples or start == training.global_batch_size:
        return training.global_batch_size
    increments = (training.global_batch_size - start) // increment
    size = start + int(consumed_samples / (samples / increments)) * increment
    return min(size, training.global_batch_size)


@record
class Batches:
    """Batches of the remaining steps, from `iteration` (after `consumed_samples` samples) to train_iters."""

    training: TrainingConfig
    iteration: int = 0
    consumed_samples: int = 0

    def __iter__(self) -> Iterator[Batch]:
        first = self.consumed_samples
        for _ in range(self.iteration, self.training.train_iters):
            batch = Batch(first, batch_size_at(self.training, first))
            yield batch
            first += batch.size


def batch_sizes(training: TrainingConfig) -> range:
    """Every global batch size of the run, including the last. Requires a ramp-up without `rampup_problems`."""
    last = training.global_batch_size
    start, increment, _ = training.rampup_batch_size or (last, 1, 0)
    return range(start, last + 1, increment)


def rampup_problems(training: TrainingConfig) -> Iterator[Problem]:
    """Yields the problem of a rampup_batch_size that does not reach global_batch_size."""
    if training.rampup_batch_size is None:
        return
    path, about = "training.rampup_batch_size", ("training.global_batch_size",)
    if len(training.rampup_batch_size) != 3:
        yield Problem(path, "must be three numbers: start, increment and samples")
        return
    (start, increment, _), last = training.rampup_batch_size, training.global_batch_size
    if start > last:
        yield Problem(path, f"starts above global_batch_size = {last}", about=about)
    elif (last - start) % increment:
        why = f"{last} - {start} is not a multiple of {increment}"
        yield Problem(path, f"does not reach global_batch_size = {last}: {why}", about=about)


def steps_within(training: TrainingConfig, samples: int, limit: int) -> int:
    """Number of complete steps that `samples` suffice for, at most `limit`.

    Counts all steps of a batch size together, so the cost does not grow with the number of steps.
    """
    if training.rampup_batch_size is None or any(rampup_problems(training)):
        return min(samples // training.global_batch_size, limit)
    steps, consumed = 0, 0
    while steps < limit:
        size = batch_size_at(training, consumed)
        affordable = min((samples - consumed) // size, limit - steps)
        # The size never shrinks, so bisection finds the first step with a larger one.
        same = bisect.bisect_left(
            range(affordable), True, key=lambda step: batch_size_at(training, consumed + step * size) != size
        )
        if same == 0:
            break
        steps, consumed = steps + same, consumed + same * size
    return steps


def total_samples(training: TrainingConfig) -> int:
    """Number of samples that the complete run reads."""
    return end_of_run(training, 0, 0)


def end_of_run(training: TrainingConfig, iteration: int, consumed_samples: int) -> int:
    """Number of samples that a run will have read at its end, after `iteration` steps with `consumed_samples`."""
    if training.rampup_batch_size is None:
        return consumed_samples + max(0, training.train_iters - iteration) * training.global_batch_size
    return consumed_samples + sum(batch.size for batch in Batches(training, iteration, consumed_samples))


def covering(training: TrainingConfig, iteration: int, consumed_samples: int) -> TrainingConfig:
    """`training` with train_iters adjusted, so that a run from sample 0 ends at the same sample as the resumed run.

    `iteration` steps have read `consumed_samples` already. train_iters changes only if some of those steps had a
    different batch size.
    """
    end = end_of_run(training, iteration, consumed_samples)
    if training.rampup_batch_size is None:
        return dataclasses.replace(training, train_iters=max(1, -(-end // training.global_batch_size)))
    from_start = Batches(dataclasses.replace(training, train_iters=max(end, 1)))
    steps = next((n for n, batch in enumerate(from_start, start=1) if batch.first + batch.size >= end), 1)
    return dataclasses.replace(training, train_iters=steps)
