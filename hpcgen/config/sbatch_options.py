"""The table of the options of sbatch, and of those that only srun or pyxis have.

Its sources are src/common/slurm_opt.c of Slurm 20.11 to 25.11, sbatch(1), srun(1), src/common/env.c, and measurements
with sbatch --test-only of Slurm 22.05.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, cast

from hpcgen.text import nearest
from trainer.contract.record import record

_TABLE = Path(__file__).with_suffix(".tsv")

Form = Literal["", "time", "count", "size", "nodes", "distribution", "switches", "one", "list"]
"""Form of the values that sbatch checks. one, list: one of the option's words, or several of them."""


@record
class OptionRow:
    """An option without its dashes."""

    name: str
    short: str
    """Its letter; "" for none."""
    takes: Literal["", "optional"]
    """optional: it takes no value, or takes one only after `=`. "": it must have a value."""
    sbatch: Literal["all", "some", "old", ""]
    """Releases from Slurm 22.05 to 25.11 whose sbatch has it. old: earlier ones. "": only srun or pyxis have it."""
    since: str
    """The release that added it; "" if Slurm 20.11 has it."""
    form: Form
    """Form of its values; "" if they are not checked."""
    words: tuple[str, ...]
    """Values of the forms one and list."""
    sets: tuple[str, ...]
    """Variables that it sets in the job. Those of --mem and --mem-per-cpu are left out: a value from an outer job can
    win over the job's own, and a step gets the job's memory without them."""


def _row(line: str) -> OptionRow:
    name, short, takes, sbatch, since, form, words, sets = (line.split("\t") + 7 * [""])[:8]
    return OptionRow(
        name=name,
        short=short,
        takes=cast(Literal["", "optional"], takes),
        sbatch=cast(Literal["all", "some", "old", ""], sbatch),
        since=since,
        form=cast(Form, form),
        words=tuple(words.split(", ")) if words else (),
        sets=tuple(sets.split(", ")) if sets else (),
    )


OPTIONS: Mapping[str, OptionRow] = {
    row.name: row for row in map(_row, _TABLE.read_text(encoding="utf-8").splitlines()[1:])
}
"""Name -> option."""
SBATCH_OPTIONS = frozenset(name for name, row in OPTIONS.items() if row.sbatch == "all")
"""Long options in all releases from Slurm 22.05 to 25.11."""
SBATCH_OPTIONS_OF_SOME = frozenset(name for name, row in OPTIONS.items() if row.sbatch == "some")
"""Long options in some of these releases."""
EXCLUSIVE_OPTIONS = (
    *itertools.combinations(("mem", "mem-per-cpu", "mem-per-gpu"), 2),
    ("cpus-per-task", "cpus-per-gpu"),
    *(("ntasks-per-gpu", other) for other in ("ntasks-per-node", "gpus-per-task", "gpus-per-socket", "tres-per-task")),
    ("core-spec", "thread-spec"),
)  # fmt: skip
"""Pairs of options that sbatch and srun refuse (src/common/slurm_opt.c)."""
GRES_FLAGS_ADDED = {"allow-task-sharing": "23.11"}
"""Values of --gres-flags -> the release that added them (CHANGELOG/slurm-23.11.md)."""


def release_with(name: str, value: str) -> str:
    """The Slurm release that added an option of sbatch or its value; "" if every release since 20.11 has it.

    Releases are YY.MM, so strings compare like releases.
    """
    flags = value.split(",") if name == "gres-flags" else []
    since = OPTIONS[name].since if name in OPTIONS else ""
    return max((since, *(GRES_FLAGS_ADDED.get(flag, "") for flag in flags)))


def matching_options(name: str) -> tuple[str, ...]:
    """Options of sbatch that `name` can mean: itself, or options with this prefix, as in getopt_long."""
    options = SBATCH_OPTIONS | SBATCH_OPTIONS_OF_SOME
    if name in options:
        return (name,)
    if len(name) == 1:
        return ()
    # options of some releases count only if no other matches, since the cluster may not have them
    return tuple(sorted(option for option in SBATCH_OPTIONS if option.startswith(name))) or tuple(
        sorted(option for option in options if option.startswith(name))[:1]
    )


def misspelled_option(name: str) -> str | None:
    """The option closest to a misspelled one; None if none is close, or `name` is an option or its beginning."""
    if len(name) == 1 or matching_options(name):
        return None
    return nearest(name, SBATCH_OPTIONS | SBATCH_OPTIONS_OF_SOME)
