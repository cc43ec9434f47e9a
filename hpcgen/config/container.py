"""Container settings in a run file or a cluster profile."""

from __future__ import annotations

from typing import Annotated, Literal

from hpcgen.config.fields import Text
from trainer.contract.record import config_section

MOUNTABLE = Text(
    r"(?!.*/\.\.(/|$))/[^\s,:$'\"`\\]{0,1000}",
    "an absolute path without '..', spaces, commas, colons, quotes, backslashes or '$' (pyxis refuses them)",
)
MountPath = Annotated[str, MOUNTABLE]
Image = Annotated[
    str,
    Text(
        r"/[A-Za-z0-9._+@=/-]+\.sqsh"
        r"|(?!.*\.sqsh$)([a-z0-9.-]+(:\d+)?#)?[a-z0-9][a-z0-9._/-]*(:[A-Za-z0-9._-]+)?(@sha256:[0-9a-f]{64})?",
        "the absolute path of a .sqsh, or REGISTRY#IMAGE:TAG in lower case (nvcr.io#nvidia/pytorch:25.03-py3)",
    ),
]
Runtime = Literal["pyxis", "enroot", "none"]
TorchVersion = Annotated[str, Text(r"\d+\.\d{1,2}", 'a PyTorch version such as "2.7"')]


def is_image_file(image: str) -> bool:
    """Returns True for a .sqsh file and False for a registry reference."""
    return image.endswith(".sqsh")


@config_section
class Mount:
    """A host directory or file mounted in the container."""

    source: MountPath
    """Path on the host. It must exist on every node."""
    target: MountPath | None = None
    """Path in the container. Default: same as source."""
    read_only: bool = False
    """Mount read-only."""


@config_section
class ContainerConfig:
    """Container in which a stage runs. Null uses the cluster's value."""

    runtime: Runtime | None = None
    """Container runtime: pyxis (srun --container-image), enroot (enroot without pyxis), or none (run on the host)."""
    image: Image | None = None
    """Container image: a .sqsh file, or with pyxis also a registry reference. Required with pyxis and enroot."""
    copy_image: bool | None = None
    """Copy a .sqsh image to each node's scratch directory and run it from there. The copy is kept for later jobs."""
    torch_version: TorchVersion | None = None
    """PyTorch version of the image, such as "2.7", which determines some environment variables. Default: derived from
    the tag of an NVIDIA image."""
    mounts: tuple[Mount, ...] = ()
    """Mounts in addition to the cluster's. Run, data, checkpoint and code directories are mounted automatically."""
    writable: bool | None = None
    """Make the container's root file system writable. Changes are discarded when the job ends."""
    workdir: MountPath | None = None
    """Working directory in the container. Default: the run directory."""
