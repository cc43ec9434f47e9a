"""Rules for the batch. Evaluation uses the same batch sizes as training, so the rules apply to both."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from trainer.contract.model.batch_size import rampup_problems
from trainer.contract.model.layout import model_parallel_size
from trainer.contract.problem import Problem
from trainer.contract.rules.facts import Facts, Rule, divisors, multiples, unread
from trainer.contract.rules.parallelism import PP, VPP
from trainer.contract.wording import counted

GLOBAL_BATCH = "training.global_batch_size"
RAMPUP = "training.rampup_batch_size"


def batch_is_multiple_of_microbatches(facts: Facts) -> Iterator[Problem]:
    """global_batch_size % (micro_batch_size x DP) == 0.

    Source: megatron/core/num_microbatches_calculator.py, ConstantNumMicroBatchesCalculator.
    """
    if facts.data_parallel_size is None:
        return
    training = facts.training
    unit = training.micro_batch_size * facts.data_parallel_size
    if training.global_batch_size % unit == 0:
        return
    keys = (GLOBAL_BATCH, facts.world.path)
    chosen = next((key for key in facts.set_by_user if key in keys), GLOBAL_BATCH)
    if chosen == facts.world.path:
        yield _nodes_for_batch(facts, unit)
    else:
        yield Problem(
            path=GLOBAL_BATCH,
            reason=f"is not a multiple of micro_batch_size x DP = {training.micro_batch_size} x "
            f"{facts.data_parallel_size} = {unit} ({training.global_batch_size} / {unit})",
            candidates=multiples(unit, near=training.global_batch_size),
            offers=2,
            about=("training.micro_batch_size",),
        )


def _nodes_for_batch(facts: Facts, unit: int) -> Problem:
    """The problem in terms of the number of nodes, for a user who set this number and took the batch from the
    preset."""
    training = facts.training
    ranks = training.global_batch_size // training.micro_batch_size * model_parallel_size(facts.parallelism)
    counts = divisors(ranks // facts.world.ranks_each, near=facts.world.count)
    return Problem(
        path=facts.world.path,
        reason=f"results in {facts.world} with DP = {facts.data_parallel_size}, but {GLOBAL_BATCH} = "
        f"{training.global_batch_size} is not a multiple of micro_batch_size x DP = "
        f"{training.micro_batch_size} x {facts.data_parallel_size} = {unit}",
        candidates=counts,
        offers=3,
        hint=f"set {GLOBAL_BATCH} to a multiple of {unit}",
        about=("training.global_batch_size",),
    )


def interleaving_fills_pipeline(facts: Facts) -> Iterator[Problem]:
    """With VPP > 1, num_microbatches % PP == 0.

    Source: megatron/core/pipeline_parallel/schedules.py, forward_backward_pipelining_with_interleaving. It requires
    PP <= group <= num_microbatches, and a last group that is full or at least PP. The group is Core's default, PP.
    """
    layout = facts.layout
    stages = facts.parallelism.pipeline_model_parallel_size
    if layout is None or facts.parallelism.num_chunks == 1 or layout.num_microbatches % stages == 0:
        return
    training = facts.training
    samples = training.micro_batch_size * layout.data_parallel_size
    yield Problem(
        path=GLOBAL_BATCH,
        reason=f"results in {training.global_batch_size} / (micro_batch_size x DP) = "
        f"{training.global_batch_size} / {samples} = "
        f"{counted(layout.num_microbatches, 'microbatch', 'microbatches')}, but "
        f"{VPP} = {facts.parallelism.num_chunks} requires a multiple of {PP} = {stages} "
        f"({layout.num_microbatches} / {stages})",
        candidates=multiples(samples * stages, near=training.global_batch_size),
        offers=2,
        about=(
            "training.micro_batch_size",
            "parallelism.virtual_pipeline_model_parallel_size",
            "parallelism.pipeline_model_parallel_size",
        ),
    )


def rampup_reaches_batch(facts: Facts) -> Iterator[Problem]:
    """Three numbers, and an integer number of increments from the first to global_batch_size.

    Source: megatron/core/num_microbatches_calculator.py, RampupBatchsizeNumMicroBatchesCalculator.
    """
    for problem in rampup_problems(facts.training):
        yield dataclasses.replace(problem, candidates=_rampups(facts), offers=1)


def rampup_is_multiple_of_microbatches(facts: Facts) -> Iterator[Problem]:
    """Every batch size of the ramp-up obeys the rules for global_batch_size above."""
    training, ranks = facts.training, facts.data_parallel_size
    if training.rampup_batch_size is None or ranks is None or any(rampup_problems(training)):
        return
    unit = _rampup_unit(facts)
    for size in training.rampup_batch_size[:2]:
        if size % unit:
            stages = f" x PP = {training.micro_batch_size} x {ranks} x {unit // ranks // training.micro_batch_size}"
            factors = (
                stages if facts.parallelism.num_chunks > 1 else f" = {training.micro_batch_size} x {ranks}"
            )
            yield Problem(
                path=RAMPUP,
                reason=f"results in batch sizes that are not multiples of micro_batch_size x DP{factors} = {unit} "
                f"({size} / {unit})",
                candidates=_rampups(facts),
                offers=1,
                about=("training.micro_batch_size",),
            )
            return


def _rampup_unit(facts: Facts) -> int:
    """The number of which every batch size must be a multiple."""
    stages = facts.parallelism.pipeline_model_parallel_size if facts.parallelism.num_chunks > 1 else 1
    return facts.training.micro_batch_size * (facts.data_parallel_size or 1) * stages


def _rampups(facts: Facts) -> list[tuple[int, ...]]:
    """A valid ramp-up close to the given one, if there is any for the final batch size."""
    rampup, last, unit = (
        facts.training.rampup_batch_size,
        facts.training.global_batch_size,
        _rampup_unit(facts),
    )
    if not rampup or len(rampup) != 3 or last % unit or last == unit:
        return []
    start = min(max(unit, rampup[0] // unit * unit), last - unit)
    increment = divisors((last - start) // unit, near=max(1, rampup[1] // unit))[0] * unit
    return [(start, increment, rampup[2])]


def skipped_batches_have_spikes(facts: Facts) -> Iterator[Problem]:
    """skip_loss_spikes needs loss_spike_factor (hpcgen's rule: it would have no effect)."""
    if facts.training.loss_spike_factor is None:
        reason = "has no effect, because training.loss_spike_factor is null"
        yield from unread(
            facts,
            ["training.skip_loss_spikes"],
            reason,
            "set loss_spike_factor",
            about=("training.loss_spike_factor",),
        )


RULES: tuple[Rule, ...] = (
    batch_is_multiple_of_microbatches,
    interleaving_fills_pipeline,
    rampup_reaches_batch,
    rampup_is_multiple_of_microbatches,
    skipped_batches_have_spikes,
)

WARNINGS: tuple[Rule, ...] = ()

OF_MODEL: tuple[Rule, ...] = ()
