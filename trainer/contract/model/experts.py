"""Mixtures of experts: defaults of their keys, and keys of the section `model` that contradict each other.

The sources are files of megatron/core/transformer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from trainer.contract.config import ModelConfig, ParallelismConfig
from trainer.contract.config.unused_keys import Mistake, unused_keys
from trainer.contract.wording import counted, one_of

MODEL_KEYS = tuple(field.name for field in dataclasses.fields(ModelConfig) if field.name.startswith("moe_"))
"""Keys of the section `model` that need num_moe_experts."""


def default_width(model: ModelConfig, ffn_hidden_size: int) -> int | None:
    """Width of an expert: `ffn_hidden_size` unless it is set; None for a dense model."""
    return model.moe_ffn_hidden_size or (ffn_hidden_size if model.num_moe_experts is not None else None)


def expert_tensor_parallel_size(parallelism: ParallelismConfig) -> int:
    """Number of ranks that share each expert: TP unless it is set (megatron/core/parallel_state.py)."""
    return parallelism.expert_tensor_parallel_size or parallelism.tensor_model_parallel_size


def moe_layer_pattern(model: ModelConfig) -> tuple[bool, ...]:
    """For each layer, True if it has experts and False if it is dense. MTP layers are like the last layer."""
    if model.num_moe_experts is None or model.moe_layer_freq is None:
        return (model.num_moe_experts is not None,) * model.num_layers
    return tuple(map(bool, model.moe_layer_freq))


def num_moe_layers(model: ModelConfig) -> int:
    """Number of layers with experts, without MTP layers."""
    return sum(moe_layer_pattern(model))


def expert_checks(model: ModelConfig) -> Iterator[Iterator[Mistake]]:
    """The checks of the keys of experts, each with the keys that contradict another key. `model` may contain nulls."""
    if model.num_moe_experts is None:
        yield unused_keys(model, MODEL_KEYS, "num_moe_experts is null", "set num_moe_experts")
        return
    yield _layer_problems(model)
    yield _shared_expert_problems(model)
    yield _routing_problems(model, model.num_moe_experts)
    if model.moe_router_num_groups is not None or model.moe_router_group_topk is not None:
        yield _group_problems(model, model.num_moe_experts)
    yield _balancing_problems(model)
    yield _capacity_problems(model, model.num_moe_experts)


def _layer_problems(model: ModelConfig) -> Iterator[Mistake]:
    """megatron/core/models/gpt/gpt_layer_specs.py, get_gpt_decoder_layer_specs."""
    layers = model.moe_layer_freq
    if layers is not None and len(layers) != model.num_layers:
        reason = f"has {counted(len(layers), 'number')}, but num_layers = {model.num_layers}"
        yield "moe_layer_freq", reason, "write one number per layer, or null for experts in every layer"
    elif layers is not None and not any(layers):
        yield "moe_layer_freq", "contains no 1, so no layer has experts", "set num_moe_experts to null"


def _shared_expert_problems(model: ModelConfig) -> Iterator[Mistake]:
    """moe/shared_experts.py."""
    if model.moe_shared_expert_intermediate_size is not None and model.add_bias_linear:
        reason = "does not support add_bias_linear = true"
        yield "moe_shared_expert_intermediate_size", reason, "set add_bias_linear to false"


def _routing_problems(model: ModelConfig, experts: int) -> Iterator[Mistake]:
    """moe/moe_utils.py, topk_routing_with_score_function; transformer_config.py, __post_init__."""
    topk = model.moe_router_topk
    if topk > experts:
        yield "moe_router_topk", f"is more than num_moe_experts = {experts}", f"use at most {experts}"
    is_softmax = model.moe_router_score_function == "softmax"
    if topk == 1 and is_softmax and not model.moe_router_pre_softmax:
        reason = "has no gradient for the router, because the softmax of a single score is always 1"
        yield "moe_router_topk", reason, "set moe_router_pre_softmax to true"
    if model.moe_router_pre_softmax and not is_softmax:
        reason = f"has no effect with moe_router_score_function = {model.moe_router_score_function}"
        yield "moe_router_pre_softmax", reason, "use false"


def _group_problems(model: ModelConfig, experts: int) -> Iterator[Mistake]:
    """transformer_config.py, __post_init__; moe/moe_utils.py, group_limited_topk."""
    groups, chosen, topk = model.moe_router_num_groups, model.moe_router_group_topk, model.moe_router_topk
    if groups is None:
        yield "moe_router_group_topk", "requires moe_router_num_groups", "set moe_router_num_groups"
        return
    if chosen is None:
        reason = "has no effect without moe_router_group_topk"
        yield "moe_router_num_groups", reason, "set moe_router_group_topk, or remove both"
        return
    if experts % groups:
        reason = f"does not divide num_moe_experts = {experts} ({experts} / {groups})"
        divisors = [str(number) for number in range(1, min(experts, 1024) + 1) if experts % number == 0]
        yield "moe_router_num_groups", reason, f"use {one_of(divisors)}"
    elif chosen > groups:
        yield (
            "moe_router_group_topk",
            f"is more than moe_router_num_groups = {groups}",
            f"use at most {groups}",
        )
    elif chosen > topk:
        # Core rates a group by its best topk // group_topk experts. With none, all groups are equal.
        yield "moe_router_group_topk", f"is more than moe_router_topk = {topk}", f"use at most {topk}"
    elif topk > chosen * (experts // groups):
        in_groups = f"{chosen} x {experts // groups} = {chosen * (experts // groups)}"
        reason = f"is more than the {in_groups} experts of moe_router_group_topk groups"
        yield "moe_router_topk", reason, "choose more groups or fewer experts"


def _balancing_problems(model: ModelConfig) -> Iterator[Mistake]:
    """transformer_config.py, __post_init__. Keys that have no effect are errors here, and ignored by Core."""
    if model.moe_router_enable_expert_bias and model.moe_router_score_function != "sigmoid":
        reason = f"requires moe_router_score_function = sigmoid, but it is {model.moe_router_score_function}"
        yield "moe_router_enable_expert_bias", reason, "set moe_router_score_function to sigmoid"
    if not model.moe_router_enable_expert_bias:
        needed = "set moe_router_enable_expert_bias to true"
        why = "moe_router_enable_expert_bias is false"
        yield from unused_keys(model, ("moe_router_bias_update_rate",), why, needed)
    if model.moe_router_load_balancing_type == "none" and model.moe_aux_loss_coeff > 0:
        reason = "has no effect, because moe_router_load_balancing_type is none"
        yield "moe_aux_loss_coeff", reason, "set moe_router_load_balancing_type to aux_loss, or use 0"


def _capacity_problems(model: ModelConfig, experts: int) -> Iterator[Mistake]:
    """transformer_config.py, __post_init__; moe/moe_utils.py, get_capacity and permute."""
    factor, topk = model.moe_expert_capacity_factor, model.moe_router_topk
    if factor is None:
        if model.moe_pad_expert_input_to_capacity:
            advice = "set moe_expert_capacity_factor"
            yield "moe_pad_expert_input_to_capacity", "requires moe_expert_capacity_factor", advice
        needed = "set moe_expert_capacity_factor"
        yield from unused_keys(
            model, ("moe_token_drop_policy",), "moe_expert_capacity_factor is null", needed
        )
    elif topk <= experts < factor * topk:
        # Padding fails in Core above the number of tokens, and a capacity that is never reached drops nothing.
        reason = (
            f"results in a capacity of {factor * topk / experts:g} times the tokens, which is never reached"
        )
        yield "moe_expert_capacity_factor", reason, f"use at most {experts / topk:g}, or null"
