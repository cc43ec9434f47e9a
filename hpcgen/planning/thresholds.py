"""The all-reduce thresholds of a node type, in the form that the health programs read."""

from __future__ import annotations

import dataclasses

from hpcgen.config.node_type import NodeType
from trainer.contract.health import Threshold

MESSAGE_BYTES = {"cuda": 4 * 2**30, "cpu": 4 * 2**20}
"""Message size to check if no threshold names one, large enough to make latency negligible."""


def thresholds(node_type: NodeType) -> tuple[Threshold, ...]:
    """The thresholds in order. The first matching one applies."""
    return tuple(
        Threshold(**{field.name: getattr(each, field.name) for field in dataclasses.fields(Threshold)})
        for each in (node_type.health.all_reduce if node_type.health else ())
    )


def message_bytes(node_type: NodeType) -> int:
    """The message size of the thresholds in bytes."""
    sizes = [each.message_gib for each in (node_type.health.all_reduce if node_type.health else ())]
    return int(max(sizes) * 2**30) if sizes else MESSAGE_BYTES[node_type.device]
