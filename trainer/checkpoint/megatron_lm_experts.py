"""Keys of experts as arguments of Megatron-LM, and back.

Sources, in Megatron-LM 0.16.1 and 0.19.2: `_add_moe_args` (megatron/training/arguments.py), and in 0.19 the arguments
that argument_utils.py derives from TransformerConfig.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from trainer.contract.config import ModelConfig, ParallelismConfig, field_hints
from trainer.contract.model.experts import MODEL_KEYS, core_moe_layer_freq, expert_tensor_parallel_size

SAME_NAME = tuple(key for key in MODEL_KEYS if key != "moe_layer_freq")
"""Keys of the section `model` that are also arguments of the same name."""

FIXED_EXPERTS = {
    "moe_latent_size": None,
    "moe_shared_expert_gate": False,
    "moe_input_jitter_eps": None,
    "moe_apply_probs_on_input": False,
    "moe_router_force_load_balancing": False,
    "moe_router_topk_limited_devices": None,
}
"""Arguments that change what experts compute, with the only value that this trainer supports."""


def expert_args(model: ModelConfig) -> dict[str, Any]:
    """Arguments for the resolved `model`. Empty for a dense model."""
    if model.num_moe_experts is None:
        return {}
    return {
        "num_experts": model.num_moe_experts,
        **{name: getattr(model, name) for name in SAME_NAME},
        "moe_layer_freq": core_moe_layer_freq(model),
        "moe_router_dtype": "fp32",
    }


def current_expert_layout(layout: ParallelismConfig) -> dict[str, int]:
    """Arguments for the expert-parallel sizes of a model with experts."""
    return {
        "expert_model_parallel_size": layout.expert_model_parallel_size,
        "expert_tensor_parallel_size": expert_tensor_parallel_size(layout),
    }


def saved_expert_layout(args: Mapping[str, Any]) -> dict[str, int]:
    """Expert-parallel sizes in `args`. ETP is TP by default."""
    return {
        "expert_model_parallel_size": args.get("expert_model_parallel_size") or 1,
        "expert_tensor_parallel_size": (
            args.get("expert_tensor_parallel_size") or args["tensor_model_parallel_size"]
        ),
    }


def expert_section(args: Mapping[str, Any]) -> dict[str, Any]:
    """Known keys of the section `model` for `args`, as in JSON."""
    if args.get("num_experts") is None:
        return {"num_moe_experts": None}
    every = args.get("moe_layer_freq", 1)
    pattern = (
        [int(i % every == 0) for i in range(args["num_layers"])] if isinstance(every, int) else list(every)
    )
    given = {name: args[name] for name in SAME_NAME if args.get(name) is not None}
    return {
        "num_moe_experts": args["num_experts"],
        **{name: value for name, value in given.items() if name not in _unread(args)},
        "moe_layer_freq": pattern if 0 in pattern else None,
    }


def _unread(args: Mapping[str, Any]) -> list[str]:
    """Keys that Megatron-Core does not read with the other `args`, and that a resolved model must not have.

    DeepSeek-V3's usual script has --moe-router-pre-softmax, for example.
    """
    capacity = args.get("moe_expert_capacity_factor")
    has_capacity = capacity is not None and capacity >= 0
    is_read = {
        "moe_router_pre_softmax": args.get("moe_router_score_function", "softmax") == "softmax",
        "moe_router_num_groups": args.get("moe_router_group_topk"),
        "moe_router_bias_update_rate": args.get("moe_router_enable_expert_bias"),
        "moe_aux_loss_coeff": args.get("moe_router_load_balancing_type") != "none",
        "moe_expert_capacity_factor": has_capacity,
        "moe_token_drop_policy": has_capacity,
    }
    return [name for name, value in is_read.items() if not value]


def unsupported_experts(args: Mapping[str, Any]) -> Iterator[str]:
    """Options of experts that this trainer does not have, as they are shown to the user."""
    if args.get("num_experts") is None:
        return
    for name, value in FIXED_EXPERTS.items():
        if args.get(name) not in (None, value):
            yield f"{name} = {args[name]!r}"
    kind = args.get("moe_router_load_balancing_type", "aux_loss")
    if kind not in get_args(field_hints(ModelConfig)["moe_router_load_balancing_type"]):
        yield f"moe_router_load_balancing_type = {kind!r}"
