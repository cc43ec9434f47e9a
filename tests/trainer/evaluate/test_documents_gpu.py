"""Perplexity on a real GPU (make test-gpu): separate documents have the loss that they have on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer import runs
from tests.trainer.document_runs import LENGTH, documents_config, sample
from tests.trainer.evaluate import parts
from tests.trainer.evaluate.test_documents import UNPADDED, write_pair
from tests.trainer.runs import DEEPSEEK_V3, EOD, GPT, QWEN, Run, finished, write_corpus
from trainer.evaluate.perplexity import MAX_ROWS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTHS = [2] * (MAX_ROWS + 500) + [300, 65, 3, 64, 128] * 20
"""The short documents fill a batch of the maximum number of rows, and begin another one."""


def loss(run: Run, directory: Path, text: str, device: str, precision: str) -> float | None:
    config = parts.configuration(
        run.checkpoints,
        directory,
        data=[{"name": "text", "prefix": text}],
        batch_size=MAX_ROWS // LENGTH,
        precision=precision,
    )
    [result] = parts.evaluated(config | {"device": device}, iteration=2)[0].data
    assert result.tokens == sum(LENGTHS) - len(LENGTHS)
    return result.loss


@pytest.mark.parametrize("model", [GPT, QWEN, DEEPSEEK_V3], ids=["gpt", "qwen-window", "deepseek-v3"])
def test_a_gpu_computes_the_loss_of_a_cpu(
    model: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (runs, parts):
        monkeypatch.setattr(module, "ForkedPython", runs.new_process)  # a fork has seen the GPU
    corpus = write_corpus(tmp_path / "corpus", documents=200, eod=EOD)
    config = documents_config(corpus, tmp_path / "run", model | UNPADDED)
    config["training"]["train_iters"] = 2
    run = finished(config)
    text = write_pair(
        tmp_path / "text", *(sample(length, seed=number) for number, length in enumerate(LENGTHS))
    )
    expected = loss(run, tmp_path / "cpu", text, "cpu", "fp32")
    assert loss(run, tmp_path / "fp32", text, "cuda", "fp32") == pytest.approx(expected, rel=1e-5)
    assert loss(run, tmp_path / "bf16", text, "cuda", "bf16") == pytest.approx(expected, rel=5e-3)
