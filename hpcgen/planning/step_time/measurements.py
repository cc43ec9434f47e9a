"""The measured table of a GPU model: times of kernels and collectives, as benchmarks/kernels.py writes them.

Rows keep the names and units of the file: shapes as counts, times in microseconds.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
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


def measurements_of(gpu_model: str | None) -> Measurements | None:
    """The table of a GPU model; None if there is none.

    A table never serves another model: the models of a generation differ in memory, power and clocks.
    """
    return None if gpu_model is None else _tables().get(_key(gpu_model))


def _tables() -> dict[str, Measurements]:
    return _read(shipped("topologies") / FOLDER)


@functools.cache
def _read(folder: Path) -> dict[str, Measurements]:
    tables = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    return {_key(table["gpu_model"]): _table(table) for table in tables}


def _table(content: dict[str, Any]) -> Measurements:
    sections = {name: tuple(content.get(name, ())) for name in SECTIONS}
    return Measurements(content["gpu_model"], **sections)


def _key(gpu_model: str) -> str:
    return " ".join(gpu_model.split()).lower()
