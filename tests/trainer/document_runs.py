"""Samples of several documents, runs with them, and layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.trainer.runs import EOD, GPT, gpt_config

LENGTH = 64
SEPARATE = {"reset_attention_mask": True, "reset_position_ids": True, "eod_mask_loss": True, "eod_id": EOD}
TP2_SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
LAYOUTS = [
    pytest.param(TP2_SP, 2, id="TP2+SP"),
    pytest.param(PP2, 2, id="PP2"),
    pytest.param(CP2, 2, id="CP2"),
    pytest.param(PP2 | {"virtual_pipeline_model_parallel_size": 2}, 2, id="VPP2", marks=pytest.mark.slow),
    pytest.param(PP2 | CP2, 4, id="PP2xCP2", marks=pytest.mark.slow),
    pytest.param(TP2_SP | CP2, 4, id="TP2xCP2", marks=pytest.mark.slow),
]


def sample(*lengths: int, seed: int = 0) -> list[int]:
    """Documents of these lengths with random tokens. Each ends with the end-of-document token."""
    random = numpy.random.default_rng([seed, *lengths])
    return [token for length in lengths for token in [*random.integers(0, 500, length - 1).tolist(), EOD]]


def documents_config(
    prefix: str, directory: Path, model: dict[str, Any] = GPT, **data: Any
) -> dict[str, Any]:
    config = gpt_config(prefix, directory, model)
    config["data"] |= data or SEPARATE
    config["training"]["train_iters"] = 4
    config["optimizer"]["lr"] = 1e-3  # does not amplify rounding as 1e-2 does
    return config


class Rank:
    """A context-parallel rank, in place of its process group."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size
