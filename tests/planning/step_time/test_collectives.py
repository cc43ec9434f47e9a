"""Time of transfers, and which ranks NVLink connects."""

from __future__ import annotations

import pytest

from hpcgen.config.node_types import load_node_type
from hpcgen.planning.step_time.collectives import Group, Groups, Links
from hpcgen.planning.step_time.machine import Machine
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


LINKS = Links(Machine.of(load_node_type("ndv5"), nvlink_devices=8))
GIB = 2**30


def test_network_limits_by_the_ranks_of_a_domain() -> None:
    """Each rank of a node sends over its own NIC."""
    one, four = (LINKS.all_gather(GIB, Group(16, per_domain)) for per_domain in (1, 4))
    assert one == pytest.approx(GIB * 15 / 16 / 46e9, rel=0.02)
    assert four == pytest.approx(one / 4, rel=0.02)


def test_nvlink() -> None:
    assert GIB * 7 / 8 / LINKS.reduce_scatter(GIB, Group(8, 8)) == pytest.approx(355e9, rel=0.03)
    assert LINKS.all_reduce(GIB, Group(8, 8)) == 2 * LINKS.all_gather(GIB, Group(8, 8))


def test_one_rank_sends_nothing() -> None:
    one = Group(1, 1)
    assert LINKS.all_gather(GIB, one) == LINKS.all_to_all(GIB, one) == LINKS.send(GIB, one) == 0


def test_transfer_beside_products() -> None:
    """A short transfer slows the products. The rest of a long one is waited for."""
    assert 0 < LINKS.added(1.0, 10.0) < 0.2
    assert LINKS.added(10.0, 1.0) == pytest.approx(9.0)
