"""Values of sbatch options that sbatch refuses, or reads in another way than meant.

Measured with sbatch --test-only of Slurm 22.05; the words are those of src/common/slurm_opt.c and proc_args.c.
"""

from __future__ import annotations

import re

from hpcgen.config.fields import seconds, slurm_time
from hpcgen.config.sbatch_options import OPTIONS, Form
from hpcgen.text import misspelled, one_of

_TIME = r"-1|infinite|unlimited|\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}"
_NODES = r"-?\d+[km]?(-\d+[km]?)?(:\d+)?(,\d+[km]?(-\d+[km]?)?(:\d+)?)*"
_BLOCKS = r"(\*|block|cyclic|fcyclic)"
_FOR_TIME = "write minutes, HH:MM:SS or D-HH:MM:SS, such as 1-00:00:00"
_PATTERNS: dict[Form, tuple[str, str, str]] = {
    "time": (_TIME, "a time", _FOR_TIME),
    "nodes": (_NODES, "a number of nodes", "write a number, or MIN-MAX"),
    "count": (r"0*[1-9]\d*", "a positive number", "write a number"),
    "size": (r"\d+([kmgt]b?)?", "a size", "write a number with K, M, G or T, such as 64G"),
    "distribution": (
        rf"(\*|block|cyclic|arbitrary|plane(=\d+)?)(:{_BLOCKS}){{0,2}}(,(no)?pack)*|(no)?pack",
        "a distribution",
        "write block, cyclic, plane=SIZE or arbitrary, such as block:block",
    ),
    "switches": (r"\d+(@[\d:-]+)?", "a number of switches", "write COUNT or COUNT@TIME"),
}
"""Form -> the pattern of its values, what they are, and the fix."""
CHECKED = frozenset(name for name, row in OPTIONS.items() if row.form)
"""Options whose values are checked."""


def refused_value(option: str, value: str) -> tuple[str, str] | None:
    """The reason why sbatch refuses a value of an option ("is not a time"), and the fix; None if it may be valid."""
    row = OPTIONS.get(option)
    if row is None:
        return None
    if row.form in _PATTERNS:
        pattern, meaning, fix = _PATTERNS[row.form]
        is_valid = re.fullmatch(pattern, value, re.ASCII | re.IGNORECASE)
        return None if is_valid else (f"is not {meaning}: sbatch refuses it", fix)
    known = row.words
    words = value.split(",") if row.form == "list" else [value] if value else []
    wrong = next((word for word in words if word.lower() not in map(str.lower, known)), None)
    if not known or wrong is None:
        return None
    begun = [word for word in known if wrong.lower().startswith(word.lower())]
    reason = "has" if len(words) > 1 else "is"
    reason += f" {wrong}, which sbatch does not know" if len(words) > 1 else " a value that sbatch refuses"
    return reason, f"use {one_of(tuple(misspelled(wrong, known) or begun or known))}"


def other_reading(time: str) -> tuple[str, str] | None:
    """The meaning of MINUTES:SECONDS if hours were probably meant, such as "24:00", and how to write both.

    A multiple of 12 that is not a multiple of 5 is a likely number of hours and an unlikely number of minutes.
    """
    found = re.fullmatch(r"(\d{1,4}):00", time, re.ASCII)
    minutes = int(found[1]) if found else 0
    if not minutes or minutes % 12 or not minutes % 5:
        return None
    reason = f"means {minutes} minutes to Slurm (minutes:seconds), not {minutes} hours"
    as_hours, as_minutes = slurm_time(minutes * 3600), slurm_time(seconds(time))
    return reason, f"write {as_hours} for {minutes} hours, or {as_minutes} for {minutes} minutes"
