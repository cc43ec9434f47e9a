"""Options that have an effect only if others do, or if a key has a certain value."""

from __future__ import annotations

import re

from hpcgen.check.migration.leftover import Carried
from hpcgen.check.migration.values import Flags
from hpcgen.config.megatron_options import OptionRow


def without_effect(row: OptionRow, flags: Flags, carried: Carried) -> str | None:
    """Why an option has no effect here, and a run file might refuse its key; None if it has one."""
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
