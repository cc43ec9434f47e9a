"""Losses and metrics of the main output on real GPUs (make test-gpu), whose cross entropies overwrite the logits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from torch.nn import functional

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


@pytest.fixture
def one_rank() -> Iterator[torch.distributed.ProcessGroup]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("factors", ["mask", "any"])
@pytest.mark.parametrize("impl", ["te", "native"])
@with_engine
@pytest.mark.filterwarnings("ignore")  # torch.compile reads the gradient of logits, which are no leaf
def test_each_token_has_the_gradient_of_its_own_factor(
    impl: str, factors: str, samples: int, one_rank: torch.distributed.ProcessGroup
) -> None:
    """Factors of losses are 0 and 1 with a loss mask, and any with a z-loss. torch's gradients in fp32 are right."""
    length, vocab_size = 96, 1024
    generator = torch.Generator("cuda").manual_seed(5)
    shape = (length, samples, vocab_size)
    values = torch.randn(shape, device="cuda", generator=generator).mul(3).bfloat16()
    labels = torch.randint(vocab_size, (samples, length), device="cuda", generator=generator)
    each = torch.rand((samples, length), device="cuda", generator=generator)
    each = (each < 0.4).float() if factors == "mask" else each * 3 - 1
    each[0, 0] = 0.0  # the factor that faulty versions take for all
    logits = values.clone().requires_grad_()
    settings = {
        "cross_entropy_loss_fusion": True,
        "cross_entropy_fusion_impl": impl,
        "cuda_graph_impl": "none",
    }
    module = SimpleNamespace(
        config=SimpleNamespace(**settings), pg_collection=SimpleNamespace(tp=one_rank), tp_group=one_rank
    )
    losses = LanguageModule.compute_language_model_loss(module, labels, logits.clone())
    (losses.float() * each).sum().backward()
    exact = values.float().requires_grad_()
    expected = functional.cross_entropy(exact.permute(1, 2, 0), labels, reduction="none")
    (expected * each).sum().backward()
    torch.testing.assert_close(losses.float(), expected, rtol=0, atol=0.02)
    assert logits.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(logits.grad.float(), exact.grad, rtol=0.01, atol=1e-4)
    assert not logits.grad.transpose(0, 1)[each == 0].any()
