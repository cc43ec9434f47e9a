"""Converts the options of Megatron-LM that shape the model and have no key with the same value."""

from __future__ import annotations

import re

from hpcgen.check.migration.latent_attention import carry_latent_attention
from hpcgen.check.migration.leftover import Carried, is_sure
from hpcgen.check.migration.values import Flags, carry_as, integer, shown, why_not
from trainer.contract.config import to_dict
from trainer.contract.model.rope_parameters import USE_ROPE_SCALING


def carry_model(flags: Flags, carried: Carried) -> None:
    """Values that Megatron-LM derives in validate_args (arguments.py), and flags that negate a key."""
    groups = flags.get("num-query-groups")
    if "group-query-attention" in flags:
        number = integer(flags, "num-query-groups") if groups else 1  # Megatron-LM's default
        if number:
            carried.put("model.num_query_groups", number)
        elif groups:
            carry_as("model.num_query_groups", groups, carried)
    elif groups:
        carried.leave(groups.line, shown(groups), "nothing reads it without --group-query-attention")
    if "use-rotary-position-embeddings" in flags:
        carried.put("model.position_embedding_type", "rope")
    flag = flags.get("no-position-embedding")
    if flag and carried.get("model.position_embedding_type") != "rope":
        why = "the trainer supports only learned_absolute and rope"
        carried.refuse(flag.line, shown(flag), why, "model.position_embedding_type")
    if "disable-bias-linear" in flags:
        carried.put("model.add_bias_linear", False)
    hidden = carried.get("model.hidden_size")
    if carried.get("model.swiglu") and hidden and "ffn-hidden-size" not in flags:
        # two thirds, because a gated MLP has a third matrix; validate_args rounds them to a multiple of 64
        carried.put("model.ffn_hidden_size", int((4 * hidden * 2 / 3) / 64) * 64)
    if flag := flags.get("padded-vocab-size"):
        carry_as("model.padded_vocab_size", flag, carried)
    carry_latent_attention(flags, carried)
    _activation(flags, carried)
    _window(flags, carried)
    _rope_scaling(flags, carried)


def _activation(flags: Flags, carried: Carried) -> None:
    """GELU is the tanh approximation in the kernel that adds the bias, and exact elsewhere.

    Sources: core_transformer_config_from_args (arguments.py), megatron/core/fusions/fused_bias_gelu.py.
    """
    key, has_swiglu = "model.activation_func", carried.get("model.swiglu")
    squared, unfused = flags.get("squared-relu"), flags.get("no-bias-gelu-fusion")
    if squared and has_swiglu:
        carried.refuse(squared.line, shown(squared), "Megatron-LM stops if it is combined with --swiglu", key)
    elif squared:
        carried.put(key, "squared_relu")
    elif not has_swiglu and (unfused or carried.get("model.add_bias_linear") is False):
        carried.put(key, "gelu")
    if unfused and (squared or has_swiglu):
        carried.leave(unfused.line, shown(unfused), "it only applies to GELU")
    if flag := flags.get("openai-gelu"):
        carried.leave(flag.line, shown(flag), "Megatron-Core's layers ignore it")


def _window(flags: Flags, carried: Carried) -> None:
    """Convert --window-size, which leaves out the token itself. model.window_size includes it."""
    flag, key = flags.get("window-size"), "model.window_size"
    if flag is None:
        return
    word = flag.value if len(flag.values) == 1 else None
    if word is None or not is_sure(word):
        carried.refuse(flag.line, shown(flag), why_not(key, flag), key)
    elif found := re.fullmatch(r"\(?(\d{1,15}),0\)?", word.text, re.ASCII):
        carried.put(key, int(found[1]) + 1)
    else:
        why = "the trainer supports only N,0, which is N tokens before each token"
        carried.refuse(flag.line, shown(flag), why, key)


def _rope_scaling(flags: Flags, carried: Carried) -> None:
    """The scaling that pretrain_gpt.py computes, which ignores --rope-scaling-factor (gpt_builders.py)."""
    names = ("use-rope-scaling", "rope-scaling-factor", "rotary-seq-len-interpolation-factor")
    llama3, factor, linear = (flags.get(name) for name in names)
    key, has_rope = "model.rope_scaling", carried.get("model.position_embedding_type") == "rope"
    if llama3 and has_rope:
        scaling = to_dict(USE_ROPE_SCALING)
        carried.put(key, {name: value for name, value in scaling.items() if value is not None})
        if factor and not (is_sure(factor.value) and factor.value and factor.value.text in ("8", "8.0")):
            why = "pretrain_gpt.py ignores it and computes with 8"
            carried.refuse(factor.line, shown(factor), why, key)
    elif factor:
        carried.leave(factor.line, shown(factor), "it only applies with --use-rope-scaling")
    if llama3 and not has_rope:
        carried.leave(llama3.line, shown(llama3), "it only applies with rotary embeddings")
    if linear and linear.value and linear.value.text in ("1", "1.0"):
        carried.usual.append(f"--{linear.name}")
    elif linear and has_rope:
        why = (
            "pretrain_gpt.py of 0.16 ignores it, that of 0.19 computes with it; set null, or {rope_type: linear, "
            "factor: ...}"
        )
        carried.refuse(linear.line, shown(linear), why, key)
    elif linear:
        carried.leave(linear.line, shown(linear), "it only applies with rotary embeddings")
