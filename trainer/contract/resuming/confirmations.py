"""The changes that `checkpoint.changed` confirms. Each entry counts once, so a leftover entry confirms nothing.

An entry is the name of a hyperparameter, which may be followed by an iteration: `optimizer.lr`, `optimizer.lr@12000`.
The checkpoints of an attempt record the names that it started with (`confirmed`). From then on, these entries are used.
A name without an iteration confirms only the first change of a hyperparameter in a run. With an iteration, it confirms
one more change if the iteration is higher than that of the last use. It therefore stays valid if an attempt falls back
to an older checkpoint. An attempt that was killed before its first checkpoint has used no entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from trainer.contract.resuming.change import Change, show
from trainer.contract.resuming.record_shape import CONFIRMED

SEPARATOR = "@"
"""Character between a name and an iteration."""


@dataclass(frozen=True)
class Confirmations:
    """The entries of checkpoint.changed, for an attempt that starts from a checkpoint."""

    entries: tuple[str, ...]
    iteration: int = 0
    """Iteration of the checkpoint; 0 for a run that starts from random weights or from weights only."""
    used: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Names that earlier attempts have used, as the checkpoint records them. For each name, the last use: its
    iteration, and `before` and `after` if the value changed."""

    @classmethod
    def of(cls, entries: Sequence[str], record: Mapping[str, Any] | None) -> Confirmations:
        """The confirmations of `entries` for an attempt that starts from the checkpoint with this record."""
        record = record or {}
        return cls(tuple(entries), record.get("iteration", 0), record.get(CONFIRMED, {}))

    @cached_property
    def names(self) -> frozenset[str]:
        """Hyperparameters that may change now."""
        return frozenset(map(_name, filter(self._is_open, self.entries)))

    def list_for(self, changes: Iterable[Change]) -> str:
        """The list to write for `changes`, without entries that would be left over."""
        names = dict.fromkeys(change.name for change in changes)
        kept = {
            _name(entry): entry for entry in self.entries if self._is_open(entry) and _name(entry) in names
        }
        new = (self._new_entry(name) for name in names if name not in kept)
        return f"[{', '.join((*kept.values(), *new))}]"

    def spent(self, changes: Iterable[Change] | None = None) -> Iterator[str]:
        """Yields the entries that confirm nothing, each with the reason.

        With `changes`, only entries that name one of them.
        """
        names = None if changes is None else {change.name for change in changes}
        for entry in dict.fromkeys(self.entries):
            if not self._is_open(entry) and (names is None or _name(entry) in names):
                yield f"{entry}, which {self._reason(entry)}"

    def after(self, changes: Iterable[Change]) -> dict[str, dict[str, Any]]:
        """Names that are used in the checkpoints of this attempt, which starts with `changes`."""
        values = {change.name: {"before": change.before, "after": change.after} for change in changes}
        now = {name: {"iteration": self._use(name), **values.get(name, {})} for name in sorted(self.names)}
        return {**{name: dict(use) for name, use in self.used.items()}, **now}

    def _use(self, name: str) -> int:
        """Iteration that a use has now: no entry with this iteration or a lower one is open afterwards."""
        return max(self.iteration, *(_since(entry) for entry in self.entries if _name(entry) == name))

    def _is_open(self, entry: str) -> bool:
        name = _name(entry)
        return name not in self.used or self.used[name]["iteration"] < _since(entry)

    def _new_entry(self, name: str) -> str:
        if name not in self.used:
            return name
        return f"{name}{SEPARATOR}{max(self.iteration, self.used[name]['iteration'] + 1)}"

    def _reason(self, entry: str) -> str:
        use = self.used[_name(entry)]
        values = (
            f" for {show(use['before'])} -> {show(use['after'])}" if {"before", "after"} <= use.keys() else ""
        )
        return f"was used at iteration {use['iteration']}{values} and confirms nothing more"


def _name(entry: str) -> str:
    return entry.partition(SEPARATOR)[0]


def _since(entry: str) -> int:
    """The iteration in an entry; 0 if it has none."""
    return int(entry.partition(SEPARATOR)[2] or 0)
