"""Finds weak nodes from the bandwidths of groups of nodes: single nodes, then pairs, then halves.

This module has no side effects: it calls `measure` for groups that share no node and can be measured at the same time.
So the search takes a few rounds, independent of the number of nodes.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from trainer.contract.wording import few, rate_text

Group = tuple[str, ...]
Measure = Callable[[str, Sequence[Group]], Sequence[float]]
"""(purpose, groups) -> bus bandwidth of each group (GB/s)."""


PAIRINGS = 3
"""Number of pairings to try if all pairs are slow, since every pair of a pairing may have a weak node."""


@dataclass(frozen=True)
class WeakNode:
    """A node to exclude, and the measurements that show it."""

    node: str
    reason: str


@dataclass
class Diagnosis:
    """Results of the search."""

    weak: list[WeakNode] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """Findings that are not about a single node."""
    measured: list[tuple[str, Group, float]] = field(default_factory=list)
    """Purpose, group and bandwidth (GB/s) of each measurement."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bandwidths below which a group is slow (GB/s); None if unknown."""

    deficit: float
    """Shortfall from the median of the groups, as a fraction, above which a group is slow."""
    together_gb_s: float | None
    """Limit that the entire allocation did not reach. If it is None, halves are not searched."""
    alone_gb_s: float | None = None
    """Limit for a single node."""
    pair_gb_s: float | None = None
    """Limit for a pair of nodes."""


def find_weak_nodes(nodes: Sequence[str], ranks_per_node: int, limits: Limits, measure: Measure) -> Diagnosis:
    """Find the nodes that slow down an allocation."""
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
        """Test each node alone, and return the nodes that are fast enough."""
        values = self._bandwidths("alone", [(node,) for node in nodes])
        slow, usual = self._slow(values, self._limits.alone_gb_s)
        if len(slow) == len(values):
            self.found.remarks.append(_slow_alone(nodes, values))
            return []
        for (node,) in slow:
            self._blame(
                node, f"{rate_text(values[(node,)])} GB/s alone, compared with a median of {rate_text(usual)}"
            )
        return [node for node in nodes if (node,) not in slow]

    def pairs(self, nodes: Sequence[str]) -> list[str]:
        """Test nodes in pairs, and return the nodes that are fast enough."""
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
        weak = self._pair_with_good_nodes(suspects, good, usual)
        for pair in slow:
            if not weak & set(pair):
                figure = f"{' and '.join(pair)} are slow with each other ({rate_text(values[pair])} GB/s)"
                self.found.remarks.append(f"{figure} but good with others: check the path between them")
        return [node for node in nodes if node not in weak]

    @property
    def _pair_limit(self) -> float:
        """Limit for a pair. Default: the limit of the allocation, since a pair is at least as fast."""
        return self._limits.pair_gb_s or self._limits.together_gb_s or 0.0

    def _pair_with_good_nodes(self, suspects: list[str], good: list[str], usual: float) -> set[str]:
        """The suspects that are also slow with a node that was fast in another pair."""
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
                        f"{rate_text(value)} GB/s with {partner}, compared with a median of {rate_text(usual)} for "
                        "pairs",
                    )
        return weak

    def halves(self, nodes: Sequence[str], limit: float) -> None:
        """Find the smallest groups that are still slow, among nodes that are only slow in large groups."""
        groups: list[Group] = [tuple(nodes)] if len(nodes) > 3 else []
        if not groups:
            self.found.remarks.append(
                "in a second measurement, every node alone and every pair is good, so the problem was temporary"
            )
        while groups:
            parts = [half for group in groups for half in _halves(group)]
            values = self._bandwidths("half", parts)
            slow = [half for half in parts if values[half] < limit]
            for group in groups:
                if not set(_halves(group)) & set(slow):
                    self.found.remarks.append(
                        f"{_some(group)} are slow together but good in halves: check the links between the halves"
                    )
            smallest = [group for group in slow if len(group) < 4]
            for group in smallest:
                self.found.remarks.append(
                    f"{_some(group)} are slow together ({rate_text(values[group])} GB/s) but good in pairs"
                )
            groups = [group for group in slow if len(group) >= 4]

    def _bandwidths(self, purpose: str, groups: Sequence[Group]) -> dict[Group, float]:
        values = dict(zip(groups, self._measure(purpose, groups), strict=True))
        self.found.measured += [(purpose, group, value) for group, value in values.items()]
        return values

    def _slow(self, values: dict[Group, float], absolute: float | None) -> tuple[list[Group], float]:
        """The slow groups, and the high median: with two groups, it is the faster one."""
        usual = statistics.median_high(values.values())
        limit = max(absolute or 0.0, usual * (1 - self._limits.deficit))
        return [group for group, value in values.items() if value < limit], usual

    def _blame(self, node: str, reason: str) -> None:
        self.found.weak.append(WeakNode(node, reason))


def pairings(nodes: Sequence[str]) -> Iterator[list[Group]]:
    """Pairings of the nodes without repeated pairs. With an odd number, a different node is left over each time."""
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
        return f"{nodes[0]} is slow alone, so the problem is not a link to another node"
    worst = rate_text(min(values.values()))
    return f"all {len(nodes)} nodes are slow even alone (lowest: {worst} GB/s): check settings and software"


def _every_pair_is_slow(values: dict[Group, float]) -> str:
    worst = min(values, key=values.__getitem__)
    figure = f"{rate_text(values[worst])} GB/s"
    if len(values) == 1:
        pair = " and ".join(worst)
        return f"the path between {pair} is slow ({figure}). With a third node, the test could find the weak node"
    return (
        f"every pair of nodes is slow (lowest: {figure}): check settings, software and fabric, not one node"
    )


def _some(nodes: Iterable[str]) -> str:
    return few(list(nodes), 8)
