"""Rules for recomputing activations. The sources are files of megatron/core/transformer."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hpcgen.planning.rules.facts import Facts, Rule, Violation, divisors
from hpcgen.text import counted


def full_recompute_needs_method(facts: Facts) -> Iterator[Violation]:
    """recompute_granularity full needs a method (transformer_config.py, __post_init__)."""
    training = facts.training
    if training.recompute_granularity == "full" and training.recompute_method is None:
        yield Violation(
            path="training.recompute_method",
            reason="must be set with training.recompute_granularity = full",
            candidates=["uniform", "block"],
        )


def full_recompute_needs_num_layers(facts: Facts) -> Iterator[Violation]:
    """recompute_granularity full needs a number of layers (transformer_config.py, __post_init__)."""
    training = facts.training
    if training.recompute_granularity == "full" and training.recompute_num_layers is None:
        yield Violation(
            path="training.recompute_num_layers",
            reason="must be set with training.recompute_granularity = full",
            candidates=[1],
        )


def recompute_details_need_full(facts: Facts) -> Iterator[Violation]:
    """Method and number of layers need full recomputation.

    Core refuses a number of layers with selective (transformer_config.py, __post_init__) and ignores the other cases.
    Here all of them are errors.
    """
    training = facts.training
    if training.recompute_granularity == "full":
        return
    granularity = training.recompute_granularity or "null"
    for key, value in (
        ("recompute_method", training.recompute_method),
        ("recompute_num_layers", training.recompute_num_layers),
    ):
        if value is not None:
            yield Violation(
                path=f"training.{key}",
                reason=f"is used only with recompute_granularity = full, not {granularity}",
                candidates=[None],
                advice="set recompute_granularity to full",
            )


def recompute_fits_chunk(facts: Facts) -> Iterator[Violation]:
    """Groups of recompute_num_layers fill a model chunk (transformer_block.py, _checkpointed_forward).

    An incomplete group with uniform would run past the last layer, and block would recompute layers that do not exist.
    A chunk is the layers of one pipeline stage or one virtual stage.
    """
    training, chunks = facts.training, facts.chunk_layers
    num_layers = training.recompute_num_layers
    if training.recompute_granularity != "full" or num_layers is None or chunks is None:
        return
    sizes = sorted({layers for layers in chunks if layers})
    if training.recompute_method == "uniform":
        chunk = next((size for size in sizes if size % num_layers), None)
        if chunk is not None:
            yield Violation(
                path="training.recompute_num_layers",
                depends_on=("model", "parallelism"),
                reason=f"does not divide the {counted(chunk, 'layer')} of a model chunk ({chunk} / {num_layers})",
                candidates=divisors(math.gcd(*sizes), near=num_layers),
            )
    if training.recompute_method == "block" and num_layers > sizes[0]:
        yield Violation(
            path="training.recompute_num_layers",
            depends_on=("model", "parallelism"),
            reason=f"is more than the {counted(sizes[0], 'layer')} of a model chunk",
            candidates=[sizes[0]],
            advice="use fewer layers",
        )


RULES: tuple[Rule, ...] = (
    full_recompute_needs_method,
    full_recompute_needs_num_layers,
    recompute_details_need_full,
    recompute_fits_chunk,
)
