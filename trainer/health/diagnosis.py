"""Which node is weak, from bandwidths of groups of nodes: each alone, then in pairs, then by halves.

Pure: `measure` is asked for the bandwidths of groups that share no node, which run at the same time. So the whole
search takes a few rounds however many nodes there are.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from trainer.health.units import rate_text

Group = tuple[str, ...]
Measure = Callable[[str, Sequence[Group]], Sequence[float]]
"""(what for, groups) -> bus bandwidth of each (GB/s)."""


PAIRINGS = 3
"""Ways to pair the nodes up that are tried while every pair is slow: weak nodes may sit in all of them."""


@dataclass(frozen=True)
class WeakNode:
    """A node to take out, and the figures that say so."""

    node: str
    reason: str


@dataclass
class Diagnosis:
    """What the search found."""

    weak: list[WeakNode] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """Findings that blame no single node."""
    measured: list[tuple[str, Group, float]] = field(default_factory=list)
    """What for, the group, its bandwidth (GB/s)."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Below which bandwidth a group is slow (GB/s); None where no figure is known."""

    deficit: float
    """How far below the other groups' middle one a group is slow."""
    together_gb_s: float | None
    """What the whole allocation did not reach; None where nobody knows what it should: no halves are searched then."""
    alone_gb_s: float | None = None
    pair_gb_s: float | None = None


def find_weak_nodes(nodes: Sequence[str], ranks_per_node: int, limits: Limits, measure: Measure) -> Diagnosis:
    """Looks for the nodes that slow an allocation down."""
    search = _Search(limits, measure)
    good = search.alone(nodes) if ranks_per_node > 1 else list(nodes)
    if len(good) < 2 or search.found.remarks:
        return search.found
    good = search.pairs(good)
    if not search.found.weak and not search.found.remarks and limits.together_gb_s is not None:
        search.halves(good, limits.together_gb_s)
    return search.found


class _Search:
    def __init__(self, limits: Limits, measure: Measure) -> None:
        self._limits = limits
        self._measure = measure
        self.found = Diagnosis()

    def alone(self, nodes: Sequence[str]) -> list[str]:
        """The nodes that are as fast by themselves as they should be."""
        values = self._bandwidths("alone", [(node,) for node in nodes])
        slow, usual = self._slow(values, self._limits.alone_gb_s)
        if len(slow) == len(values):
            self.found.remarks.append(_slow_alone(nodes, values))
            return []
        for (node,) in slow:
            self._blame(node, f"alone {rate_text(values[(node,)])} GB/s, where {rate_text(usual)} is usual")
        return [node for node in nodes if (node,) not in slow]

    def pairs(self, nodes: Sequence[str]) -> list[str]:
        """The nodes that are as fast with another one as they should be."""
        for pairs in itertools.islice(pairings(nodes), PAIRINGS):
            values = self._bandwidths("pair", pairs)
            slow, usual = self._slow(values, self._pair_limit)
            if len(slow) < len(pairs):
                break
        else:
            self.found.remarks.append(_every_pair_is_slow(values))
            return []
        good = [node for pair in pairs if pair not in slow for node in pair]
        suspects = [node for node in nodes if node not in good]
        weak = self._with_a_good_one(suspects, good, usual)
        for pair in slow:
            if not weak & set(pair):
                figure = f"{' and '.join(pair)} are slow with each other ({rate_text(values[pair])} GB/s)"
                self.found.remarks.append(f"{figure}, and good with others: the path between them")
        return [node for node in nodes if node not in weak]

    @property
    def _pair_limit(self) -> float:
        """Two nodes reach at least what many do."""
        return self._limits.pair_gb_s or self._limits.together_gb_s or 0.0

    def _with_a_good_one(self, suspects: list[str], good: list[str], usual: float) -> set[str]:
        """Those of the suspects that are slow with a node that was fast with another."""
        weak = set()
        for start in range(0, len(suspects), len(good)):
            pairs = list(zip(suspects[start : start + len(good)], good, strict=False))
            values = self._bandwidths("pair with a good node", pairs)
            limit = max(self._pair_limit, usual * (1 - self._limits.deficit))
            for (suspect, partner), value in values.items():
                if value < limit:
                    weak.add(suspect)
                    self._blame(
                        suspect,
                        f"{rate_text(value)} GB/s with {partner}, where {rate_text(usual)} is usual for a pair",
                    )
        return weak

    def halves(self, nodes: Sequence[str], limit: float) -> None:
        """Nodes that are only slow when many of them talk: the smallest groups that still are."""
        groups: list[Group] = [tuple(nodes)] if len(nodes) > 3 else []
        if not groups:
            self.found.remarks.append(
                "measured again, each node alone and each pair is good: it came and went"
            )
        while groups:
            parts = [half for group in groups for half in _halves(group)]
            values = self._bandwidths("half", parts)
            slow = [half for half in parts if values[half] < limit]
            for group in groups:
                if not set(_halves(group)) & set(slow):
                    self.found.remarks.append(
                        f"{_some(group)} are slow together and good in halves: the links between the halves"
                    )
            smallest = [group for group in slow if len(group) < 4]
            for group in smallest:
                self.found.remarks.append(
                    f"{_some(group)} are slow together ({rate_text(values[group])} GB/s), though good in pairs"
                )
            groups = [group for group in slow if len(group) >= 4]

    def _bandwidths(self, purpose: str, groups: Sequence[Group]) -> dict[Group, float]:
        values = dict(zip(groups, self._measure(purpose, groups), strict=True))
        self.found.measured += [(purpose, group, value) for group, value in values.items()]
        return values

    def _slow(self, values: dict[Group, float], absolute: float | None) -> tuple[list[Group], float]:
        """The slow groups, and what is usual: the upper middle, so that of two groups it is the faster one."""
        usual = statistics.median_high(values.values())
        limit = max(absolute or 0.0, usual * (1 - self._limits.deficit))
        return [group for group, value in values.items() if value < limit], usual

    def _blame(self, node: str, reason: str) -> None:
        self.found.weak.append(WeakNode(node, reason))


def pairings(nodes: Sequence[str]) -> Iterator[list[Group]]:
    """Ways to pair nodes up, no pair twice: of an odd number one node is left over, another one each time."""
    circle: list[str | None] = [*nodes, None] if len(nodes) % 2 else [*nodes]
    half = len(circle) // 2
    for _ in range(len(circle) - 1):
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(one, other) for one, other in pairs if one is not None and other is not None]
        circle = [circle[0], circle[-1], *circle[1:-1]]


def _halves(group: Group) -> tuple[Group, Group]:
    middle = len(group) // 2
    return group[:middle], group[middle:]


def _slow_alone(nodes: Sequence[str], values: dict[Group, float]) -> str:
    if len(nodes) == 1:
        return f"{nodes[0]} is slow by itself: no link to another node is part of it"
    worst = rate_text(min(values.values()))
    return f"all {len(nodes)} nodes are slow even alone (from {worst} GB/s): a setting or the software, not one node"


def _every_pair_is_slow(values: dict[Group, float]) -> str:
    worst = min(values, key=values.__getitem__)
    figure = f"{rate_text(values[worst])} GB/s"
    if len(values) == 1:
        pair = " and ".join(worst)
        return f"the path between {pair} is slow ({figure}); with a third node the test could tell whose fault it is"
    return f"every pair of nodes is slow (from {figure}): a setting, the software or the fabric, not one node"


def _some(nodes: Iterable[str]) -> str:
    names = list(nodes)
    return ", ".join(names) if len(names) <= 8 else f"{', '.join(names[:8])} and {len(names) - 8} more"
