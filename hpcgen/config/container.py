"""Container settings in a run file or a cluster profile."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from hpcgen.config.fields import Text
from trainer.contract.record import config_section

MOUNTABLE = Text(
    r"(?!.*/\.\.(/|$))/[^\s,:$'\"`\\]{0,1000}",
    "an absolute path without '..', spaces, commas, colons, quotes, backslashes or '$' (pyxis refuses them)",
)
MountPath = Annotated[str, MOUNTABLE]
_FILE = r"/[A-Za-z0-9._+@=/-]+"
_TAG = r"(:[A-Za-z0-9._-]+)?(@sha256:[0-9a-f]{64})?"
_REFERENCE = rf"(?!.*\.(?:sqsh|sif)$)([a-z0-9.-]+(:\d+)?#)?[a-z0-9][a-z0-9._/-]*{_TAG}"
_REFERENCE_FORM = "REGISTRY#IMAGE:TAG in lower case (nvcr.io#nvidia/pytorch:25.03-py3)"
Image = Annotated[
    str,
    Text(
        rf"{_FILE}\.(?:sqsh|sif)|{_REFERENCE}",
        f"the absolute path of a .sqsh or .sif file, or {_REFERENCE_FORM}",
    ),
]
SquashImage = Annotated[
    str, Text(rf"{_FILE}\.sqsh|{_REFERENCE}", f"the absolute path of a .sqsh, or {_REFERENCE_FORM}")
]
"""An image that enroot reads."""
EnvironmentFile = Annotated[
    str,
    Text(
        rf"{_FILE}\.toml|(?!.*\.toml$)[A-Za-z0-9][A-Za-z0-9._+-]{{0,100}}",
        "the absolute path of a .toml file, or the name of a file in EDF_PATH without .toml",
    ),
]
AnnotationName = Annotated[
    str, Text(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", "names separated by dots, such as com.hooks.cxi.enabled")
]
AnnotationValue = Annotated[str, Text(r"[^\"\\]*", "text without double quotes and backslashes")]
Runtime = Literal["pyxis", "enroot", "apptainer", "ce", "none"]
TorchVersion = Annotated[str, Text(r"\d+\.\d{1,2}", 'a PyTorch version such as "2.7"')]


def is_image_file(image: str) -> bool:
    """Returns True for an image file and False for a registry reference."""
    return image.endswith((".sqsh", ".sif"))


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
    """Container runtime: pyxis (srun --container-image), enroot (enroot without pyxis), apptainer, ce (CSCS's container
    engine, srun --environment), or none (run on the host)."""
    image: Image | None = None
    """Container image: a .sqsh file, with apptainer a .sif file, or with pyxis and ce also a registry reference.
    Required in a container, except with `environment`."""
    copy_image: bool | None = None
    """Copy an image file to each node's scratch directory and run it from there. The copy is kept for later jobs."""
    torch_version: TorchVersion | None = None
    """PyTorch version of the image, such as "2.7", which determines some environment variables. Default: derived from
    the tag of an NVIDIA image."""
    mounts: tuple[Mount, ...] = ()
    """Mounts in addition to the cluster's. Run, data, checkpoint and code directories are mounted automatically."""
    writable: bool | None = None
    """Make the container's root file system writable. Changes are discarded when the job ends."""
    workdir: MountPath | None = None
    """Working directory in the container. Default: the run directory."""
    environment: EnvironmentFile | None = None
    """With runtime ce: the site's own environment definition file (EDF), by path or name. The job's file extends it.
    Default: none."""
    annotations: dict[AnnotationName, AnnotationValue] = field(default_factory=dict)
    """With runtime ce: annotations for the engine's hooks, such as com.hooks.aws_ofi_nccl.variant: cuda-dl. Those of
    the fabric apply unless these or `environment` replace them."""
