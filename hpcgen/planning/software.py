"""What software a stage's tasks will find: the container runtime, the release of NVIDIA's image, PyTorch."""

from __future__ import annotations

import re

from hpcgen.config.cluster import ClusterConfig
from hpcgen.config.container import Runtime
from hpcgen.config.run import RunConfig

Version = tuple[int, int]

LAST_RELEASE_WITH_SHARP: Version = (25, 1)
"""Of NVIDIA's PyTorch images, the last one whose SHARP was seen to work on Azure."""

FIRST_RELEASE_WITH_TORCH: dict[Version, Version] = {
    (24, 8): (2, 5),
    (24, 11): (2, 6),
    (25, 2): (2, 7),
    (25, 5): (2, 8),
    (25, 9): (2, 9),
    (25, 11): (2, 10),
}
"""Release of nvcr.io/nvidia/pytorch -> PyTorch from then on (NVIDIA's release notes of the container)."""


def runtime(config: RunConfig, cluster: ClusterConfig) -> Runtime:
    """The container runtime of the run: its own choice, else the cluster's, else none."""
    return config.container.runtime or cluster.container.runtime or "none"


def ngc_release(config: RunConfig, cluster: ClusterConfig) -> Version | None:
    """The release of NVIDIA's PyTorch image that the run names by its tag (25, 3); None where the tag is another's."""
    image = config.container.image or cluster.container.image or ""
    found = re.search(r"nvidia/pytorch:(\d\d)\.(\d\d)-", image)
    return (int(found[1]), int(found[2])) if found and runtime(config, cluster) != "none" else None


def torch_version(config: RunConfig, cluster: ClusterConfig) -> Version | None:
    """The PyTorch of the tasks: as the run or the cluster says, else as NVIDIA's tag tells, else None."""
    if said := config.container.torch_version or cluster.container.torch_version:
        major, minor = said.split(".")
        return int(major), int(minor)
    release = ngc_release(config, cluster)
    known = [torch for first, torch in FIRST_RELEASE_WITH_TORCH.items() if release and first <= release]
    # an image newer than the table may hold any later PyTorch
    return known[-1] if known and known[-1] != max(FIRST_RELEASE_WITH_TORCH.values()) else None


def holds_for(wanted: str | None, version: Version | None) -> bool:
    """Whether a version lies in "<2.9" or ">=2.9"; one that is not known may."""
    if wanted is None or version is None:
        return True
    major, minor = wanted.lstrip("<>=").split(".")
    return (version < (int(major), int(minor))) == wanted.startswith("<")
