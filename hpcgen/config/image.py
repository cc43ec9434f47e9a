"""The container image that the image stage makes: the options of enroot/build-image.sh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from hpcgen.config.container import Image
from hpcgen.config.fields import Text
from trainer.contract.config import FORBID_UNKNOWN_KEYS

# enroot's own configuration has no quoting, so these are narrower than other paths.
_PLAIN = r"(?!.*/\.\.(/|$))/[A-Za-z0-9._+@=/-]{1,1000}"
Version = Annotated[str, Text(r"\d[0-9a-z]*(\.[0-9a-z]+){0,5}", 'a version such as "0.16.1"')]
Package = Annotated[str, Text(r"[a-z0-9][a-z0-9.+-]{1,100}", "the name of a Debian package")]
ImageFile = Annotated[
    str,
    Text(rf"{_PLAIN}\.sqsh", "the absolute path of a .sqsh (letters, digits, . _ + @ = - /, without '..')"),
]
CodePath = Annotated[str, Text(_PLAIN, "an absolute path of letters, digits and . _ + @ = - / without '..'")]
Check = Literal[
    "driver",
    "gpu",
    "torch",
    "te",
    "apex",
    "megatron-core",
    "trainer",
    "nccl",
    "ucx",
    "sharp",
    "infiniband",
    "zstd",
    "topology",
    "memlock",
]
"""Components that enroot/health_check.py can check for."""


@dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """What the image stage makes, and from what."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_UNKNOWN_KEYS

    base: Image = "nvcr.io#nvidia/pytorch:25.03-py3"
    """NVIDIA's PyTorch image, by tag or better with @sha256:DIGEST, or the path of an imported .sqsh."""
    output: ImageFile | None = None
    """The .sqsh to make, on storage that every node sees; null means container.image, which must then be one."""
    code: CodePath | None = None
    """Directory of `hpcgen install-code`, or a wheel of hpcgen, for the image; null means the cluster's code_dir."""
    megatron_core: Version | None = None
    """Megatron-Core for a wheel, from the package index; a directory of install-code brings its own."""
    packages: tuple[Package, ...] | None = None
    """Debian packages to add; null takes zstd, ibverbs-utils, infiniband-diags, perftest."""
    need: tuple[Check, ...] | None = None
    """What the image must have to be made. An image for CPUs lacks te, apex and ucx. Null means torch, te, apex,
    megatron-core, trainer, nccl and ucx; zstd too where it is a package, topology where the node type has one."""
    doca: Version | None = None
    """Version of NVIDIA DOCA's user-space network packages to put over the image's own; null leaves those."""
