"""Rules about recomputing activations. The sources are files of megatron/core/transformer."""

from __future__ import annotations

from collections.abc import Iterator

from hpcgen.planning.rules.facts import Facts, Rule, Violation, divisors
from hpcgen.text import counted


def full_recompute_needs_method(facts: Facts) -> Iterator[Violation]:
    """recompute_granularity full needs a method (transformer_config.py, __post_init__)."""
    training = facts.training
    if training.recompute_granularity == "full" and training.recompute_method is None:
        yield Violation(
            path="training.recompute_method",
            reason="leaves open which layers training.recompute_granularity = full recomputes",
            candidates=["uniform", "block"],
        )


def full_recompute_needs_num_layers(facts: Facts) -> Iterator[Violation]:
    """recompute_granularity full needs a number of layers (transformer_config.py, __post_init__)."""
    training = facts.training
    if training.recompute_granularity == "full" and training.recompute_num_layers is None:
        yield Violation(
            path="training.recompute_num_layers",
            reason="leaves open how many layers training.recompute_granularity = full recomputes",
            candidates=[1],
        )


def recompute_details_need_full(facts: Facts) -> Iterator[Violation]:
    """Method and number of layers belong to full.

    Core refuses a number with selective (transformer_config.py, __post_init__) and ignores the rest; what
    would be ignored is refused here.
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
                reason=f"is for recompute_granularity = full, and it is {granularity}",
                candidates=[None],
                advice="recompute_granularity: full",
            )


def recompute_fits_chunk(facts: Facts) -> Iterator[Violation]:
    """Groups of recompute_num_layers fill a model chunk (transformer_block.py, _checkpointed_forward).

    uniform walks on in whole groups and would run past the last layer; block would recompute layers that are
    not there. A chunk is what one pipeline stage, or one virtual stage, holds.
    """
    training, chunk = facts.training, facts.num_layers_per_chunk
    num_layers = training.recompute_num_layers
    if training.recompute_granularity != "full" or num_layers is None or chunk is None:
        return
    if training.recompute_method == "uniform" and chunk % num_layers:
        yield Violation(
            path="training.recompute_num_layers",
            depends_on=("model", "parallelism"),
            reason=f"does not divide the {counted(chunk, 'layer')} of a model chunk ({chunk} / {num_layers})",
            candidates=divisors(chunk, near=num_layers),
        )
    if training.recompute_method == "block" and num_layers > chunk:
        yield Violation(
            path="training.recompute_num_layers",
            depends_on=("model", "parallelism"),
            reason=f"is more than the {counted(chunk, 'layer')} of a model chunk",
            candidates=[chunk],
            advice="less",
        )


RULES: tuple[Rule, ...] = (
    full_recompute_needs_method,
    full_recompute_needs_num_layers,
    recompute_details_need_full,
    recompute_fits_chunk,
)
