"""The numbers of nodes for which a search is made."""

from __future__ import annotations

from hpcgen.config.cluster import ClusterConfig, limits_of
from hpcgen.config.slurm import StageSettings

MOST_NODES = 2048
"""Largest number of nodes to try if the partition has no limit."""


def powers(most: int) -> list[int]:
    """The powers of two up to `most`."""
    return [2**power for power in range(most.bit_length())]


def ladder(most: int) -> list[int]:
    """The numbers of nodes to try: 1, 2, 3, 4, 6, 8, 12, 16 and so on up to `most`, which is the last one.

    Others hardly divide a batch, heads or layers. With steps of at most a half, none is far from what would be enough.
    """
    sizes = {size for power in powers(most) for size in (power, 3 * power // 2)}
    return sorted({size for size in sizes if size < most} | {most})


def quarters(fewer: int, more: int) -> range:
    """The numbers of nodes between two others that divide the step from one to the other into up to four equal ones."""
    return range(fewer, more, max(1, (more - fewer) // 4))[1:]


def most_nodes(settings: StageSettings, cluster: ClusterConfig) -> int:
    """The limit of the partition and the QOS of a job, or MOST_NODES."""
    return min([MOST_NODES, *(each.max_nodes for _, each in limits_of(settings, cluster) if each.max_nodes)])
