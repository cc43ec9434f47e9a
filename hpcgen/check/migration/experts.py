"""Converts Megatron-LM's options of mixtures of experts."""

from __future__ import annotations

from hpcgen.check.lint.launch import Flag
from hpcgen.check.lint.megatron import KEYS
from hpcgen.check.migration.leftover import Carried
from hpcgen.check.migration.options import carry_without_key, without_effect
from hpcgen.check.migration.values import Flags, carry_as, shown, sure_text, why_not
from hpcgen.config.layer_pattern import layer_pattern
from hpcgen.config.megatron_options import row_of

COUNT = "num-experts"

OTHER_DISPATCHERS = ("flex", "alltoall_seq")
"""Values of --moe-token-dispatcher-type that only change the communication, and that the trainer does not have."""


def carry_experts(flags: Flags, carried: Carried) -> None:
    """Converts --num-experts and the options that are only read with it."""
    if count := flags.get(COUNT):
        carry_as(KEYS[COUNT], count, carried)
    has_experts = count is not None or carried.get(KEYS[COUNT]) is not None
    found = [(flag, row) for flag in flags.values() if (row := row_of(flag.name)) and flag.name != COUNT]
    given = [(flag, row) for flag, row in found if row.carried_by == "experts"]
    for flag, row in sorted(given, key=lambda item: bool(item[1].needs)):
        if not has_experts and row.kind not in ("name", "family"):
            carried.leave(flag.line, shown(flag), f"it only applies with --{COUNT}")
        elif why := without_effect(row, flags, carried):
            carried.leave(flag.line, shown(flag), why)
        elif flag.name == "moe-layer-freq":
            _layer_freq(flag, carried)
        elif flag.name == "moe-expert-capacity-factor" and sure_text(flag).startswith("-"):
            carried.leave(flag.line, shown(flag), "a negative capacity is none")
        elif flag.name == "moe-token-dispatcher-type" and sure_text(flag) in OTHER_DISPATCHERS:
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
    key, text, layers = "model.moe_layer_freq", sure_text(flag), carried.get("model.num_layers")
    if not text:
        carried.refuse(flag.line, shown(flag), why_not(key, flag), key)
    elif (pattern := layer_pattern(text, layers)) is None:
        why = "it is neither a number nor a list of zeros and ones"
        carried.refuse(flag.line, shown(flag), why, key)
    elif not all(pattern):
        carried.put(key, pattern)
