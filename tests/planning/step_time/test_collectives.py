"""Time of transfers, and which ranks NVLink connects."""

from __future__ import annotations

import dataclasses

import pytest

from hpcgen.config.node_types import load_node_type
from hpcgen.planning.step_time.collectives import Group, Groups, Links
from hpcgen.planning.step_time.machine import Constant, Machine
from hpcgen.planning.step_time.measurements import Measurements, Row
from tests.planning.cases import CP, PP, TP, valid_facts


def groups(nvlink_devices: int = 8, nodes: int = 4, **changes: object) -> Groups:
    layout = valid_facts(nodes=nodes, **changes).layout
    assert layout is not None
    return Groups.of(layout, nvlink_devices)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (groups(**{TP: 4}).tensor, Group(4, 4)),
        (groups(**{TP: 4}).data, Group(8, 2)),
        (groups(**{TP: 4, PP: 2}).data, Group(4, 2)),
        (groups(**{TP: 4, PP: 2}).pipeline, Group(2, 1)),
        (groups(**{TP: 2, CP: 8}).context, Group(8, 4)),
        (groups(nvlink_devices=72, **{TP: 4, PP: 2}).data, Group(4, 4)),  # all nodes are in one rack
        (groups(nodes=1, **{TP: 2, PP: 2}).pipeline, Group(2, 2)),
    ],
)
def test_ranks_in_a_domain(found: Group, expected: Group) -> None:
    """Ranks are in the order tensor, context, data, pipeline."""
    assert found == expected


LINKS = Links(Machine.of(load_node_type("ndv5-h200"), nvlink_devices=8))
"""A machine whose GPU model has no measured rows."""
GIB = 2**30


def test_network_limits_by_the_ranks_of_a_domain() -> None:
    """Each rank of a node sends over its own NIC."""
    one, four = (LINKS.all_gather(GIB, Group(16, per_domain)) for per_domain in (1, 4))
    assert one == pytest.approx(GIB * 15 / 16 / 46e9, rel=0.02)
    assert four == pytest.approx(one / 4, rel=0.02)


def test_nvlink() -> None:
    assert GIB * 7 / 8 / LINKS.reduce_scatter(GIB, Group(8, 8)) == pytest.approx(355e9, rel=0.03)
    assert LINKS.all_reduce(GIB, Group(8, 8)) == pytest.approx(
        2 * LINKS.all_gather(GIB, Group(8, 8)), rel=0.02
    )


def test_switches_with_sharp_halve_an_all_reduce_between_nodes() -> None:
    group = Group(16, 1)
    inside, between = (LINKS.all_reduce(GIB, group, in_switches=in_switches) for in_switches in (False, True))
    assert between == pytest.approx(inside / 2, rel=0.01)


def test_a_few_bytes_take_as_long_as_their_start() -> None:
    assert 10e-6 < LINKS.all_reduce(4, Group(4, 4)) < 100e-6


def test_one_rank_sends_nothing() -> None:
    one = Group(1, 1)
    assert LINKS.all_gather(GIB, one) == LINKS.all_to_all(GIB, one) == LINKS.send(GIB, one) == 0


def test_transfer_next_to_products() -> None:
    """A short transfer slows the products. The rest of a long one is waited for."""
    assert LINKS.added(1.0, 10.0) == pytest.approx(0.15)
    assert LINKS.added(10.0, 1.0) == pytest.approx(9.15)


MIB = 2**20


def collectives(collective: str, microseconds: list[float]) -> list[Row]:
    """Rows of 2 ranks, from 1 MiB on."""
    return [
        {"collective": collective, "ranks": 2, "bytes": MIB * 4**index, "us": us}
        for index, us in enumerate(microseconds)
    ]


BESIDE: Row = {"alone_us": 500.0, "product_alone_us": 1000.0}
TABLE = Measurements(
    "H100 SXM 80 GB",
    collectives=(
        *collectives("all_gather", [40.0, 41.0, 70.0, 120.0]),
        *collectives("all_reduce", [40.0, 60.0, 100.0, 250.0]),
        *collectives("exchange", [80.0, 81.0, 90.0, 230.0]),
    ),
    beside=(
        BESIDE | {"bytes": 256 * MIB, "beside_us": 1200.0, "product_beside_us": 1200.0},
        # the host cannot start 50 transfers in the time of a product
        BESIDE | {"bytes": 16 * MIB, "alone_us": 50.0, "beside_us": 60.0, "product_beside_us": 3000.0},
    ),
)
MEASURED = Links(
    dataclasses.replace(
        LINKS.machine,
        nvlink_bandwidth=Constant(300e9, "300 GB/s", "measured", is_measured=True),
        measurements=TABLE,
    )
)
PAIR = Group(2, 2)


