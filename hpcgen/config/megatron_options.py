"""The table of Megatron-LM's options: everything that lint, `init --from` and hints about keys know about each.

These are the options of pretrain_gpt.py: from megatron/training/arguments.py, megatron/arguments.py before it, and the
dataclasses that become options. Releases v1.0, v2.0, v2.5, v2.6, 23.04, core_v0.4.0 to 0.19.0, and commit d98e8a64
(August 2026).
"""

from __future__ import annotations

import csv
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, cast

TABLE = Path(__file__).with_suffix(".tsv")

Kind = Literal["key", "negated", "converted", "usual", "no key", "removed", "absent", "name", "family"]
"""Relation of an option to the run file.

key: the first of its keys has the same value. negated: the first of its keys has the opposite value. converted: its
keys are computed. usual: it requests what the trainer always does. no key: no key corresponds to it. removed: newer
releases of Megatron-LM stop with an error if it is set. absent: Megatron-LM does not have it, but people write it.
name: not an option, but a name in the configuration of Megatron-Core or Megatron-LM. family: a pattern for names with a
common beginning or end, because forks have more of them.
"""


@dataclass(frozen=True)
class OptionRow:
    """One option, or a family of options."""

    name: str
    """The option without its dashes. In the name of a family, `*` stands for any text."""
    kind: Kind
    decides: bool
    """True if the results of a training can depend on it. `same` in the table: at most by rounding."""
    keys: tuple[str, ...]
    """Equivalent keys of a run file. If the option cannot be converted, one of them must be set."""
    carried_by: str
    """Module of hpcgen/check/migration that converts the option. Empty: the key gets the option's value unchanged."""
    takes: Literal["", "0", "*"]
    """Number of values. Empty: as many as the key takes."""
    values: tuple[str, ...]
    """Values for which an option of the kind `usual` is usual. Empty: all values."""
    needs: tuple[str, ...]
    """Conditions for it to have an effect: "KEY", "KEY = VALUE", "KEY > NUMBER", "not KEY...", or "--OPTION"."""
    default: object
    """Megatron-LM's default. None if the key has the same default."""
    group: str
    """A group of options that lint treats alike."""
    configuration: Literal["", "Core", "LM"]
    """Program whose configuration has the name, with underscores: Megatron-Core or Megatron-LM, 0.16 or 0.19."""
    note: str
    """Replacement for the option, or the reason why it is not carried over."""

    @property
    def exists(self) -> bool:
        """True for an option that a release of Megatron-LM has or had."""
        return self.kind not in ("absent", "name", "family")

    @property
    def program(self) -> str:
        """The program that has the name, as an option or in its configuration; empty if none has it."""
        of = self.configuration or ("LM" if self.exists else "")
        return f"Megatron-{of}" if of else ""

    @property
    def key(self) -> str:
        """The first key; empty if there is none."""
        return self.keys[0] if self.keys else ""


@functools.cache
def rows() -> Mapping[str, OptionRow]:
    """The rows of single options by name, in the order of the table. Each row comes after the rows that it needs."""
    return {row.name: row for row in _table() if row.kind != "family"}


def row_of(name: str) -> OptionRow | None:
    """The row of an option, or of the first family whose pattern it matches; None if there is neither."""
    return rows().get(name) or next((row for row in _families() if fnmatchcase(name, row.name)), None)


def of_kind(kind: Kind) -> Iterator[OptionRow]:
    """The rows of one kind, in the order of the table."""
    return (row for row in rows().values() if row.kind == kind)


def in_group(group: str) -> Iterator[OptionRow]:
    """The rows of one group, in the order of the table."""
    return (row for row in rows().values() if row.group == group)


def carried_by(module: str) -> Iterator[OptionRow]:
    """The rows that one module of hpcgen/check/migration converts, in the order of the table."""
    return (row for row in rows().values() if row.carried_by == module)


@functools.cache
def names() -> Mapping[str, OptionRow]:
    """The rows of names in the configuration of Megatron-Core or Megatron-LM, with underscores."""
    return {name.replace("-", "_"): row for name, row in rows().items() if row.program}


@functools.cache
def _families() -> tuple[OptionRow, ...]:
    return tuple(row for row in _table() if row.kind == "family")


@functools.cache
def _table() -> tuple[OptionRow, ...]:
    with TABLE.open(encoding="utf-8", newline="") as file:
        return tuple(map(_row, csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE, restval="")))


def _row(cells: dict[str, str]) -> OptionRow:
    return OptionRow(
        name=cells["option"],
        kind=cast(Kind, cells["kind"]),
        decides=cells["results"] != "same",
        keys=_parts(cells["keys"], ", "),
        carried_by=cells["carried by"],
        takes=cast(Literal["", "0", "*"], cells["takes"]),
        values=_parts(cells["values"], ", "),
        needs=_parts(cells["needs"], "; "),
        default=_value(cells["default"]),
        group=cells["group"],
        configuration=cast(Literal["", "Core", "LM"], cells["configuration"]),
        note=cells["note"],
    )


def _parts(text: str, separator: str) -> tuple[str, ...]:
    return tuple(text.split(separator)) if text else ()


def _value(text: str) -> object:
    """The number or the text in a cell; None for an empty one."""
    try:
        return json.loads(text) if text else None
    except ValueError:
        return text
