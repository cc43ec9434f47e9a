"""The choice of kernels: configurations that it refuses before anything is built, and the cross entropy."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

from tests.trainer.runs import gpt_config
from trainer.contract import config as configuration
from trainer.contract.config import TrainerConfig
from trainer.contract.config.resolve import resolve
from trainer.contract.errors import TrainerError
from trainer.contract.rules.engine import require
from trainer.model import kernels
from trainer.model.core_config import transformer_config

NEEDS_ITS_LAYERS = [
    ("training", {"fp8": "hybrid"}),
    ("training", {"cuda_graph_impl": "transformer_engine"}),
    ("parallelism", {"tp_comm_overlap": True}),
]


def on_a_gpu(tmp_path: Path, section: str, values: dict[str, Any], **training: Any) -> TrainerConfig:
    document = gpt_config("x", tmp_path) | {"device": "cuda"}
    document["training"] |= {"precision": "bf16"} | training
    document[section] |= values
    return resolve(configuration.from_dict(TrainerConfig, document, "test"))


@pytest.mark.parametrize(("section", "values"), NEEDS_ITS_LAYERS)
def test_settings_that_other_layers_ignore_are_refused(
    section: str, values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = on_a_gpu(tmp_path, section, values, transformer_impl="torch")
    [key] = values
    with pytest.raises(TrainerError, match=f"training.transformer_impl|{section}.{key}"):
        require(config)
    monkeypatch.setattr(kernels, "transformer_engine_version", lambda: None)
    with pytest.raises(TrainerError, match=rf"{section}.{key} = \S+ requires a GPU and Transformer Engine"):
        kernels.choose(config)


@pytest.mark.parametrize(
    ("training", "cross_entropy", "is_fused"),
    [
        ({"precision": "bf16"}, "native", True),
        ({"precision": "fp16"}, "native", False),
        ({"precision": "fp32"}, "native", False),
        ({"precision": "fp32"}, "te", True),
        ({"precision": "bf16", "deterministic_mode": True}, "te", False),
    ],
)
@pytest.mark.filterwarnings("ignore")  # Megatron-Core warns about its own defaults
def test_a_cross_entropy_that_rounds_to_bf16_is_only_used_in_bf16(
    training: dict[str, Any], cross_entropy: Literal["te", "native"], is_fused: bool, tmp_path: Path
) -> None:
    chosen = kernels.Kernels(None, "torch", cross_entropy, None, on_gpu=True)
    core = transformer_config(on_a_gpu(tmp_path, "training", training), chosen)
    assert core.cross_entropy_loss_fusion == is_fused


ANY = {"seed": 1}
MASKED = {"eod_mask_loss": True, "eod_id": 1}


@pytest.mark.parametrize(
    ("version", "section", "values", "chosen"),
    [
        ("2.7.0", "training", ANY, "te"),
        ("2.7.0", "data", MASKED, "native"),
        ("2.10.0", "data", {"sft": True}, "native"),
        ("2.10.0", "training", {"z_loss_coeff": 1e-4}, "native"),
        ("2.10.0+abc", "model", {"mtp_num_layers": 1, "position_embedding_type": "rope"}, "native"),
        ("of unknown version", "data", MASKED, "native"),
        ("2.11.0", "data", MASKED, "te"),
        ("2.16.1", "training", {"z_loss_coeff": 1e-4}, "te"),
        ("2.16.1", "training", {"precision": "fp16"}, "native"),
        ("2.16.1", "training", {"deterministic_mode": True}, "native"),
    ],
)
def test_a_cross_entropy_that_mixes_up_the_gradients_of_tokens_is_not_used(
    version: str,
    section: str,
    values: dict[str, Any],
    chosen: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels.language_module, "te_parallel_cross_entropy", object())
    config = on_a_gpu(tmp_path, section, values)
    assert kernels.choose_cross_entropy(config, version) == chosen
    if chosen == "native" and config.training.precision == "bf16" and not config.training.deterministic_mode:
        asked = on_a_gpu(tmp_path, section, values, cross_entropy_fusion_impl="te")
        with pytest.raises(
            TrainerError, match=f"in Transformer Engine {re.escape(version)}, its gradients are"
        ):
            kernels.choose_cross_entropy(asked, version)


def test_a_transformer_engine_without_a_cross_entropy_leaves_it_to_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in NVIDIA's PyTorch image 25.03."""
    monkeypatch.setattr(kernels.language_module, "te_parallel_cross_entropy", None)
    assert kernels.choose_cross_entropy(on_a_gpu(tmp_path, "training", ANY), "2.1.0") == "native"


@pytest.mark.parametrize(
    ("device", "chunks", "is_freed"),
    [("cuda", None, True), ("cuda", 2, True), ("cpu", None, True), ("cpu", 2, False)],
)
@pytest.mark.filterwarnings("ignore")  # Megatron-Core warns about its own defaults
def test_outputs_of_stages_are_freed_once_nothing_reads_them(
    device: str, chunks: int | None, is_freed: bool, tmp_path: Path
) -> None:
    """NCCL keeps memory that it still sends from being used again, and gloo does not."""
    layout = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": chunks}
    config = dataclasses.replace(on_a_gpu(tmp_path, "parallelism", layout), device=device)
    chosen = kernels.Kernels(None, "torch", "native", None, on_gpu=device == "cuda")
    assert transformer_config(config, chosen).deallocate_pipeline_outputs == is_freed


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.usefixtures("process_groups")
def test_only_the_fused_cross_entropy_of_core_rounds_to_bf16(dtype: torch.dtype) -> None:
    logits, labels = torch.randn(8, 2, 64, dtype=dtype), torch.randint(64, (8, 2))

    def gradient(compute: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
        leaf = logits.clone().requires_grad_()
        compute(leaf.clone(), labels, *arguments).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    fused = gradient(fused_vocab_parallel_cross_entropy, parallel_state.get_tensor_model_parallel_group())
    exact = gradient(vocab_parallel_cross_entropy)
    assert torch.equal(fused, fused.bfloat16().to(dtype))
    assert not torch.equal(exact, exact.bfloat16().to(dtype))
    torch.testing.assert_close(fused, exact, rtol=2**-8, atol=0)
