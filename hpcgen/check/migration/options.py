"""Options of Megatron-LM that have no key in a run file, or no effect here."""

from __future__ import annotations

import re

from hpcgen.check.lint.launch import Flag
from hpcgen.check.lint.megatron import nearest_option
from hpcgen.check.migration.leftover import Carried
from hpcgen.check.migration.values import Flags, shown, sure_text
from hpcgen.config.megatron_options import OptionRow, row_of


def carry_without_key(flag: Flag, carried: Carried) -> None:
    """Notes an option that asks for the usual behavior, lists one that has no effect on results, or refuses it."""
    name, what, row = flag.name, shown(flag), row_of(flag.name)
    why = _why_no_key(name, row)
    if row and row.kind == "usual" and (not row.values or sure_text(flag) in row.values):
        carried.usual.append(f"--{name}")
    elif row is None or row.decides:
        carried.refuse(flag.line, what, why or "a run file has no key for it", *(row.keys if row else ()))
    elif why:
        carried.leave(flag.line, what, why)
    else:
        carried.without_effect.append(what)


def _why_no_key(name: str, row: OptionRow | None) -> str | None:
    """Why a run file has no key for an option; None if there is no special reason."""
    if row is None or row.kind in ("name", "family"):
        meant = nearest_option(name)
        return f"no release of Megatron-LM has this option{f'; did you mean --{meant}?' if meant else ''}"
    fate = {"removed": "Megatron-LM stops at it: ", "absent": "Megatron-LM does not have it: "}
    return f"{fate.get(row.kind, '')}{row.note}" or None


def without_effect(row: OptionRow, flags: Flags, carried: Carried) -> str | None:
    """Why an option has no effect here, so that a run file might refuse its key. None if it has an effect."""
    for condition in row.needs:
        is_excluded = condition.startswith("not ")
        condition = condition.removeprefix("not ")
        if _holds(condition, flags, carried) == is_excluded:
            return f"it {'has no effect' if is_excluded else 'only applies'} with {condition}"
    return None


def _holds(condition: str, flags: Flags, carried: Carried) -> bool:
    """True for "--OPTION" that is given, "KEY" that is set, "KEY = VALUE", or "KEY > NUMBER"."""
    if condition.startswith("--"):
        return condition.removeprefix("--") in flags
    path, sign, value = re.split(r" ([=>]) |$", condition, maxsplit=1)
    found = carried.get(path)
    if sign == "=":
        return bool(found == value)
    if sign == ">":
        return isinstance(found, int) and found > int(value)
    return found is not None and found is not False
