"""Converts Megatron-LM's options of mixtures of experts."""

from __future__ import annotations

from hpcgen.check.lint.launch import Flag
from hpcgen.check.lint.megatron import KEYS, options
from hpcgen.check.migration.leftover import Carried, is_sure
from hpcgen.check.migration.options import EXPERT_OPTIONS
from hpcgen.check.migration.values import Flags, carry_as, shown, why_not
from hpcgen.check.migration.without_key import carry_without_key
from hpcgen.config.layer_pattern import layer_pattern

COUNT = "num-experts"
NEEDS = {
    "moe-router-bias-update-rate": "model.moe_router_enable_expert_bias",
    "moe-router-num-groups": "model.moe_router_group_topk",
    "moe-token-drop-policy": "model.moe_expert_capacity_factor",
}
"""Options that are only read if another key is set, which a run file would refuse without it."""
EXCLUDED_BY = {
    "moe-router-pre-softmax": ("model.moe_router_score_function", "sigmoid"),
    "moe-aux-loss-coeff": ("model.moe_router_load_balancing_type", "none"),
}
"""Options without effect for a value of another key, which a run file would refuse with it -> the key and the value."""

OTHER_DISPATCHERS = ("flex", "alltoall_seq")
"""Values of --moe-token-dispatcher-type that only change the communication, and that the trainer does not have."""


def carry_experts(flags: Flags, carried: Carried) -> None:
    """Converts --num-experts and the options that are only read with it."""
    if count := flags.get(COUNT):
        carried.seen.add(COUNT)
        carry_as(KEYS[COUNT], count, carried)
    has_experts = count is not None or carried.get(KEYS[COUNT]) is not None
    given = [flag for flag in flags.values() if EXPERT_OPTIONS.match(flag.name)]
    for flag in sorted(given, key=lambda flag: flag.name in NEEDS or flag.name in EXCLUDED_BY):
        carried.seen.add(flag.name)
        needed = NEEDS.get(flag.name)
        key, value = EXCLUDED_BY.get(flag.name, (None, None))
        if not has_experts and flag.name in options():
            carried.leave(flag.line, shown(flag), f"it only applies with --{COUNT}")
        elif needed is not None and not carried.get(needed):
            carried.leave(flag.line, shown(flag), f"it only applies with {needed}")
        elif key is not None and carried.get(key) == value:
            carried.leave(flag.line, shown(flag), f"it has no effect with {key} = {value}")
        elif flag.name == "moe-layer-freq":
            _layer_freq(flag, carried)
        elif flag.name == "moe-expert-capacity-factor" and _text(flag).startswith("-"):
            carried.leave(flag.line, shown(flag), "a negative capacity is none")
        elif flag.name == "moe-token-dispatcher-type" and _text(flag) in OTHER_DISPATCHERS:
            carried.leave(flag.line, shown(flag), "the trainer has alltoall and allgather")
        elif flag.name == "moe-layer-recompute" and _keeps_default_modules(flags, carried):
            carried.put("training.recompute_granularity", "selective")
            carried.put("training.recompute_modules", ["core_attn", "moe"])
        elif flag.name in KEYS:
            carry_as(KEYS[flag.name], flag, carried)
        else:
            carry_without_key(flag, carried)
    _drop_loss_without_coefficient(flags, carried)


def _drop_loss_without_coefficient(flags: Flags, carried: Carried) -> None:
    """Megatron-LM's default coefficient is 0, which means no loss of any type (moe/router.py)."""
    key, coefficient = "model.moe_router_load_balancing_type", "model.moe_aux_loss_coeff"
    flag = flags.get("moe-router-load-balancing-type")
    if flag and carried.get(key) == "seq_aux_loss" and not carried.get(coefficient):
        carried.drop(key)
        carried.leave(
            flag.line, shown(flag), "it has no effect without --moe-aux-loss-coeff, whose default is 0"
        )


def _keeps_default_modules(flags: Flags, carried: Carried) -> bool:
    """True if no option chooses other modules to recompute, or entire layers."""
    is_selective = carried.get("training.recompute_granularity") in (None, "selective")
    return is_selective and "recompute-modules" not in flags


def _layer_freq(flag: Flag, carried: Carried) -> None:
    """--moe-layer-freq is N for experts in every N-th layer, or a Python list of zeros and ones (moe_freq_type)."""
    key, text, layers = "model.moe_layer_freq", _text(flag), carried.get("model.num_layers")
    if not text:
        carried.refuse(flag.line, shown(flag), why_not(key, flag), key)
    elif (pattern := layer_pattern(text, layers)) is None:
        why = "it is neither a number nor a list of zeros and ones"
        carried.refuse(flag.line, shown(flag), why, key)
    elif not all(pattern):
        carried.put(key, pattern)


def _text(flag: Flag) -> str:
    """The value of an option; empty if it is unknown."""
    return flag.value.text if flag.value and is_sure(flag.value) and len(flag.values) == 1 else ""
