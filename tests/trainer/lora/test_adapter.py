"""An adapter computes what its merged weight would compute, and training changes nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from tests.trainer.inference.models import checkpoint
from tests.trainer.runs import MOE, TWO_LAYERS
from tests.trainer.single_rank import resolved
from trainer.contract.config import LoraConfig
from trainer.contract.config.resolve import resolve
from trainer.contract.model.batch_size import Batches
from trainer.data.loader import data_iterators
from trainer.inference.checkpoint import inference_config
from trainer.inference.model import Model
from trainer.lora.adapter import Adapter, is_adapter
from trainer.lora.parts import join
from trainer.metrics.console import Log
from trainer.model import build
from trainer.model.core_config import transformer_config
from trainer.model.kernels import TORCH
from trainer.step import Vote, train_step
from trainer.train import build_state
from trainer.trials.samples import RandomSamples

pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore"),  # Megatron-Core warns about its own defaults
]


def adapted(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The linear layers with an adapter."""
    return (each for each in module.modules() if isinstance(getattr(each, "adapter", None), Adapter))


def test_an_adapter_computes_what_the_merged_weight_computes(process_groups: Any) -> None:
    """Also for queries, keys and values of grouped queries, for gate and up, and for experts."""
    model = MOE | TWO_LAYERS | {"padded_vocab_size": 128, "vocab_size": 100}
    config = inference_config(checkpoint(model), device="cpu", precision=None)
    config = resolve(dataclasses.replace(config, lora=LoraConfig(rank=3, alpha=12.0)))
    [chunk] = build.build_chunks(config, transformer_config(config, TORCH), process_groups, TORCH)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in chunk.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    loaded = Model(config, chunk, process_groups)
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


def test_training_changes_only_adapters(
    process_groups: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The biases that balance experts stay too, although they are not parameters."""
    # Core keeps the scale of the process's last step, in whose shape other tests may differ.
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", None)
    config = resolved(
        tmp_path, MOE | TWO_LAYERS, recompute_granularity="selective", recompute_modules=("moe",)
    )
    lora = LoraConfig(rank=2, dropout=0.1, target_modules=("*.mlp.*",))
    config = resolve(dataclasses.replace(config, lora=lora))
    state = build_state(config, process_groups, Log(is_rank_0=False, progress=False))
    module = state.model[0].module
    before = {name: value.clone() for name, value in module.state_dict().items() if torch.is_tensor(value)}
    plan = Batches(dataclasses.replace(config.training, train_iters=2))
    batches = data_iterators(state.model, RandomSamples(config, 900), config, process_groups, plan)
    for _ in range(2):
        train_step(state, batches, config, process_groups, Vote)
    changed = {
        name
        for name, value in module.state_dict().items()
        if name in before and not torch.equal(value, before[name]) and "local_tokens_per_expert" not in name
    }
    assert changed == {name for name in before if is_adapter(name)}
    trained = {id(parameter) for group in state.optimizer.param_groups for parameter in group["params"]}
    assert len(trained) == len(changed)
