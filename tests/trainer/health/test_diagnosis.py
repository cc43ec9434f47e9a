"""The diagnosis finds the weak node from bandwidths of groups, for any number of nodes and any position."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from trainer.health.diagnosis import Diagnosis, Group, Limits, find_weak_nodes, pairings

LIMITS = Limits(together_gb_s=350.0, deficit=0.25)


class Cluster:
    """Nodes with simulated bandwidths: `alone` within a node, `links` to the fabric, `pairs` of two nodes."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self.nodes = [f"n{index:03}" for index in range(size)]
        self.alone: dict[str, float] = {}
        self.links: dict[str, float] = {}
        self.pairs: dict[frozenset[str], float] = {}
        self.many: Callable[[Group], float] = lambda group: 1000.0
        self.rounds: list[tuple[str, list[Group]]] = []
        self._noise = random.Random(seed)

    def measure(self, purpose: str, groups: Sequence[Group]) -> list[float]:
        members = [node for group in groups for node in group]
        assert len(members) == len(set(members)), "groups of a round run at the same time"
        self.rounds.append((purpose, list(groups)))
        return [self._bandwidth(group) * self._noise.uniform(0.95, 1.0) for group in groups]

    def _bandwidth(self, group: Group) -> float:
        slowest = min(self.alone.get(node, 470.0) for node in group)
        if len(group) == 1:
            return slowest
        links = min(self.links.get(node, 400.0) for node in group)
        pairs = min((value for pair, value in self.pairs.items() if pair <= set(group)), default=float("inf"))
        return min(slowest, links, pairs, self.many(group) if len(group) > 2 else 1000.0)

    def diagnose(self, ranks_per_node: int = 8, limits: Limits = LIMITS) -> Diagnosis:
        return find_weak_nodes(self.nodes, ranks_per_node, limits, self.measure)


def weak(found: Diagnosis) -> list[str]:
    return sorted(node.node for node in found.weak)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 17])
def test_one_node_that_is_slow_by_itself(size: int) -> None:
    for index in range(size):
        cluster = Cluster(size, seed=index)
        cluster.alone[cluster.nodes[index]] = 180.0
        found = cluster.diagnose()
        assert weak(found) == [cluster.nodes[index]]
        assert " GB/s alone" in found.weak[0].reason


@pytest.mark.parametrize("size", [3, 4, 5, 6, 9, 16, 33])
def test_one_node_whose_link_is_slow(size: int) -> None:
    for index in range(size):
        cluster = Cluster(size, seed=index)
        cluster.links[cluster.nodes[index]] = 150.0
        found = cluster.diagnose()
        assert weak(found) == [cluster.nodes[index]]
        assert " with n" in found.weak[0].reason
        assert found.remarks == []


@pytest.mark.parametrize("size", [4, 5, 7, 8, 16])
def test_any_two_nodes_whose_links_are_slow(size: int) -> None:
    for first in range(size):
        for second in range(first):
            cluster = Cluster(size, seed=first * size + second)
            names = [cluster.nodes[first], cluster.nodes[second]]
            cluster.links |= dict.fromkeys(names, 150.0)
            assert weak(cluster.diagnose()) == sorted(names)


def test_a_slow_node_and_a_slow_link_are_both_named() -> None:
    cluster = Cluster(8)
    cluster.alone["n002"] = 100.0
    cluster.links["n005"] = 100.0
    assert weak(cluster.diagnose()) == ["n002", "n005"]


def test_two_nodes_alone_do_not_tell_whose_link_is_slow() -> None:
    cluster = Cluster(2)
    cluster.links["n001"] = 150.0
    found = cluster.diagnose()
    assert weak(found) == []
    assert "the path between n000 and n001 is slow" in found.remarks[0]
    assert "third node" in found.remarks[0]


def test_a_slow_path_between_two_good_nodes_blames_neither() -> None:
    cluster = Cluster(4)
    cluster.pairs[frozenset(("n000", "n003"))] = 100.0
    found = cluster.diagnose()
    assert weak(found) == []
    assert "n000 and n003 are slow with each other" in found.remarks[0]


