"""Measured times of kernels, transfers and hosts: the shipped table of a GPU model, and what a cluster has measured.

Rows keep the names and units of the files: shapes as counts, times in microseconds. `trainer.calibration` writes them,
and topologies/README.md describes them.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hpcgen.resources import shipped
from trainer.contract.record import record

Row = Mapping[str, Any]
FOLDER = "kernels"
"""The folder of tables in topologies/."""


@record(eq=False)
class Measurements:
    """Measurements of one GPU model."""

    gpu_model: str
    products: tuple[Row, ...] = ()
    attention: tuple[Row, ...] = ()
    memory: tuple[Row, ...] = ()
    """Kernels that the memory bandwidth limits."""
    collectives: tuple[Row, ...] = ()
    beside: tuple[Row, ...] = ()
    """Collectives and products that run at the same time."""
    host: tuple[Row, ...] = ()
    power: tuple[Row, ...] = ()


SECTIONS = ("products", "attention", "memory", "collectives", "beside", "host", "power")

COUNT = "a whole number above 0"
FLAG = "true or false"
TEXT = "text"
_BOTH_WAYS = ("forward", "backward")
_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv", "exchange")


Kind = str | tuple[str, ...]
"""COUNT, FLAG or TEXT, or the values that a column can have."""


@record
class Columns:
    """The columns of a section. Those that identify a row have the values or the kind of values that they can have."""

    key: Mapping[str, Kind]
    results: tuple[str, ...] = ("us",)
    """Positive numbers."""
    more_results: tuple[str, ...] = ()
    """Positive numbers that some rows have."""
    optional: tuple[str, ...] = ()
    """More columns of the key that some rows have: whole numbers."""
    texts: tuple[str, ...] = ()
    """Likewise, but text."""
    remarks: tuple[str, ...] = ()
    """Columns that say how a row was measured, true or false."""

    def key_of(self, row: Row) -> Hashable:
        """The key that identifies a row. A later row with the same key replaces it."""
        return tuple(row[name] for name in self.key), tuple(
            row.get(name) for name in (*self.optional, *self.texts)
        )


def _shaped(columns: dict[str, Kind], *sizes: str) -> dict[str, Kind]:
    """The columns, and those of a shape."""
    return {**columns, **dict.fromkeys(sizes, COUNT)}


_TRANSFER: dict[str, Kind] = {"collective": _COLLECTIVES, "ranks": COUNT, "bytes": COUNT}
COLUMNS: dict[str, Columns] = {
    "products": Columns(
        _shaped(
            {"pass": ("forward", "data_gradient", "weight_gradient"), "precision": ("bf16", "fp8", "fp32")},
            *("m", "n", "k", "groups"),
        ),
        remarks=("host_launches",),
    ),
    "attention": Columns(
        _shaped({"pass": _BOTH_WAYS}, "seq", "batch", "heads", "kv_heads", "qk_dim", "v_dim"),
        remarks=("host_launches",),
    ),
    "memory": Columns(
        {"kernel": TEXT, "pass": _BOTH_WAYS, "tokens": COUNT, "width": COUNT},
        ("bytes", "us"),
        optional=("experts", "topk"),
        remarks=("host_launches",),
    ),
    "collectives": Columns(_TRANSFER, optional=("domains",)),
    "beside": Columns(
        _TRANSFER,
        ("alone_us", "beside_us", "product_alone_us", "product_beside_us"),
        optional=("domains",),
    ),
    "host": Columns(
        {
            "layer": ("dense", "experts"),
            "tensor_parallel": FLAG,
            "graphs": FLAG,
            "precision": ("bf16", "fp8"),
        },
        more_results=("outside_us",),
        texts=("layers",),
    ),
    "power": Columns({"load": TEXT}, ("seconds", "watts", "sm_mhz")),
}


def row_mistakes(section: str, row: Any) -> Iterator[str]:
    """Yields what is wrong with a row, such as "us = -1 is not a positive number"."""
    columns = COLUMNS[section]
    if not isinstance(row, dict):
        yield f"{row!r} is not a row"
        return
    known = {*_kinds(columns), *columns.results, *columns.more_results}
    yield from (f"{name} is not a column" for name in row if name not in known)
    for name, kind in _kinds(columns).items():
        if name in row:
            if not _is(kind, row[name]):
                yield f"{name} = {row[name]!r} is not {kind if isinstance(kind, str) else ' or '.join(kind)}"
        elif name in columns.key:
            yield f"{name} is missing"
    for name in (*columns.results, *(name for name in columns.more_results if name in row)):
        value = row.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            yield f"{name} = {value!r} is not a positive number"


def _kinds(columns: Columns) -> dict[str, Kind]:
    """Columns other than results, with the values that they can have."""
    flags: dict[str, Kind] = dict.fromkeys(columns.remarks, FLAG)
    texts: dict[str, Kind] = dict.fromkeys(columns.texts, TEXT)
    return _shaped({**columns.key, **flags, **texts}, *columns.optional)


def _is(kind: Kind, value: Any) -> bool:
    if kind == FLAG:
        return isinstance(value, bool)
    if kind == COUNT:
        return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**53
    return isinstance(value, str) and (kind == TEXT or value in kind)


def measurements_of(gpu_model: str | None) -> Measurements | None:
    """The shipped table of a GPU model; None if there is none.

    A table never serves another model: the models of a generation differ in memory, power and clocks.
    """
    return None if gpu_model is None else _tables().get(gpu_key(gpu_model))


@functools.lru_cache(maxsize=16)
def combined(older: Measurements | None, newer: Measurements | None) -> Measurements | None:
    """The rows of both tables. Newer ones replace older ones of the same key."""
    if older is None or newer is None:
        return older or newer
    sections: dict[str, tuple[Row, ...]] = {}
    for name, columns in COLUMNS.items():
        rows = (*getattr(older, name), *getattr(newer, name))
        sections[name] = tuple({columns.key_of(row): row for row in rows}.values())
    return Measurements(newer.gpu_model, **sections)


def _tables() -> dict[str, Measurements]:
    return _read(shipped("topologies") / FOLDER)


@functools.cache
def _read(folder: Path) -> dict[str, Measurements]:
    tables = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    return {gpu_key(table["gpu_model"]): table_of(table) for table in tables}


def table_of(content: Mapping[str, Any]) -> Measurements:
    """The table with the content of a valid file."""
    sections = {name: tuple(content.get(name, ())) for name in SECTIONS}
    return Measurements(content["gpu_model"], **sections)


def gpu_key(gpu_model: str) -> str:
    """The name of a GPU model, as names are compared."""
    return " ".join(gpu_model.split()).lower()


def text_of(table: Mapping[str, Any]) -> str:
    """The file of a table: JSON with one row per line, and times with four significant digits."""
    parts = []
    for key, value in table.items():
        if key in SECTIONS and value:
            lines = ",\n".join(f"    {json.dumps(_shortened(row))}" for row in value)
            parts.append(f"  {json.dumps(key)}: [\n{lines}\n  ]")
        else:
            parts.append(f"  {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _shortened(row: Row) -> dict[str, Any]:
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in row.items()}
