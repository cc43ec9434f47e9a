"""Time of transfers, and which ranks NVLink connects."""

from __future__ import annotations

import dataclasses

import pytest

from hpcgen.config.node_types import load_node_type
from hpcgen.planning.step_time.collectives import Group, Groups, Links
from hpcgen.planning.step_time.machine import Constant, Machine
from hpcgen.planning.step_time.measurements import Measurements
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
"""Of a GPU model without measured rows."""
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
    """A short transfer slows the products. The rest of a long one is waited for, and both are slower together."""
    assert 0 < LINKS.added(1.0, 10.0) < 0.2
    assert 9.0 < LINKS.added(10.0, 1.0) < 9.2


MIB = 2**20
TABLE = Measurements(
    "H100 SXM 80 GB",
    collectives=(
        {"collective": "all_gather", "ranks": 2, "bytes": 16 * MIB, "us": 50.0},
        {"collective": "all_gather", "ranks": 2, "bytes": 64 * MIB, "us": 120.0},
        {"collective": "all_reduce", "ranks": 2, "bytes": 64 * MIB, "us": 250.0},
        {"collective": "send_recv", "ranks": 2, "bytes": 64 * MIB, "us": 230.0},
    ),
    beside=(
        {"alone_us": 100.0, "beside_us": 150.0, "product_alone_us": 1000.0, "product_beside_us": 1250.0},
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
    assert MEASURED.all_gather(16 * MIB, PAIR) == pytest.approx(50e-6)
    assert 50e-6 < MEASURED.all_gather(32 * MIB, PAIR) < 120e-6
    assert MEASURED.all_gather(128 * MIB, PAIR) == pytest.approx(240e-6, rel=0.1)
    assert MEASURED.all_reduce(64 * MIB, PAIR) == pytest.approx(250e-6)
    assert MEASURED.send(64 * MIB, PAIR) == pytest.approx(230e-6)


def test_measured_slowdown() -> None:
    """While the transfer lasts 1.5 s, the products do what takes 1.2 s alone."""
    assert MEASURED.added(1.0, 10.0) == pytest.approx(0.3)


def test_guesses() -> None:
    """Names what a layout uses and nobody measured."""
    guesses = "\n".join(map(str, LINKS.guesses(groups(**{TP: 8, PP: 2}))))
    assert "over NVLink" in guesses
    assert "InfiniBand" not in guesses  # measured by Azure
    assert "next to a transfer" in guesses
    assert MEASURED.guesses(groups(nodes=1, **{TP: 2, PP: 2})) == []
    [guess] = MEASURED.guesses(groups(**{TP: 8}))
    assert (
        str(guess)
        == "collectives of 8 GPUs inside a domain as efficient as those of 2 (measured with 2 GPUs)"
    )