def test_measured_collectives() -> None:
    """Sizes between two rows take a time between theirs."""
    assert MEASURED.all_gather(16 * MIB, PAIR) == pytest.approx(70e-6)
    assert 70e-6 < MEASURED.all_gather(32 * MIB, PAIR) < 120e-6
    assert MEASURED.all_gather(128 * MIB, PAIR) == pytest.approx(240e-6, rel=0.1)
    assert MEASURED.all_reduce(64 * MIB, PAIR) == pytest.approx(250e-6)
    assert MEASURED.send(64 * MIB, PAIR) == pytest.approx(230e-6)


def test_times_of_the_host_are_left_out() -> None:
    """One transfer after the other takes as long as the host needs to start it, however small it is."""
    assert MEASURED.all_gather(MIB, PAIR) < 30e-6
    assert MEASURED.send(16 * MIB, PAIR) < 80e-6


def test_measured_slowdown() -> None:
    """A transfer of 500 us lengthened a product by 200 us."""
    assert MEASURED.added(0.1, 1.0) == pytest.approx(0.04)
    assert MEASURED.added(1.0, 0.1) == pytest.approx(0.94)


def test_guesses() -> None:
    """Names what a layout uses and nobody measured."""
    guesses = "\n".join(map(str, LINKS.guesses(groups(**{TP: 8, PP: 2}))))
    assert "over NVLink" in guesses
    assert "InfiniBand" not in guesses  # measured by Azure
    assert "next to products" in guesses
    assert MEASURED.guesses(groups(nodes=1, **{TP: 2, PP: 2})) == []
    assert [str(guess) for guess in MEASURED.guesses(groups(**{TP: 8}))] == [
        "collectives of 8 GPUs inside a domain as efficient as those of 2 "
        "(measured with 2 GPUs; hpcgen tune measures it)",
        "transfers between nodes slow down products as much as those inside do (measured inside a node)",
    ]


BETWEEN = [
    {"collective": name, "ranks": ranks, "domains": 2, "bytes": size, "us": us}
    for name, ranks, times in (
        ("all_gather", 16, (50.0, 400.0, 4000.0)),
        ("all_reduce", 16, (50.0, 800.0, 8000.0)),
        ("all_to_all", 16, (50.0, 4000.0, 40000.0)),
        ("exchange", 2, (50.0, 2000.0, 30000.0)),
    )
    for size, us in zip((MIB, 64 * MIB, GIB), times, strict=True)
]
"""Transfers between two nodes, at a rate of 31 GB/s per GPU in collectives. The host takes 50 us to start one."""


def test_transfers_between_nodes_take_as_long_as_the_cluster_has_measured() -> None:
    cluster = Measurements("H200 SXM 141 GB", collectives=tuple(BETWEEN))
    links = Links(Machine.of(load_node_type("ndv5-h200"), nvlink_devices=8, cluster=cluster))
    group = Group(16, 8)
    assert links.all_gather(GIB, group) == pytest.approx(4000e-6)
    assert links.all_reduce(64 * MIB, group) == pytest.approx(800e-6)
    assert links.all_to_all(GIB, group) == pytest.approx(40000e-6)
    assert links.send(64 * MIB, Group(8, 1)) == pytest.approx(2000e-6)
    assert LINKS.all_gather(GIB, group) < links.all_gather(GIB, group) < links.all_gather(GIB, Group(128, 8))
    assert links.reduce_scatter(GIB, group) > LINKS.reduce_scatter(GIB, group)  # of the measured bandwidth
    assert LINKS.all_gather(GIB, Group(8, 8)) == links.all_gather(GIB, Group(8, 8))
    guesses = "\n".join(map(str, links.guesses(groups(nodes=2, **{TP: 8}))))
    assert "between nodes as efficient" not in guesses
    guesses = "\n".join(map(str, links.guesses(groups(nodes=4, **{TP: 8}))))
    assert "collectives between 4 nodes as efficient as those between 2" in guesses
