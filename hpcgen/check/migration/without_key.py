"""Options of Megatron-LM without a key in a run file: usual, listed or refused."""

from __future__ import annotations

from hpcgen.check.lint.launch import Flag
from hpcgen.check.lint.megatron import NOT_MEGATRON, REMOVED, nearest_option, options
from hpcgen.check.migration.leftover import Carried, is_sure
from hpcgen.check.migration.options import NO_EFFECT_ON_RESULTS, REPLACED, USUAL, WHY_NOT
from hpcgen.check.migration.values import shown


def carry_without_key(flag: Flag, carried: Carried) -> None:
    """Notes an option that asks for the usual behavior, lists one that has no effect on results, or refuses it."""
    name, what = flag.name, shown(flag)
    value = flag.value.text if is_sure(flag.value) and flag.value and len(flag.values) == 1 else None
    if name in USUAL and (not USUAL[name] or value in USUAL[name]):
        carried.usual.append(f"--{name}")
    elif name in REPLACED:
        carried.refuse(flag.line, what, f"Megatron-LM stops at it; {REMOVED[name]}", REPLACED[name])
    elif not NO_EFFECT_ON_RESULTS.fullmatch(name):
        carried.refuse(flag.line, what, _why_no_key(name) or "a run file has no key for it")
    elif why := _why_no_key(name):
        carried.leave(flag.line, what, why)
    else:
        carried.without_effect.append(what)


def _why_no_key(name: str) -> str | None:
    """What is special about an option without a key; None for an ordinary one."""
    if name in WHY_NOT:
        return WHY_NOT[name]
    if name in REMOVED:
        return f"Megatron-LM stops at it; {REMOVED[name]}"
    if name in NOT_MEGATRON:
        return f"Megatron-LM does not have it: {NOT_MEGATRON[name]}"
    if name not in options():
        meant = nearest_option(name)
        return f"no release of Megatron-LM has this option{f'; did you mean --{meant}?' if meant else ''}"
    return None
