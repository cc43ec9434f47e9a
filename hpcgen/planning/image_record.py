"""The record of an image file, which enroot/build-image.sh writes next to it: what the image contains."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from hpcgen.errors import Problem
from trainer.contract.config import TrainerConfig, TrainingConfig
from trainer.contract.files.regular_file import open_regular
from trainer.contract.record import record
from trainer.contract.transformer_engine import cross_entropy_problem, major_minor

MOST_BYTES = 1 << 16

TRANSFORMER_ENGINE_OF_FP8 = {"tensorwise": (2, 2), "delayed": (1, 0)}
"""FP8 recipe -> oldest version of Transformer Engine that has it (megatron/core/fp8_utils.py)."""


@record(kw_only=True)
class ImageRecord:
    """The record of an image."""

    sha256: str
    size: int | None
    """Size of the file in bytes when it was hashed."""
    mtime: int | None
    """Time of the last change of that file (Unix time in seconds)."""
    found: Mapping[str, str]
    """Component -> its version, such as te -> 2.1.0 and torch -> 2.7.0, CUDA 12.8."""

    @property
    def cuda(self) -> str:
        """CUDA version of the image's PyTorch; "" if it is unknown."""
        version = re.search(r"CUDA (\d+\.\d+)", self.found.get("torch", ""))
        return version[1] if version else ""


def read_image_record(image: str) -> ImageRecord | None:
    """The record next to an image file; None without one.

    Raises:
        OSError: it exists and cannot be read.
    """
    try:
        with open_regular(Path(f"{image}.record")) as file:
            lines = file.read(MOST_BYTES).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return None
    values = dict(line.partition(" ")[::2] for line in lines)
    found = dict(
        line.removeprefix("found ").partition(" ")[::2] for line in lines if line.startswith("found ")
    )
    return ImageRecord(
        sha256=values.get("sha256", ""),
        size=_number(values, "size"),
        mtime=_number(values, "mtime"),
        found=found,
    )


def fp8_problems(image: str, training: TrainingConfig) -> Iterator[Problem]:
    """Yields a problem if the image's record shows a Transformer Engine that lacks the run's FP8 recipe.

    Nothing is known of an image without a record, or of a component that was not looked for.
    """
    if training.fp8 is None:
        return
    version = _transformer_engine(image)
    known, needed = major_minor(version), TRANSFORMER_ENGINE_OF_FP8[training.fp8_recipe]
    if known is not None and known < needed:
        reason = (
            f"needs Transformer Engine {needed[0]}.{needed[1]} or newer, and the image {image} has {version} "
            f"({image}.record)"
        )
        yield Problem(
            "training.fp8_recipe", reason, "use a newer image, or another recipe", about=("training.fp8",)
        )


def cross_entropy_problems(image: str, trainer: TrainerConfig) -> Iterator[Problem]:
    """Yields a problem if the run asks for Transformer Engine's cross entropy, and the image's record shows a version
    that lacks it, or in which it is wrong for this run."""
    version = _transformer_engine(image)
    if trainer.training.cross_entropy_fusion_impl != "te" or major_minor(version) is None:
        return
    if why := cross_entropy_problem(trainer, version):
        reason = f"is not possible in the image {image}: {why} ({image}.record)"
        yield Problem("training.cross_entropy_fusion_impl", reason, "remove the key")


def _transformer_engine(image: str) -> str:
    """Version of Transformer Engine in the image's record; empty if it is not known."""
    try:
        record = read_image_record(image)
    except OSError:
        return ""
    return record.found.get("te", "") if record else ""


def _number(values: Mapping[str, str], name: str) -> int | None:
    text = values.get(name, "")
    return int(text) if text.isdecimal() else None
