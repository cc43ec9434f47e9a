"""The node type's all-reduce thresholds, as the health programs read them."""

from __future__ import annotations

from hpcgen.config.node_type import NodeType
from trainer.contract.health import Threshold

MESSAGE_BYTES = {"cuda": 4 * 2**30, "cpu": 4 * 2**20}
"""The message that is judged where no threshold names one: large enough that latency no longer counts."""


def thresholds(node_type: NodeType) -> tuple[Threshold, ...]:
    """The thresholds in their order; the first that fits holds."""
    return tuple(
        Threshold(
            min_nodes=each.min_nodes,
            max_nodes=each.max_nodes,
            nvls=each.nvls,
            collnet=each.collnet,
            expected_gb_s=each.expected_gb_s,
            warn_below_gb_s=each.warn_below_gb_s,
            fail_below_gb_s=each.fail_below_gb_s,
            source=each.source,
        )
        for each in (node_type.health.all_reduce if node_type.health else ())
    )


def message_bytes(node_type: NodeType) -> int:
    """The message that the thresholds were measured with (bytes)."""
    sizes = [each.message_gib for each in (node_type.health.all_reduce if node_type.health else ())]
    return int(max(sizes) * 2**30) if sizes else MESSAGE_BYTES[node_type.device]
