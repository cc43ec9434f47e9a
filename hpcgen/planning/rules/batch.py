"""Rules about the batch. Evaluation uses the same global and micro batch: the rules hold for both."""

from __future__ import annotations

from collections.abc import Iterator

from hpcgen.planning.rules.facts import Facts, Rule, Violation, multiples
from hpcgen.planning.rules.parallelism import PP, VPP

GLOBAL_BATCH = "training.global_batch_size"


def batch_is_whole_microbatches(facts: Facts) -> Iterator[Violation]:
    """global_batch_size % (micro_batch_size x DP) == 0.

    Source: megatron/core/num_microbatches_calculator.py, ConstantNumMicroBatchesCalculator.
    """
    if facts.data_parallel_size is None:
        return
    training = facts.training
    unit = training.micro_batch_size * facts.data_parallel_size
    if training.global_batch_size % unit:
        yield Violation(
            path=GLOBAL_BATCH,
            reason=f"is not a multiple of micro_batch_size x DP = {training.micro_batch_size} x "
            f"{facts.data_parallel_size} = {unit} ({training.global_batch_size} / {unit})",
            candidates=multiples(unit, near=training.global_batch_size),
            offers=2,
        )


def interleaving_fills_pipeline(facts: Facts) -> Iterator[Violation]:
    """With VPP > 1, num_microbatches % PP == 0.

    Source: megatron/core/pipeline_parallel/schedules.py, forward_backward_pipelining_with_interleaving. It
    wants PP <= group <= num_microbatches and a last group that is full or at least PP; the group is Core's
    default, PP.
    """
    layout = facts.layout
    stages = facts.parallelism.pipeline_model_parallel_size
    if layout is None or facts.num_chunks == 1 or layout.num_microbatches % stages == 0:
        return
    training = facts.training
    samples = training.micro_batch_size * layout.data_parallel_size
    yield Violation(
        path=GLOBAL_BATCH,
        reason=f"makes {training.global_batch_size} / (micro_batch_size x DP) = "
        f"{training.global_batch_size} / {samples} = {layout.num_microbatches} microbatches, and "
        f"{VPP} = {facts.num_chunks} needs a multiple of {PP} = {stages} "
        f"({layout.num_microbatches} / {stages})",
        candidates=multiples(samples * stages, near=training.global_batch_size),
        offers=2,
    )


RULES: tuple[Rule, ...] = (batch_is_whole_microbatches, interleaving_fills_pipeline)
