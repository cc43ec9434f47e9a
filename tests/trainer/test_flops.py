"""FLOPs by formula against the matrix products that torch counts in the real model, and those that a run records."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.trainer.runs import DEEPSEEK, DEEPSEEK_V3, GPT, LLAMA, MOE, QWEN, finished, gpt_config
from tests.trainer.single_rank import ON_CPU, resolved
from trainer.contract.attention.visibility import visible_pairs
from trainer.contract.config import LoraConfig, ModelConfig, TrainerConfig
from trainer.contract.config.resolve import resolve
from trainer.contract.model.experts import num_moe_layers
from trainer.contract.model.flops import flops
from trainer.model import build

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Megatron-Core warns about its own defaults
    pytest.mark.usefixtures("mtp_losses"),
]

PADDED = MOE | {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
MLA = DEEPSEEK | {"q_lora_rank": None, "qk_layernorm": False, "mtp_num_layers": None}


def counted_flops(config: TrainerConfig, process_groups: Any) -> int:
    """FLOPs of the matrix products in forward and backward pass of one sample."""
    [chunk] = build.build_model(config, process_groups, ON_CPU)
    tokens = torch.arange(config.model.seq_length)[None] % 100
    arguments = {"loss_mask": torch.ones(tokens.shape)} if config.model.mtp_num_layers else {}
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        chunk(tokens, tokens, None, labels=tokens, **arguments).sum().backward()
    return counter.get_total_flops()


def router_flops(model: ModelConfig) -> int:
    """FLOPs of the routers in forward and backward pass of one sample."""
    moe_layers = num_moe_layers(model) + (model.mtp_num_layers or 0) * bool(model.num_moe_experts)
    return 6 * moe_layers * model.seq_length * model.hidden_size * (model.num_moe_experts or 0)


@pytest.mark.parametrize(
    "model",
    [GPT, LLAMA, QWEN, MOE, PADDED, DEEPSEEK, MLA, DEEPSEEK_V3],
    ids=["GPT", "GQA", "window", "experts", "capacity", "MLA+MTP", "MLA", "V3"],
)
def test_the_formula_counts_the_matrix_products_of_the_model(
    model: dict[str, Any], process_groups: Any, tmp_path: Path
) -> None:
    """torch counts all pairs of a query and a key, and routers, which the formula leaves out as Megatron-LM's does."""
    config = resolved(tmp_path, model)
    length = config.model.seq_length
    expected = flops(config.model, length, pairs=length * length) + router_flops(config.model)
    assert counted_flops(config, process_groups) == expected


@pytest.mark.parametrize(
    ("model", "freeze"),
    [
        (GPT, ("embedding.*", "decoder.layers.[01].*")),
        (LLAMA, ("*.linear_fc1.*", "decoder.layers.2.*", "output_layer.*")),
        (LLAMA, ("embedding.*", "decoder.*")),
        (MOE, ("*.experts.*", "*.shared_experts.*")),
        (DEEPSEEK_V3, ("*.linear_q_down_proj.*", "mtp.layers.1.*")),
    ],
    ids=["half", "fc1", "head", "experts", "V3"],
)
def test_the_formula_counts_what_frozen_weights_need(
    model: dict[str, Any], freeze: tuple[str, ...], process_groups: Any, tmp_path: Path
) -> None:
    config = resolved(tmp_path, model, freeze=freeze)
    length = config.model.seq_length
    expected = flops(config.model, length, length * length, freeze) + router_flops(config.model)
    assert counted_flops(config, process_groups) == expected


@pytest.mark.parametrize("targets", [None, ("linear_fc1", "decoder.layers.2.*")], ids=["all", "some"])
def test_the_formula_counts_what_adapters_need(
    targets: tuple[str, ...] | None, process_groups: Any, tmp_path: Path
) -> None:
    """The formula counts all gradients of the first layer, of which those before its first adapter are not needed."""
    config = resolved(tmp_path, LLAMA)
    config = resolve(dataclasses.replace(config, lora=LoraConfig(rank=4, target_modules=targets)))
    length, h = config.model.seq_length, config.model.hidden_size
    expected = flops(config.model, length, length * length, lora=config.lora)
    attention, fc1 = h * (128 + h) + 2 * 2 * h * length, 2 * 96
    # with each linear layer, the A of its parts
    first = h * (128 + 3 * 4) if targets is None else attention + h * (fc1 + 2 * 4)
    assert counted_flops(config, process_groups) == expected - 2 * length * first


def test_pairs_are_those_below_the_diagonal_of_each_document() -> None:
    """Each token sees itself; the formula counts half of that pair, as Megatron-LM does."""
    for window in (None, 1, 4, 16, 99):
        for lengths in ([64], [1, 16, 40, 7]):
            seen = sum(min(token + 1, window or 64) for length in lengths for token in range(length))
            full = [length for length in lengths if window is None or length <= window]
            on_the_edge = sum(full) / 2 + sum((window or 0) / 2 for length in lengths if length not in full)
            model = ModelConfig(**GPT, window_size=window)
            assert visible_pairs(model, lengths) == seen - on_the_edge


@pytest.mark.process
@pytest.mark.parametrize(
    ("model", "layout", "world_size"),
    [
        pytest.param(GPT, {}, 1, id="one", marks=pytest.mark.slow),
        pytest.param(
            QWEN, {"context_parallel_size": 2, "pipeline_model_parallel_size": 2}, 4, id="window-PP2xCP2"
        ),
        pytest.param(
            MLA,
            {"tensor_model_parallel_size": 2, "sequence_parallel": True},
            4,
            id="MLA-TP2xDP2",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_counts_the_attention_within_documents(
    model: dict[str, Any], layout: dict[str, Any], world_size: int, tmp_path: Path
) -> None:
    """All documents have 16 tokens, so each sample of 64 tokens has four complete ones."""
    builder = IndexedDatasetBuilder(f"{tmp_path}/corpus.bin", dtype=numpy.uint16)
    for first in range(100):
        document = [*range(first, first + 15), 999]
        builder.add_document(numpy.array(document), [len(document)])
    builder.finalize(f"{tmp_path}/corpus.idx")
    document = gpt_config(f"{tmp_path}/corpus", tmp_path / "run", model)
    document |= {"world_size": world_size, "parallelism": layout}
    document["data"] |= {"reset_attention_mask": True, "eod_id": 999}
    document["training"] |= {"train_iters": 2}
    shape = resolved(tmp_path, model).model
    expected = flops(shape, 64, visible_pairs(shape, [16] * 4))
    steps = [event for event in finished(document).events if event["event"] == "step"]
    for step in steps:
        found = step["model_tflops_per_device"] * 1e12 * world_size * step["step_time_s"] / step["batch_size"]
        assert found == pytest.approx(expected, rel=1e-9)
    assert len(steps) == 2
