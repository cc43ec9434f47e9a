"""Rules for multi-token prediction (MTP)."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.contract.model.pipeline import mtp_chunk
from trainer.contract.problem import Problem, Setting
from trainer.contract.rules.facts import Facts, Rule, divisors, unread
from trainer.contract.rules.model import requires_rope
from trainer.contract.rules.parallelism import TP

KEY = "model.mtp_num_layers"


def mtp_needs_model_of_core(facts: Facts) -> Iterator[Problem]:
    """No model_provider with MTP (trainer/model/build.py)."""
    if facts.model.mtp_num_layers is not None and facts.model.model_provider is not None:
        yield Problem(
            path=KEY,
            reason="requires Megatron-Core's GPTModel, but model.model_provider is set",
            hint="remove one of them",
            about=("model.model_provider",),
        )


def mtp_needs_rope(facts: Facts) -> Iterator[Problem]:
    """MTP needs rope, because the stages would not add up gradients of learned positions.

    Source: megatron/training/arguments.py, validate_args.
    """
    if facts.model.mtp_num_layers is not None:
        yield from requires_rope(facts, "mtp_num_layers")


def mtp_weight_needs_mtp(facts: Facts) -> Iterator[Problem]:
    """mtp_loss_scaling_factor needs mtp_num_layers (hpcgen's rule: it would have no effect)."""
    if facts.model.mtp_num_layers is None:
        reason = f"has no effect, because {KEY} is null"
        yield from unread(
            facts,
            ["model.mtp_loss_scaling_factor"],
            reason,
            "set mtp_num_layers",
            about=("model.mtp_num_layers",),
        )


def tensor_parallel_divides_mtp_projection(facts: Facts) -> Iterator[Problem]:
    """hidden_size % TP == 0 with MTP (megatron/core/transformer/multi_token_prediction.py, eh_proj)."""
    size, hidden = facts.parallelism.tensor_model_parallel_size, facts.model.hidden_size
    if facts.model.mtp_num_layers is not None and hidden % size:
        yield Problem(
            path=TP,
            reason=f"does not divide model.hidden_size = {hidden} ({hidden} / {size}), which {KEY} requires",
            candidates=divisors(hidden, near=size),
            about=("model.hidden_size", "model.mtp_num_layers"),
        )


def mtp_is_recomputed_by_layer(facts: Facts) -> Iterator[Problem]:
    """Uniform recomputation of MTP needs recompute_num_layers = 1.

    Source: megatron/core/transformer/multi_token_prediction.py, _checkpointed_forward. With block, it does not
    recompute MTP layers.
    """
    training = facts.training
    if (
        facts.model.mtp_num_layers is not None
        and training.recompute_granularity == "full"
        and training.recompute_method == "uniform"
        and training.recompute_num_layers not in (None, 1)
    ):
        yield Problem(
            path="training.recompute_num_layers",
            reason=f"must be 1 with {KEY} and recompute_method = uniform",
            candidates=[1],
            settings=(Setting("training.recompute_method", "block"),),
            about=("model.mtp_num_layers", "training.recompute_method"),
        )


def mtp_is_after_a_layer_of_the_user(facts: Facts) -> Iterator[Problem]:
    """With layer_spec, the chunk of the MTP layers needs another layer, because they copy its spec.

    Source: trainer/model/multi_token.py.
    """
    chunks, model = facts.chunk_layers, facts.model
    if (
        model.layer_spec is not None
        and model.mtp_num_layers is not None
        and chunks
        and not chunks[mtp_chunk(facts.parallelism)]
    ):
        yield Problem(
            path="model.layer_spec",
            reason="would not change the MTP layers, which copy the spec of the last layer on their pipeline stage, "
            "but there is none",
            hint="move a layer to that stage",
        )


def mtp_has_no_communication_overlap(facts: Facts) -> Iterator[Problem]:
    """No tp_comm_overlap with MTP.

    Source: megatron/core/extensions/transformer_engine.py, TELinear. In megatron-core 0.16, the projection of an MTP
    layer (eh_proj) has no name for its buffer, which ends in an AssertionError. In 0.19, it has a name that Transformer
    Engine does not know, which turns the overlap off for the layers that are built after it.
    """
    if facts.model.mtp_num_layers is not None and facts.parallelism.tp_comm_overlap:
        yield Problem(
            path="parallelism.tp_comm_overlap",
            reason=f"is not supported with {KEY} = {facts.model.mtp_num_layers}, because Transformer Engine has no "
            "buffer for the projection of an MTP layer",
            candidates=[False],
            about=("model.mtp_num_layers",),
        )


OF_MODEL: tuple[Rule, ...] = (mtp_needs_model_of_core, mtp_needs_rope)
"""Rules of keys of the section `model` that contradict each other."""

RULES: tuple[Rule, ...] = (
    *OF_MODEL,
    mtp_weight_needs_mtp,
    tensor_parallel_divides_mtp_projection,
    mtp_is_recomputed_by_layer,
    mtp_is_after_a_layer_of_the_user,
    mtp_has_no_communication_overlap,
)

WARNINGS: tuple[Rule, ...] = ()
