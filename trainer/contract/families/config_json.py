"""Keys of Hugging Face's config.json that define a model: their types, and how a file is completed with defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from trainer.contract.config import ConfigError, Fraction, NonNegativeFloat, PositiveFloat, Range, typed_value
from trainer.contract.problem import Problem
from trainer.contract.wording import shown

Number = Annotated[int, Range(at_least=1, at_most=10_000)]
"""Number of layers, experts or groups, which are planned one by one."""
Width = Annotated[int, Range(at_least=1, at_most=1_000_000)]
Length = Annotated[int, Range(at_least=1, at_most=1_000_000_000)]

TYPES: dict[str, Any] = {
    "activation_function": str,
    "add_cross_attention": bool,
    "architectures": tuple[str, ...] | None,
    "attention_bias": bool,
    "attention_dropout": Fraction,
    "attn_pdrop": Fraction,
    "decoder_sparse_step": Number,
    "first_k_dense_replace": Annotated[int, Range(at_least=0, at_most=10_000)],
    "head_dim": Width | None,
    "hidden_act": str,
    "hidden_size": Width,
    "initializer_range": PositiveFloat,
    "intermediate_size": Width,
    "kv_lora_rank": Width,
    "layer_norm_epsilon": PositiveFloat,
    "layer_types": tuple[str, ...] | None,
    "max_position_embeddings": Length,
    "max_window_layers": int,
    "mlp_bias": bool,
    "mlp_only_layers": tuple[int, ...] | None,
    "moe_intermediate_size": Width,
    "moe_layer_freq": Number,
    "n_embd": Width,
    "n_group": Number,
    "n_head": Width,
    "n_inner": Width | None,
    "n_layer": Number,
    "n_positions": Length,
    "n_routed_experts": Number,
    "n_shared_experts": Number,
    "norm_topk_prob": bool,
    "num_attention_heads": Width,
    "num_experts": Number,
    "num_experts_per_tok": Number,
    "num_hidden_layers": Number,
    "num_key_value_heads": Width | None,
    "num_local_experts": Number,
    "num_mtp_layers": Annotated[int, Range(at_least=0, at_most=10_000)],
    "original_max_position_embeddings": Length | None,
    "partial_rotary_factor": float | None,
    "per_layer_config": dict[str, Any] | None,
    "q_lora_rank": Width | None,
    "qk_nope_head_dim": Width,
    "qk_rope_head_dim": Width,
    "resid_pdrop": Fraction,
    "rms_norm_eps": PositiveFloat,
    "rope_interleave": bool,
    "rope_parameters": dict[str, Any] | None,
    "rope_scaling": dict[str, Any] | None,
    "rope_theta": Annotated[float, Range(at_least=1, at_most=2**53)],
    "routed_scaling_factor": PositiveFloat,
    "router_aux_loss_coef": NonNegativeFloat,
    "scale_attn_by_inverse_layer_idx": bool,
    "scale_attn_weights": bool,
    "scoring_func": str,
    "sliding_window": Length | None,
    "tie_word_embeddings": bool,
    "topk_group": Number,
    "topk_method": str,
    "use_sliding_window": bool,
    "v_head_dim": Width,
    "vocab_size": Length,
}
"""Type of each key, the same in all families. transformers 5 has the same types, without the ranges."""


def complete(
    document: Mapping[str, Any],
    defaults: Mapping[str, Any],
    fixed: Mapping[str, tuple[Any, ...]],
    aliases: Mapping[str, str],
) -> dict[str, Any]:
    """The keys of `defaults` and `fixed` with their values in `document`, or else transformers' default.

    `fixed` has the supported values of keys, with the default first. `aliases` has other names of keys, which
    override them.

    Raises:
        ConfigError: values of the wrong type or out of range, or values that are not supported. Names all of them.
    """
    values = {**defaults, **{key: allowed[0] for key, allowed in fixed.items()}}
    names = {key: key for key in values} | {key: alias for alias, key in aliases.items() if alias in document}
    problems: list[Problem] = []
    for key, name in names.items():
        if name not in document:
            continue
        try:
            values[key] = typed_value(TYPES[key], document[name], name)
        except ConfigError as error:
            problems += error.mistakes
            continue
        if values[key] not in fixed.get(key, (values[key],)):
            reason = f"is not supported; only {fixed[key][0]!r} is"
            problems.append(contradiction({name: values[key]}, reason))
    if problems:
        raise ConfigError("; ".join(map(str, problems)))
    return values


def contradiction(values: Mapping[str, Any], reason: str) -> Problem:
    """A problem of keys with `values` that do not go together, or that ModelConfig cannot express."""
    subject = " and ".join(f"{key} = {shown(value)}" for key, value in values.items())
    first, *others = values
    return Problem(first, reason, subject=subject, about=tuple(others))
