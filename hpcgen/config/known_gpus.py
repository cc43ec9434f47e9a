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
    sms: int
    """Number of streaming multiprocessors."""
    watts: int
    """Power limit. If it can be configured, the usual one."""
    fp8: float | None = None
    best_product: float | None = None
    """Share of the bf16 peak that the fastest matrix product was measured to reach (Bekman, "Machine Learning
    Engineering Open Book", maximum achievable matmul FLOPS)."""


KNOWN_GPUS = (
    KnownGpu("GB300", (288, 279), 2500, sms=152, watts=1400, fp8=5000),
    KnownGpu("B300", (288, 270), 2250, sms=148, watts=1100, fp8=4500),
    KnownGpu("GB200", (192, 186, 184), 2500, sms=152, watts=1200, fp8=5000),
    KnownGpu("B200", (192, 180), 2250, sms=148, watts=1000, fp8=4500, best_product=0.776),
    KnownGpu("GH200", (96, 144, 120), 989, sms=132, watts=700, fp8=1979, best_product=0.836),
    KnownGpu("H200", (141,), 989, sms=132, watts=700, fp8=1979),
    KnownGpu("H100 PCIe", (80,), 756, sms=114, watts=350, fp8=1513),
    KnownGpu("H100 NVL", (94,), 835, sms=132, watts=400, fp8=1671),
    KnownGpu("H100", (64, 80, 94, 96), 989, sms=132, watts=700, fp8=1979, best_product=0.801),
    KnownGpu("H800", (80,), 989, sms=132, watts=700, fp8=1979),
    KnownGpu("H20", (96, 141), 148, sms=78, watts=400, fp8=296),
    KnownGpu("A100", (40, 64, 80), 312, sms=108, watts=400, best_product=0.869),
    KnownGpu("A800", (40, 80), 312, sms=108, watts=400),
    KnownGpu("A30", (24,), 165, sms=56, watts=165),
    KnownGpu("A40", (48,), 149.7, sms=84, watts=300),
    KnownGpu("A10", (24,), 125, sms=72, watts=150),
    KnownGpu("L40S", (48,), 362, sms=142, watts=350, fp8=733),
    KnownGpu("L40", (48,), 181, sms=142, watts=300, fp8=362),
    KnownGpu("L4", (24,), 121, sms=58, watts=72, fp8=242),
)
"""GPUs, the more specific names first (NVIDIA data sheets, dense figures)."""


def gpu_called(text: str) -> KnownGpu | None:
    """The known GPU whose name is in a text, such as "A100 SXM 80 GB" or a100_80gb; None for others."""
    words = set(re.findall(r"[a-z]*\d+[a-z]*|[a-z]+", text.lower()))
    return next((gpu for gpu in KNOWN_GPUS if words.issuperset(gpu.name.lower().split())), None)
