"""Answers while training on real GPUs (make test-gpu): what the model has learned, at every layout and unnoticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.runs import MOE, TWO_LAYERS, finished
from tests.trainer.test_answers import STEPS, alphabet, answers, asking, changed, texts
from tests.trainer.test_gpu import CP2, EP2, TP2_SP, VPP2, needs_gpus, with_engine

__all__ = ("alphabet", "asking")  # fixtures

EXPERTS = {key: value for key, value in MOE.items() if key.startswith("moe_") or "experts" in key}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def on_gpu(asking: dict[str, Any]) -> dict[str, Any]:
    """The run of `asking` in bf16 on GPUs."""
    asking["device"] = "cuda"
    asking["model"] |= {"hidden_size": 128}
    asking["training"] |= {"precision": "bf16", "micro_batch_size": 1}
    asking["optimizer"]["lr"] = 5e-3
    return asking


def learned(config: dict[str, Any]) -> list[str]:
    return [answer for iteration, _, answer in texts(finished(config)) if iteration == STEPS]


@pytest.mark.parametrize("impl", ["torch", pytest.param("transformer_engine", marks=with_engine)])
def test_training_does_not_notice_answers(impl: str, on_gpu: dict[str, Any], tmp_path: Path) -> None:
    on_gpu["training"] |= {"deterministic_mode": True, "transformer_impl": impl}
    found = finished(on_gpu)
    assert [answer for _, _, answer in texts(found)][-3:] == ["defghijk", "qrstuvwx", "bcdefghi"]
    assert len(answers(found)) == 9
    silent = changed(on_gpu, tmp_path / "silent")
    del silent["answers"]
    without = finished(silent)
    assert (found.steps, found.evaluations) == (without.steps, without.evaluations)


@pytest.mark.parametrize(
    ("gpus", "model", "layout", "training"),
    [
        pytest.param(1, {}, {}, {"cuda_graph_impl": "transformer_engine"}, id="graphs", marks=with_engine),
        pytest.param(1, {}, {}, {"fp8": "hybrid"}, id="fp8", marks=with_engine),
        pytest.param(1, {"mtp_num_layers": 1}, {}, {}, id="MTP"),
        pytest.param(2, {}, {}, {}, id="DP2", marks=needs_gpus(2)),
        pytest.param(2, {}, TP2_SP, {}, id="TP2+SP", marks=needs_gpus(2)),
        pytest.param(2, {}, CP2, {}, id="CP2", marks=needs_gpus(2)),
        pytest.param(2, {"num_layers": 4}, VPP2, {}, id="VPP2", marks=needs_gpus(2)),
        pytest.param(2, EXPERTS | TWO_LAYERS, EP2, {}, id="EP2", marks=needs_gpus(2)),
    ],
)
def test_every_layout_answers_what_it_has_learned(
    gpus: int,
    model: dict[str, Any],
    layout: dict[str, Any],
    training: dict[str, Any],
    on_gpu: dict[str, Any],
) -> None:
    on_gpu["model"] |= model
    on_gpu["training"] |= training
    on_gpu |= {"parallelism": layout, "world_size": gpus}
    assert learned(on_gpu) == ["defghijk", "qrstuvwx", "bcdefghi"]
