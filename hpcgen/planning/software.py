"""The software of a stage's tasks: container runtime, release of NVIDIA's image, and PyTorch version."""

from __future__ import annotations

import re

from hpcgen.config.cluster import ClusterConfig
from hpcgen.config.container import Runtime
from hpcgen.config.run import RunConfig

Version = tuple[int, int]

LAST_RELEASE_WITH_SHARP: Version = (25, 1)
"""Last release of NVIDIA's PyTorch image whose SHARP worked on Azure."""

FIRST_RELEASE_WITH_TORCH: dict[Version, Version] = {
    (24, 8): (2, 5),
    (24, 11): (2, 6),
    (25, 2): (2, 7),
    (25, 5): (2, 8),
    (25, 9): (2, 9),
    (25, 11): (2, 10),
}
"""Release of nvcr.io/nvidia/pytorch -> PyTorch version from that release on (NVIDIA's container release notes)."""


def runtime(config: RunConfig, cluster: ClusterConfig) -> Runtime:
    """The container runtime of the run, from the run file, the cluster profile, or else none."""
    return config.container.runtime or cluster.container.runtime or "none"


def ngc_release(config: RunConfig, cluster: ClusterConfig) -> Version | None:
    """The release of NVIDIA's PyTorch image by its tag, such as (25, 3); None for other images."""
    image = config.container.image or cluster.container.image or ""
    found = re.search(r"nvidia/pytorch:(\d\d)\.(\d\d)-", image)
    return (int(found[1]), int(found[2])) if found and runtime(config, cluster) != "none" else None


def torch_version(config: RunConfig, cluster: ClusterConfig) -> Version | None:
    """The tasks' PyTorch version from the run file, the cluster profile or NVIDIA's image tag; None if unknown."""
    if given := config.container.torch_version or cluster.container.torch_version:
        major, minor = given.split(".")
        return int(major), int(minor)
    release = ngc_release(config, cluster)
    known = [torch for first, torch in FIRST_RELEASE_WITH_TORCH.items() if release and first <= release]
    # an image newer than the table may have any later PyTorch
    return known[-1] if known and known[-1] != max(FIRST_RELEASE_WITH_TORCH.values()) else None


def holds_for(wanted: str | None, version: Version | None) -> bool:
    """Returns True if `version` satisfies `wanted`, such as "<2.9" or ">=2.9", or if it is unknown."""
    if wanted is None or version is None:
        return True
    major, minor = wanted.lstrip("<>=").split(".")
    return (version < (int(major), int(minor))) == wanted.startswith("<")
