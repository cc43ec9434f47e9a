"""Figures of NVIDIA's data sheets, with which the facts of a node type are compared."""

from __future__ import annotations

import re

from trainer.contract.record import record


@record
class KnownGpu:
    """A GPU's figures in its data sheet."""

    name: str
    """A word of its name."""
    memory_gb: tuple[float, ...]
    bf16: float
    """Dense peak in TFLOP/s."""
    fp8: float | None = None


KNOWN_GPUS = (
    KnownGpu("GB300", (288, 279), 2500, 5000),
    KnownGpu("B300", (288, 270), 2250, 4500),
    KnownGpu("GB200", (192, 186, 184), 2500, 5000),
    KnownGpu("B200", (192, 180), 2250, 4500),
    KnownGpu("GH200", (96, 144, 120), 989, 1979),
    KnownGpu("H200", (141,), 989, 1979),
    KnownGpu("H100 PCIe", (80,), 756, 1513),
    KnownGpu("H100 NVL", (94,), 835, 1671),
    KnownGpu("H100", (64, 80, 94, 96), 989, 1979),
    KnownGpu("H800", (80,), 989, 1979),
    KnownGpu("H20", (96, 141), 148, 296),
    KnownGpu("A100", (40, 64, 80), 312),
    KnownGpu("A800", (40, 80), 312),
    KnownGpu("A30", (24,), 165),
    KnownGpu("A40", (48,), 149.7),
    KnownGpu("A10", (24,), 125),
    KnownGpu("L40S", (48,), 362, 733),
    KnownGpu("L40", (48,), 181, 362),
    KnownGpu("L4", (24,), 121, 242),
)
"""GPUs, the more specific names first (NVIDIA data sheets, dense figures)."""


def gpu_called(text: str) -> KnownGpu | None:
    """The known GPU whose name is in a text, such as "A100 SXM 80 GB" or a100_80gb; None for others."""
    words = set(re.findall(r"[a-z]*\d+[a-z]*|[a-z]+", text.lower()))
    return next((gpu for gpu in KNOWN_GPUS if words.issuperset(gpu.name.lower().split())), None)
