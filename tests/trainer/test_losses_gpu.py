"""Losses and metrics of the main output on real GPUs (make test-gpu), whose cross entropies overwrite the logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tests.trainer.runs import LLAMA, ROOT, finished, write_corpus
from tests.trainer.test_gpu import TP2_SP, needs_gpus, on_gpus, with_engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

OWN = ROOT / "tests" / "trainer" / "own_losses.py"
EXAMPLE = ROOT / "examples" / "custom_loss.py"
CROSS_ENTROPIES = {
    "te": {"cross_entropy_fusion_impl": "te"},
    "native": {"cross_entropy_fusion_impl": "native"},
    "fp32": {"precision": "fp32"},
    "own": {"loss": f"{OWN}:plain"},
}
COLUMNS = ("loss", "output_z_loss", "accuracy", "grad_norm")


def numbers(corpus: str, directory: Path, layout: dict[str, Any], training: dict[str, Any]) -> numpy.ndarray:
    """COLUMNS of each step of a run with a z-loss and a metric, and of its evaluation without the norm."""
    config = on_gpus(corpus, directory, 2 if layout else 1, layout, LLAMA)
    config["training"] |= {"z_loss_coeff": 1e-2, "metrics": [f"{EXAMPLE}:accuracy"], "eval_iters": 1}
    config["training"] |= training
    events = finished(config).events
    steps = [[each[name] for name in COLUMNS] for each in events if each["event"] == "step"]
    last = next(each for each in events if each["event"] == "evaluation")
    return numpy.array([*steps, [*(last[name] for name in COLUMNS[:3]), steps[-1][3]]])


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        pytest.param({}, ("te", "native", "fp32", "own"), id="one"),
        pytest.param(TP2_SP, ("te", "own"), id="TP2+SP", marks=needs_gpus(2, shareable=False)),
    ],
)
@with_engine
def test_the_z_loss_is_the_same_with_every_cross_entropy(
    layout: dict[str, Any], names: tuple[str, ...], tmp_path: Path
) -> None:
    corpus = write_corpus(tmp_path / "long", documents=400)
    expected = numbers(corpus, tmp_path / "reference", {}, CROSS_ENTROPIES["native"])
    for name in names:
        found = numbers(corpus, tmp_path / name, layout, CROSS_ENTROPIES[name])
        numpy.testing.assert_allclose(found[0], expected[0], rtol=1e-2, atol=1e-2, err_msg=name)
        numpy.testing.assert_allclose(found[:, 0], expected[:, 0], atol=0.05, err_msg=name)
        numpy.testing.assert_allclose(found[:, 1], expected[:, 1], rtol=0.03, err_msg=name)
        numpy.testing.assert_allclose(found[:, 2], expected[:, 2], atol=0.03, err_msg=name)
