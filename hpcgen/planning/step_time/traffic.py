"""Bytes that GPUs send in a step: links that take a second for each byte, and what a step transfers over them."""

from __future__ import annotations

from hpcgen.planning.step_time.collectives import Group, Links
from trainer.contract.record import record


@record
class Transfer:
    """The data that the ranks of a group exchange in a step."""

    axis: str
    """Field of `Groups` with the group."""
    group: Group
    sent: float
    """Bytes that a rank of the busiest pipeline stage sends."""
    in_network: float
    """Part of these bytes that leaves its NVLink domain, as a mean over the ranks of a domain."""


@record(eq=False)
class SentBytes(Links):
    """Links that take a second for each byte that a rank sends, and that no computation hides."""

    def all_gather(self, size: float, group: Group) -> float:
        """Bytes that a rank sends in a ring, each part once to its neighbor."""
        return self._parts(size, group)

    def reduce_scatter(self, size: float, group: Group) -> float:
        """Likewise."""
        return self._parts(size, group)

    def all_reduce(self, size: float, group: Group, *, in_switches: bool = False) -> float:
        """Bytes of a sum and of its distribution. Switches that add up send the sum back."""
        is_once = in_switches and group.crosses_network
        return self._parts(size if is_once else 2 * size, group)

    def all_to_all(self, size: float, group: Group) -> float:
        """Bytes for the other ranks."""
        return size * (group.size - 1) / group.size

    def send(self, size: float, group: Group) -> float:
        """Bytes for the next rank."""
        return size if group.size > 1 else 0.0

    def added(self, transfer_s: float, beside_s: float) -> float:
        """All bytes of a transfer, whatever computation runs next to it."""
        return transfer_s

    def _parts(self, size: float, group: Group) -> float:
        return size * (group.size - 1) / group.size


@record(eq=False)
class NetworkBytes(SentBytes):
    """Bytes sent between NVLink domains."""

    def all_to_all(self, size: float, group: Group) -> float:
        """Bytes for the ranks of other domains."""
        return size * max(0, group.size - group.per_domain) / group.size

    def send(self, size: float, group: Group) -> float:
        """Bytes for the next rank, in places where it is in another domain."""
        return size if group.crosses_network else 0.0

    def _parts(self, size: float, group: Group) -> float:
        """The ranks of a domain take turns to send to the next domain, in a ring for each of them."""
        return super()._parts(size, group) / group.per_domain if group.crosses_network else 0.0
