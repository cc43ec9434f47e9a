"""Records behave as frozen dataclasses do."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from trainer.contract.record import record


@record
class Point:
    x: int
    y: int = 0
    tags: list[str] = dataclasses.field(default_factory=list, compare=False)


@record(kw_only=True)
class Named(Point):
    name: str


@dataclasses.dataclass(frozen=True)
class PlainPoint:
    x: int
    y: int = 0
    tags: list[str] = dataclasses.field(default_factory=list, compare=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainNamed(PlainPoint):
    name: str


CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "by position": ((1, 2), {}),
    "by keyword": ((), {"x": 1, "y": 2}),
    "mixed": ((1,), {"y": 2, "tags": ["a"]}),
    "defaults": ((1,), {}),
    "missing": ((), {"y": 2}),
    "unknown": ((1,), {"z": 2}),
    "missing and unknown": ((), {"z": 2}),
    "twice": ((1,), {"x": 2}),
    "too many": ((1, 2, [], 4), {}),
    "with a name": ((1,), {"name": "n"}),
    "name by position": ((1, 2, [], "n"), {}),
}


def outcome(make: Callable[[], Any]) -> object:
    try:
        made = make()
    except TypeError:
        return TypeError
    assert made == copy.deepcopy(made)
    return dataclasses.astuple(made), dataclasses.astuple(dataclasses.replace(made, y=7)), hash(made)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("of_records", "plain"), [(Point, PlainPoint), (Named, PlainNamed)])
def test_it_takes_the_arguments_of_a_dataclass(of_records: Any, plain: Any, call: str) -> None:
    args, given = CALLS[call]
    assert outcome(lambda: of_records(*args, **given)) == outcome(lambda: plain(*args, **given))


def test_records_are_values() -> None:
    point = Point(1, tags=["a"])
    assert point == Point(1)
    assert point != Named(1, name="n") != PlainPoint(1)
    assert repr(Named(1, name="n")) == repr(PlainNamed(1, name="n")).replace("Plain", "")
    assert pickle.loads(pickle.dumps(point)) == point
    with pytest.raises(dataclasses.FrozenInstanceError):
        point.x = 2  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        del point.x
