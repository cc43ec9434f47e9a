"""Names and shapes of adapters, compared with the linear layers of Megatron-Core."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.runs import DEEPSEEK_V3, GPT, LLAMA, MOE
from tests.trainer.single_rank import resolved
from trainer.contract.config import LoraConfig
from trainer.contract.model.adapters import LINEARS, adapter_parameter_count, linears, targets
from trainer.lora.parts import join, split
from trainer.model import build
from trainer.model.core_config import transformer_config
from trainer.model.kernels import TORCH

pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore"),  # Megatron-Core warns about its own defaults
]


@pytest.mark.parametrize("model", [GPT, LLAMA, MOE, DEEPSEEK_V3], ids=["gpt", "llama", "moe", "deepseek"])
def test_shapes_are_those_of_cores_layers(model: dict[str, Any], process_groups: Any, tmp_path: Path) -> None:
    config = resolved(tmp_path, {**model, "mtp_num_layers": None})
    [chunk] = build.build_chunks(config, transformer_config(config, TORCH), process_groups, TORCH)
    found: dict[str, tuple[int, ...]] = {}
    for name, module in chunk.named_modules():
        if name.rpartition(".")[2] in LINEARS:
            found[re.sub(r"local_experts\.\d+\.", "", name)] = tuple(module.weight.shape)
    expected = {
        linear.name: (sum(part.outputs for part in linear.parts), linear.parts[0].inputs)
        for linear in linears(config.model)
    }
    assert expected == found


def test_patterns_choose_layers(tmp_path: Path) -> None:
    model = resolved(tmp_path, MOE).model
    chosen = targets(
        LoraConfig(rank=2, target_modules=("linear_fc1", "decoder.layers.0.*.linear_qkv")), model
    )
    assert [linear.name for linear in chosen if ".layers.2." not in linear.name] == [
        "decoder.layers.0.self_attention.linear_qkv",
        "decoder.layers.0.mlp.linear_fc1",
        "decoder.layers.1.mlp.experts.linear_fc1",
        "decoder.layers.1.mlp.shared_experts.linear_fc1",
        "decoder.layers.3.mlp.experts.linear_fc1",
        "decoder.layers.3.mlp.shared_experts.linear_fc1",
    ]
    only_experts = LoraConfig(rank=2, target_modules=("decoder.layers.1.mlp.experts.*",))
    # gate and up from 64 to 48, and down back, in 4 experts
    assert adapter_parameter_count(only_experts, model) == 4 * 3 * 2 * (64 + 48)


def test_parts_of_a_rank_are_in_the_order_of_its_fused_layer(tmp_path: Path) -> None:
    """The rows of linear_qkv on each of two ranks hold complete query groups."""
    model = resolved(tmp_path, LLAMA).model
    fused = torch.arange(128.0)[:, None].expand(128, 3)
    complete = split("linear_qkv", fused, model)
    assert {name: len(rows) for name, rows in complete.items()} == {"q": 64, "k": 32, "v": 32}
    assert complete["k"][:, 0].tolist() == [*range(32, 48), *range(96, 112)]
    for rank in (0, 1):
        own = {name: rows.chunk(2)[rank] for name, rows in complete.items()}
        assert torch.equal(join("linear_qkv", own, model), fused.chunk(2)[rank])
        outputs = {name: rows.t() for name, rows in own.items()}
        assert torch.equal(join("linear_qkv", outputs, model, dim=-1), fused.chunk(2)[rank].t())
