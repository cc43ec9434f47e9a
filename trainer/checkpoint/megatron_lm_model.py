"""The section `model` as arguments of Megatron-LM, and back.

Sources, in Megatron-LM 0.16.1 and 0.19.2: `core_transformer_config_from_args` (megatron/training/arguments.py, and
argument_utils.py in 0.19), gpt_builders.py (0.16) and `gpt_config_from_args` in argument_utils.py (0.19).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from trainer.checkpoint.megatron_lm_experts import expert_args, expert_section, unsupported_experts
from trainer.contract.attention.latent import LATENT
from trainer.contract.attention.latent_rotary import MEGATRON_YARN, rotary_arguments, yarn_section
from trainer.contract.config import ModelConfig, RopeScaling
from trainer.contract.config.resolve import resolve_rope_scaling
from trainer.contract.model.rope_parameters import USE_ROPE_SCALING

MODEL = (
    *("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels", "seq_length"),
    *(
        "max_position_embeddings",
        "position_embedding_type",
        "rotary_base",
        "normalization",
        "layernorm_epsilon",
    ),
    *("swiglu", "add_bias_linear", "add_qkv_bias", "qk_layernorm", "untie_embeddings_and_output_weights"),
    *("padded_vocab_size", "attention_dropout", "hidden_dropout"),
    *("multi_latent_attention", "mtp_num_layers", "mtp_loss_scaling_factor"),
)
"""Fields of ModelConfig that are also Megatron-LM arguments of the same name."""

FIXED_MODEL = {
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "no_rope_freq": None,
    "quick_geglu": False,
    "layernorm_zero_centered_gamma": False,
    "apply_residual_connection_post_layernorm": False,
    "apply_query_key_layer_scaling": False,
    "qk_l2_norm": False,
    "attention_output_gate": False,
    "experimental_attention_variant": None,
    "mla_down_proj_fusion": False,
    "mtp_use_repeated_layer": False,
    "window_attn_skip_freq": None,
    "softmax_type": "vanilla",
    "is_hybrid_model": False,
    "spec": None,
}
"""Arguments that change the meaning of the weights, with the only value that this trainer supports."""


def model_args(model: ModelConfig) -> dict[str, Any]:
    """Arguments for the resolved `model`, without those that are None.

    Megatron-LM has no arguments for other constants of llama3, nor for gelu_tanh without biases. For YaRN, the type of
    position embedding is Megatron-Core's, so that --use-checkpoint-args does not build unscaled rope.
    """
    scaling = model.rope_scaling
    args: dict[str, Any] = {
        **{name: getattr(model, name) for name in MODEL},
        **{name: value for name, value in FIXED_MODEL.items() if value is not None},
        "num_query_groups": model.num_query_groups,
        "group_query_attention": model.num_query_groups != model.num_attention_heads,
        # Only the deprecated --no-position-embedding turns this off. It is true with rotary embeddings too.
        "add_position_embedding": True,
        "use_rotary_position_embeddings": model.position_embedding_type == "rope",
        "squared_relu": model.activation_func == "squared_relu",
        "openai_gelu": False,
        "bias_gelu_fusion": model.activation_func == "gelu_tanh" and model.add_bias_linear,
        "use_rope_scaling": scaling == USE_ROPE_SCALING,
        "init_method_std": model.init_method_std,
        **expert_args(model),
    }
    if model.window_size is not None:
        args["window_size"] = (model.window_size - 1, 0)
    if model.multi_latent_attention:
        # Megatron-LM cannot scale this rotary embedding in other ways than YaRN.
        return args | {name: getattr(model, name) for name in LATENT.keys} | rotary_arguments(model)
    if scaling is not None and scaling.rope_type == "linear":
        args["rotary_seq_len_interpolation_factor"] = scaling.factor
    if model.yarn is not None:
        args |= {"position_embedding_type": "yarn", "use_rotary_position_embeddings": False}
    return args


def model_section(args: Mapping[str, Any]) -> dict[str, Any]:
    """Known keys of the section `model` for `args`, as in JSON."""
    # Leave out the key that this type of position embedding does not use.
    unread = "max_position_embeddings" if args["position_embedding_type"] == "rope" else "rotary_base"
    window, is_latent = args.get("window_size"), bool(args.get("multi_latent_attention"))
    # Megatron-LM sets the arguments of latent attention without it too.
    names = (*MODEL, *LATENT.keys) if is_latent else MODEL
    ignored = (unread, "kv_channels") if is_latent else (unread,)
    return {
        **{name: args[name] for name in names if name not in ignored and args.get(name) is not None},
        "num_query_groups": (
            args["num_query_groups"] if args.get("group_query_attention") else args["num_attention_heads"]
        ),
        "add_qkv_bias": not is_latent and (args["add_bias_linear"] or bool(args.get("add_qkv_bias"))),
        "multi_latent_attention": is_latent,
        "mtp_num_layers": args.get("mtp_num_layers"),
        "qk_layernorm": bool(args.get("qk_layernorm")),
        "window_size": None if window is None else window[0] + 1,
        "activation_func": _activation(args),
        "rope_scaling": _latent_rope_scaling(args) if is_latent else _rope_scaling(args),
        **expert_section(args),
    }


def unsupported_model(args: Mapping[str, Any]) -> Iterator[str]:
    """Options of the model that this trainer does not have, as they are shown to the user."""
    window, factor = args.get("window_size"), args.get("rope_scaling_factor", 8.0)
    if window is not None and (window[0] < 0 or tuple(window[1:]) != (0,)):
        yield f"window_size = {tuple(window)!r} (supported is (N, 0), N tokens before each token)"
    if args["position_embedding_type"] not in ("learned_absolute", "rope"):
        yield f"position_embedding_type = {args['position_embedding_type']!r}"
    if args.get("use_rope_scaling") and factor != 8.0:
        yield f"rope_scaling_factor = {factor!r} (pretrain_gpt.py ignores it and computes with 8)"
    if args.get("use_rope_scaling") and args.get("rotary_seq_len_interpolation_factor") is not None:
        yield "use_rope_scaling with rotary_seq_len_interpolation_factor"
    if args.get("multi_latent_attention"):
        yield from _unsupported_latent_attention(args)
    if args.get("openai_gelu") and _activation(args) == "gelu":
        yield "openai_gelu without bias_gelu_fusion (Megatron-Core ignores it and computes exact GELU)"
    yield from unsupported_experts(args)


def _latent_rope_scaling(args: Mapping[str, Any]) -> dict[str, Any] | None:
    """YaRN, which is the default of latent attention, unless its factor is 1."""
    factor = float(args.get("rotary_scaling_factor") or 1.0)
    if factor == 1 or args.get("rope_type") == "rope":
        return None
    scales = {name: args[name] for name in ("mscale", "mscale_all_dim") if name in args}
    bounds = {name: args[name] for name in MEGATRON_YARN if args.get(name)}
    return dataclasses.asdict(resolve_rope_scaling(RopeScaling(**yarn_section(factor, **scales, **bounds))))


def _unsupported_latent_attention(args: Mapping[str, Any]) -> Iterator[str]:
    if args.get("qk_layernorm") and args.get("q_lora_rank") is None:
        yield "qk_layernorm without q_lora_rank (megatron-core 0.16 and 0.19 compute different queries)"
    is_scaled = args.get("rotary_scaling_factor") not in (None, 1.0)
    if is_scaled and args.get("rope_type") == "rope" and args.get("mscale_all_dim"):
        yield "mscale_all_dim with rope_type = 'rope'"


def _activation(args: Mapping[str, Any]) -> str | None:
    """The function of the MLP. GELU is the tanh approximation only in the kernel that adds the bias."""
    if args["swiglu"]:
        return None
    if args.get("squared_relu"):
        return "squared_relu"
    return "gelu_tanh" if args["add_bias_linear"] and args.get("bias_gelu_fusion", True) else "gelu"


def _rope_scaling(args: Mapping[str, Any]) -> dict[str, Any] | None:
    factor = args.get("rotary_seq_len_interpolation_factor")
    if args.get("use_rope_scaling"):
        return dataclasses.asdict(USE_ROPE_SCALING)
    if factor is not None:
        return dataclasses.asdict(RopeScaling(rope_type="linear", factor=float(factor)))
    return None
