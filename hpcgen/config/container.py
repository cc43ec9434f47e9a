"""Container settings, as a run file and a cluster profile give them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from hpcgen.config.fields import Text
from trainer.contract.config import FORBID_UNKNOWN_KEYS

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


@dataclass(frozen=True, kw_only=True)
class Mount:
    """One host directory or file shown in the container."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_UNKNOWN_KEYS

    source: MountPath
    """Path on the host; it must exist on every node."""
    target: MountPath | None = None
    """Path in the container; null means the same as source."""
    read_only: bool = False
    """Refuse writes from the container."""


@dataclass(frozen=True, kw_only=True)
class ContainerConfig:
    """The container a stage runs in. Null takes the cluster's value."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_UNKNOWN_KEYS

    runtime: Runtime | None = None
    """pyxis runs tasks in a container through srun; enroot does it without pyxis; none runs them on the host."""
    image: Image | None = None
    """A .sqsh file, or with pyxis a registry reference; needed with pyxis and enroot."""
    copy_image: bool | None = None
    """Copies a .sqsh to the node's scratch once, and starts from there; a copy is kept for later jobs."""
    torch_version: TorchVersion | None = None
    """PyTorch of the tasks ("2.7"), where it cannot be told from the tag of NVIDIA's image: some variables changed."""
    mounts: tuple[Mount, ...] = ()
    """Added to the cluster's mounts. Run, data, checkpoint and code directories are mounted without being named."""
    writable: bool | None = None
    """Let tasks write to the image's own file system (a copy that ends with the job)."""
    workdir: MountPath | None = None
    """Working directory in the container; null means the run directory."""