def test_one_slow_node_is_distinguished_from_a_slow_fabric() -> None:
    one = Cluster(1)
    one.alone["n000"] = 200.0
    limits = Limits(together_gb_s=460.0, alone_gb_s=460.0, deficit=0.25)
    assert one.diagnose(limits=limits).remarks == [
        "n000 is slow alone, so the problem is not a link to another node"
    ]
    every = Cluster(6)
    every.alone = dict.fromkeys(every.nodes, 60.0)
    found = every.diagnose(limits=limits)
    assert weak(found) == []
    assert "all 6 nodes are slow even alone" in found.remarks[0]
    assert len(every.rounds) == 1


def test_a_fabric_that_is_slow_everywhere_blames_no_node() -> None:
    cluster = Cluster(8)
    cluster.links = dict.fromkeys(cluster.nodes, 90.0)
    found = cluster.diagnose()
    assert weak(found) == []
    assert "every pair of nodes is slow" in found.remarks[0]


def test_the_links_between_two_switches() -> None:
    cluster = Cluster(16)
    left = set(cluster.nodes[:8])
    cluster.many = lambda group: 200.0 if 0 < len(left & set(group)) < len(group) else 1000.0
    found = cluster.diagnose()
    assert weak(found) == []
    assert found.remarks[0].endswith(
        "are slow together but good in halves: check the links between the halves"
    )


def test_a_switch_that_is_slow_only_when_many_talk() -> None:
    cluster = Cluster(16)
    crowded = set(cluster.nodes[4:8])
    cluster.many = lambda group: 200.0 if len(crowded & set(group)) > 2 else 1000.0
    found = cluster.diagnose()
    assert found.remarks == [
        "n004, n005, n006, n007 are slow together but good in halves: check the links between the halves"
    ]


def test_a_temporary_problem_is_reported_as_temporary() -> None:
    assert "temporary" in Cluster(3).diagnose().remarks[0]


def test_one_rank_a_node_has_nothing_to_measure_alone() -> None:
    cluster = Cluster(4)
    cluster.links["n002"] = 100.0
    assert weak(cluster.diagnose(ranks_per_node=1)) == ["n002"]
    assert [purpose for purpose, _ in cluster.rounds] == ["pair", "pair with a good node"]


def test_a_thousand_nodes_take_a_few_rounds() -> None:
    cluster = Cluster(1000)
    cluster.links |= {"n123": 100.0, "n700": 90.0, "n999": 120.0}
    assert weak(cluster.diagnose()) == ["n123", "n700", "n999"]
    assert len(cluster.rounds) == 3


@pytest.mark.parametrize("size", range(2, 12))
def test_no_two_nodes_are_paired_twice(size: int) -> None:
    nodes = [str(node) for node in range(size)]
    seen = [frozenset(pair) for pairs in pairings(nodes) for pair in pairs]
    assert len(seen) == len(set(seen)) == size * (size - 1) // 2
    for pairs in pairings(nodes):
        assert len({node for pair in pairs for node in pair}) == size - size % 2


def test_without_any_figure_to_compare_with_the_nodes_are_compared_with_each_other() -> None:
    """A first test must not record the bandwidth of a weak node as baseline."""
    nobody_knows = Limits(together_gb_s=None, deficit=0.25)
    healthy = Cluster(4)
    found = healthy.diagnose(limits=nobody_knows)
    assert (weak(found), found.remarks) == ([], [])
    assert {purpose for purpose, _ in healthy.rounds} == {"alone", "pair"}
    by_itself = Cluster(4)
    by_itself.alone["n002"] = 180.0
    assert weak(by_itself.diagnose(limits=nobody_knows)) == ["n002"]
    by_its_link = Cluster(6)
    by_its_link.links["n001"] = 90.0
    assert weak(by_its_link.diagnose(limits=nobody_knows)) == ["n001"]
