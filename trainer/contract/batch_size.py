"""How many samples each step reads, which may grow over the run; standard library only, for hpcgen plans with it."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from trainer.contract.config import TrainingConfig


@dataclass(frozen=True)
class Batch:
    """The samples [first, first + size) of the shuffled training set: one optimizer step."""

    first: int
    size: int


def batch_size_at(training: TrainingConfig, consumed_samples: int) -> int:
    """The global batch of the step that begins after `consumed_samples`.

    Source: Megatron-LM, megatron/core/num_microbatches_calculator.py: the ramp-up's samples are shared evenly by
    its increments.
    """
    if training.rampup_batch_size is None:
        return training.global_batch_size
    start, increment, samples = training.rampup_batch_size
    if consumed_samples > samples or start == training.global_batch_size:
        return training.global_batch_size
    increments = (training.global_batch_size - start) // increment
    size = start + int(consumed_samples / (samples / increments)) * increment
    return min(size, training.global_batch_size)


@dataclass(frozen=True)
class Batches:
    """The batches of the steps after `iteration`, which have consumed `consumed_samples`, to train_iters."""

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
    """Every global batch size on the way, the last one included; of a ramp-up without `rampup_problem`."""
    last = training.global_batch_size
    start, increment, _ = training.rampup_batch_size or (last, 1, 0)
    return range(start, last + 1, increment)


def rampup_problem(training: TrainingConfig) -> str | None:
    """Why rampup_batch_size leads to no global_batch_size, in words that follow its value; None where it does."""
    if training.rampup_batch_size is None:
        return None
    if len(training.rampup_batch_size) != 3:
        return "must be three numbers: start, increment and samples"
    (start, increment, _), last = training.rampup_batch_size, training.global_batch_size
    if start > last:
        return f"starts above global_batch_size = {last}"
    if (last - start) % increment:
        return f"does not reach global_batch_size = {last}: {last} - {start} is not a multiple of {increment}"
    return None


def steps_within(training: TrainingConfig, samples: int, limit: int) -> int:
    """The whole steps that `samples` are enough for, at most `limit`.

    Steps are counted size by size, so that the time does not depend on how many there are.
    """
    if training.rampup_batch_size is None or rampup_problem(training):
        return min(samples // training.global_batch_size, limit)
    steps, consumed = 0, 0
    while steps < limit:
        size = batch_size_at(training, consumed)
        affordable = min((samples - consumed) // size, limit - steps)
        # the size never shrinks: the first step of another size is found by bisection
        same = bisect.bisect_left(
            range(affordable), True, key=lambda step: batch_size_at(training, consumed + step * size) != size
        )
        if same == 0:
            break
        steps, consumed = steps + same, consumed + same * size
    return steps


def total_samples(training: TrainingConfig) -> int:
    """The samples that the whole run reads."""
    if training.rampup_batch_size is None:
        return training.train_iters * training.global_batch_size
    return sum(batch.size for batch in Batches(training))


def covering(training: TrainingConfig, iteration: int, consumed_samples: int) -> TrainingConfig:
    """`training` with as many steps as would read, from the first sample on, all that the rest of a run reads.

    They are train_iters, unless the `iteration` steps that consumed so many samples had batches of other sizes.
    """
    if training.rampup_batch_size is None:
        end = consumed_samples + (training.train_iters - iteration) * training.global_batch_size
        return dataclasses.replace(training, train_iters=max(1, -(-end // training.global_batch_size)))
    end = consumed_samples + sum(batch.size for batch in Batches(training, iteration, consumed_samples))
    whole = Batches(dataclasses.replace(training, train_iters=max(end, 1)))
    steps = next((n for n, batch in enumerate(whole, start=1) if batch.first + batch.size >= end), 1)
    return dataclasses.replace(training, train_iters=steps)
