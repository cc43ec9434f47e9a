"""Converts Megatron-LM's options of multi-head latent attention (MLA)."""

from __future__ import annotations

from hpcgen.check.lint.launch import Flag
from hpcgen.check.lint.megatron import KEYS
from hpcgen.check.migration.leftover import Carried
from hpcgen.check.migration.values import Flags, carry_as, shown, sure_text
from hpcgen.config.megatron_options import carried_by
from trainer.contract.attention.latent_rotary import yarn_section

SWITCH, KEY = "multi-latent-attention", "model.multi_latent_attention"
UNUSED = frozenset(("kv-channels", "add-qkv-bias"))
"""Options of standard attention that latent attention ignores."""

POSITIONS = "model.position_embedding_type"

ROPE_SCALING = "model.rope_scaling"
SCALING_OPTIONS = ("rotary-scaling-factor", "mscale", "mscale-all-dim")


def carry_latent_attention(flags: Flags, carried: Carried) -> None:
    """Converts --multi-latent-attention and the options that are only read with it."""
    rows = list(carried_by("latent_attention"))
    given = {row.name: flags[row.name] for row in rows if row.name in flags}
    if SWITCH not in given:
        for unused in given.values():
            carried.leave(unused.line, shown(unused), f"it only applies with --{SWITCH}")
        return
    carried.put(KEY, True)
    for row in rows:
        if row.kind != "key" or row.name == SWITCH:
            continue
        if flag := given.get(row.name):
            carry_as(row.key, flag, carried)
        elif row.default is not None:
            carried.put(row.key, row.default)
    for name in UNUSED & flags.keys():
        carried.drop(KEYS[name])
        carried.leave(flags[name].line, shown(flags[name]), "latent attention does not use it")
    if flag := flags.get("group-query-attention"):
        carried.refuse(flag.line, shown(flag), f"Megatron-LM stops if it is combined with --{SWITCH}")
    flag = flags.get("position-embedding-type")
    if carried.get(POSITIONS) == "learned_absolute" or (flag is None and carried.get(POSITIONS) is None):
        flag = flag or given[SWITCH]
        why = "Megatron-LM also adds learned positions, and the trainer has only the rotary ones of latent attention"
        carried.refuse(flag.line, shown(flag), why, POSITIONS)
    _rope_scaling(given, carried)


def _rope_scaling(given: Flags, carried: Carried) -> None:
    """YaRN, which is MLA's default, with a factor of 1 unless --rotary-scaling-factor is given."""
    numbers = {name: _number(given[name]) for name in SCALING_OPTIONS if name in given}
    for name, number in numbers.items():
        if number is None:
            flag = given[name]
            carried.refuse(flag.line, shown(flag), "its value is not known", ROPE_SCALING)
            return
    factor = numbers.get("rotary-scaling-factor") or 1.0
    if factor == 1:
        return
    kind = given.get("rope-type")
    if kind is not None and sure_text(kind) != "yarn":
        why = "Megatron-LM scales the scores of attention without scaling the rotary embedding"
        carried.refuse(kind.line, shown(kind), why, ROPE_SCALING)
        return
    scales = {
        name.replace("-", "_"): number
        for name, number in numbers.items()
        if number is not None and name != "rotary-scaling-factor"
    }
    carried.put(ROPE_SCALING, yarn_section(factor, **scales))


def _number(flag: Flag) -> float | None:
    try:
        return float(sure_text(flag))
    except ValueError:
        return None
