"""The configuration of the calibration: what it measures on the nodes of a cluster, and for how long."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from trainer.contract.config import Count, PositiveFloat, TrainerConfig
from trainer.contract.record import config_section

Section = Literal["host", "collectives", "products", "attention", "memory", "beside", "power"]
"""Part of a table of measurements. topologies/README.md describes the rows of each."""
BUDGET_S = 240.0


@config_section
class Job:
    """A row of a table that is not measured yet."""

    section: Section
    row: dict[str, Any]
    """The row without its results."""
    trainings: tuple[TrainerConfig, ...] = ()
    """For a row of the host: two trainings with such layers. The second one has more of them."""


@config_section
class CalibrationConfig:
    """Configuration of `python -m trainer.calibration`. hpcgen writes it as JSON, like `trainer.contract.config`."""

    device: Literal["cuda", "cpu"]
    domain_size: Count
    """Number of ranks that NVLink connects."""
    jobs: tuple[Job, ...]
    """Measurements, the most important first in each section."""
    budget_s: PositiveFloat = BUDGET_S
    """Time after which nothing more is begun (seconds)."""
    row_s: PositiveFloat = 0.2
    """Time for which a kernel runs (seconds)."""


VOCABULARY = 50304
"""Rows of the embedding whose lookup is measured."""
MOVED_BYTES: Mapping[str, tuple[int, int]] = {
    "norm": (4, 6),
    "layer_norm": (4, 6),
    "swiglu": (6, 10),
    "weighted_swiglu": (6, 10),
    "gelu": (4, 6),
    "rope": (4, 4),
    "residual": (6, 6),
    "cross_entropy": (6, 4),
    "cast_current": (6, 0),
    "cast_delayed": (4, 0),
    "permute": (2, 2),
    "unpermute": (2, 2),
    "router": (2, 4),
    "adam": (28, 0),
    "copy_parameters": (6, 0),
    "gradient_norm": (4, 0),
    "scale_gradients": (8, 0),
    "zero_gradients": (4, 0),
    "accumulate": (10, 0),
    "embedding": (4, 2),
}
"""Bytes that the kernels of the section `memory` cannot avoid to move per value of the output, in the forward and the
backward pass. 0 for kernels without a backward pass."""


def moved_bytes(row: Mapping[str, Any]) -> tuple[int, int]:
    """Bytes that a kernel moves per value of its output in both passes. Each expert of a token gets a copy of it, and
    the gradient of an embedding is that of all its rows."""
    forward, backward = MOVED_BYTES[row["kernel"]]
    if row["kernel"] in ("permute", "unpermute"):
        copies = 2 * row["topk"]
        return forward + copies, backward + copies
    if row["kernel"] == "embedding":
        return forward, backward + 2 * VOCABULARY // row["tokens"]
    return forward, backward
