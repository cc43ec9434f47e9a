"""Options of Megatron-LM without a key in a run file: usual, listed or refused."""

from __future__ import annotations

from hpcgen.check.lint.launch import Flag
from hpcgen.check.lint.megatron import nearest_option
from hpcgen.check.migration.leftover import Carried, is_sure
from hpcgen.check.migration.values import shown
from hpcgen.config.megatron_options import OptionRow, row_of


def carry_without_key(flag: Flag, carried: Carried) -> None:
    """Notes an option that asks for the usual behavior, lists one that has no effect on results, or refuses it."""
    name, what, row = flag.name, shown(flag), row_of(flag.name)
    value = flag.value.text if is_sure(flag.value) and flag.value and len(flag.values) == 1 else None
    why = _why_no_key(name, row)
    if row and row.kind == "usual" and (not row.values or value in row.values):
        carried.usual.append(f"--{name}")
    elif row is None or row.decides:
        carried.refuse(flag.line, what, why or "a run file has no key for it", *(row.keys if row else ()))
    elif why:
        carried.leave(flag.line, what, why)
    else:
        carried.without_effect.append(what)


def _why_no_key(name: str, row: OptionRow | None) -> str | None:
    """What is special about an option without a key; None for an ordinary one."""
    if row is None or row.kind in ("name", "family"):
        meant = nearest_option(name)
        return f"no release of Megatron-LM has this option{f'; did you mean --{meant}?' if meant else ''}"
    fate = {"removed": "Megatron-LM stops at it: ", "absent": "Megatron-LM does not have it: "}
    return f"{fate.get(row.kind, '')}{row.note}" or None
