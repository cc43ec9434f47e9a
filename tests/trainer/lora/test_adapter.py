"""An adapter computes what its merged weight would compute, and training changes nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from tests.trainer.inference.models import ONE, checkpoint
from tests.trainer.runs import MOE, TWO_LAYERS
from trainer.contract.config import LoraConfig
from trainer.contract.config.resolve import resolve
from trainer.inference.checkpoint import inference_config
from trainer.inference.loading import TORCH
from trainer.inference.model import Model
from trainer.inference.start import open_groups
from trainer.lora.adapter import Adapter
from trainer.lora.parts import join
from trainer.model import build
from trainer.model.core_config import transformer_config

pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore"),  # Megatron-Core warns about its own defaults
]


def adapted(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The linear layers with an adapter."""
    return (each for each in module.modules() if isinstance(getattr(each, "adapter", None), Adapter))


def test_an_adapter_computes_what_the_merged_weight_computes() -> None:
    """Also for queries, keys and values of grouped queries, for gate and up, and for experts."""
    model = MOE | TWO_LAYERS | {"padded_vocab_size": 128, "vocab_size": 100}
    config = inference_config(checkpoint(model), device="cpu", precision=None)
    config = resolve(dataclasses.replace(config, lora=LoraConfig(rank=3, alpha=12.0)))
    groups = open_groups(config, ONE)
    [chunk] = build.build_chunks(config, transformer_config(config, TORCH), groups, TORCH)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in chunk.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    loaded = Model(config, chunk, groups)
    tokens = list(range(1, 20))
    before = loaded.logits(tokens)
    layers = list(adapted(chunk))
    # queries and outputs in both layers, two of the dense layer, of the shared expert and of each of four experts
    assert len(layers) == 4 + 2 + 2 + 4 * 2
    with torch.no_grad():
        for layer in layers:
            kind = layer.adapter._kind
            parts = {name: part.lora_B @ part.lora_A for name, part in layer.adapter.named_children()}
            layer.weight += 12.0 / 3 * join(kind, parts, config.model)
            for part in layer.adapter.children():
                part.lora_B.zero_()
    torch.testing.assert_close(loaded.logits(tokens), before, rtol=0, atol=2e-5)
