"""Settings of the image stage: the options of enroot/build-image.sh."""

from __future__ import annotations

from typing import Annotated, Literal

from hpcgen.config.container import SquashImage
from hpcgen.config.fields import Text
from trainer.contract.record import config_section

# enroot's configuration files have no quoting, so these paths are more restricted than others.
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
    "deepspeed",
]
"""Components that enroot/health_check.py can check for."""


@config_section
class ImageConfig:
    """Container image that the image stage builds."""

    base: SquashImage = "nvcr.io#nvidia/pytorch:25.03-py3"
    """Base image: an NVIDIA PyTorch image with a tag or preferably @sha256:DIGEST, or the path of a .sqsh file."""
    output: ImageFile | None = None
    """Path of the .sqsh file to build, on storage shared by all nodes. Default: container.image, if it is a .sqsh."""
    code: CodePath | None = None
    """Code to install: a directory from `hpcgen install-code` or an hpcgen wheel. Default: the cluster's code_dir."""
    megatron_core: Version | None = None
    """Version of Megatron-Core to install from the package index if `code` is a wheel. A directory from install-code
    contains Megatron-Core."""
    deepspeed: bool = False
    """Also install DeepSpeed, transformers, TRL, PEFT, accelerate and datasets, with DeepSpeed's kernels compiled."""
    megatron_deepspeed: CodePath | None = None
    """Checkout of Megatron-DeepSpeed to copy into the image. Requires `deepspeed`. Default: none."""
    packages: tuple[Package, ...] | None = None
    """Debian packages to install. Default: zstd, ibverbs-utils, infiniband-diags and perftest; with `deepspeed` also
    libaio-dev."""
    need: tuple[Check, ...] | None = None
    """Components that the image must contain, or the build fails. Default: torch, te, apex, megatron-core, trainer,
    nccl and ucx; also zstd if it is in `packages`, topology if the node type has a topology file, and deepspeed if
    it is set. CPU images lack te, apex and ucx."""
    doca: Version | None = None
    """Version of NVIDIA DOCA whose user-space network packages replace the image's; null keeps the image's."""
