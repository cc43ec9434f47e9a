"""The activations that the memory estimate counts, against those that the real layers save for the backward pass."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import random
from torch.autograd.graph import saved_tensors_hooks

from hpcgen.planning.memory import estimate_memory
from hpcgen.planning.memory.attention import attention_part
from hpcgen.planning.memory.output import loss_bytes, mtp_bytes
from hpcgen.planning.memory.stages import Layer
from hpcgen.planning.setup import Setup
from tests.trainer.runs import GPT
from tests.trainer.single_rank import ON_CPU, resolved
from trainer.contract.config import (
    LoraConfig,
    ModelConfig,
    ParallelismConfig,
    TrainerConfig,
    TrainingConfig,
)
from trainer.contract.config.resolve import resolve, resolve_model
from trainer.contract.model.layout import Layout
from trainer.contract.optimizers.adamw import ADAMW
from trainer.model import build, packing
from trainer.model.kernels import Kernels

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Megatron-Core warns about its own defaults
    pytest.mark.usefixtures("mtp_losses"),
]

DENSE = GPT | {
    "hidden_size": 256,
    "num_attention_heads": 8,
    "ffn_hidden_size": 704,
    "seq_length": 256,
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
"""Without RMSNorm, of which torch's kernel for CPUs saves intermediate results."""

WITH_NORMS = DENSE | {"kv_channels": 48, "qk_layernorm": True}
ROPE = {"position_embedding_type": "rope"}
GROUPED = {"num_query_groups": 2}
MOE = DENSE | {"num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 320}
SHARED = MOE | {"moe_shared_expert_intermediate_size": 192, "moe_router_topk": 3}
MLA = DENSE | {
    "position_embedding_type": "rope",
    "multi_latent_attention": True,
    "q_lora_rank": 192,
    "kv_lora_rank": 128,
    "qk_head_dim": 32,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 40,
}
NORMALIZED = MLA | {"qk_layernorm": True}
MLA_WITH_EXPERTS = MLA | {key: value for key, value in SHARED.items() if "moe" in key}


@pytest.fixture(autouse=True)
def fused_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use Core's fused SwiGLU, as on GPUs, and answer for Transformer Engine that FP8 is off."""
    in_core = build.transformer_config

    def with_fusion(config: TrainerConfig, kernels: Kernels) -> Any:
        core = in_core(config, kernels)
        core.bias_activation_fusion = config.model.swiglu
        return core

    monkeypatch.setattr(build, "transformer_config", with_fusion)
    off = SimpleNamespace(is_fp8_enabled=lambda: False)
    monkeypatch.setattr(random, "FP8GlobalStateManager", off, raising=False)
    no_context = lambda **_: contextlib.nullcontext()  # noqa: E731
    monkeypatch.setattr(random, "activation_recompute_forward", no_context, raising=False)


def batch_of_two(directory: Path, model: dict[str, Any], **training: Any) -> TrainerConfig:
    return resolved(directory, model, global_batch_size=2, micro_batch_size=2, **training)


def saved_bytes(compute: Callable[[], torch.Tensor], without: set[int]) -> int:
    """Bytes of the storages that the graph of `compute` keeps, except those in `without`."""
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in without:
            saved[storage._cdata] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = compute()
    assert result.requires_grad
    return sum(
        storage.nbytes() for storage in saved.values()
    )  # now, since some are discarded after they are saved


def saved_by_model(config: TrainerConfig, process_groups: Any) -> int:
    [chunk] = build.build_model(config, process_groups, ON_CPU)
    tokens = torch.arange(config.model.seq_length).expand(config.training.micro_batch_size, -1) % 900
    arguments = {"loss_mask": torch.ones(tokens.shape)} if config.model.mtp_num_layers else {}
    known = {tensor.untyped_storage()._cdata for tensor in (tokens, *chunk.parameters())}
    return saved_bytes(lambda: chunk(tokens, tokens, None, labels=tokens, **arguments).sum(), known)


def setup_of(config: TrainerConfig) -> Setup:
    layout = Layout.make(config.model, config.parallelism, config.training, 1)
    assert layout is not None
    return Setup(config.model, config.parallelism, config.training, layout, ADAMW, lora=config.lora)


def estimated(config: TrainerConfig) -> int:
    return estimate_memory(setup_of(config)).activation_bytes


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": modules}


UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
TORCH = {"transformer_impl": "torch"}
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("model", "training"),
    [
        pytest.param(DENSE, {}, id="dense"),
        pytest.param(WITH_NORMS, {}, id="dense-norms", marks=SLOW),
        pytest.param(DENSE | ROPE, {}, id="dense-rope", marks=SLOW),
        pytest.param(DENSE | GROUPED, {}, id="grouped", marks=SLOW),
        pytest.param(DENSE | GROUPED | ROPE, TORCH, id="grouped-rope"),
        pytest.param(WITH_NORMS | GROUPED | ROPE, {}, id="grouped-rope-norms"),
        pytest.param(MOE, {}, id="experts", marks=SLOW),
        pytest.param(SHARED, {}, id="shared"),
        pytest.param(SHARED | {"swiglu": False}, {}, id="shared-gelu"),
        pytest.param(MLA, {}, id="latent", marks=SLOW),
        pytest.param(NORMALIZED, {}, id="latent-norms"),
        pytest.param(MLA_WITH_EXPERTS, {}, id="latent-experts"),
        pytest.param(DENSE, UNIFORM, id="dense-full"),
        pytest.param(MLA_WITH_EXPERTS, UNIFORM, id="latent-experts-full", marks=SLOW),
        pytest.param(DENSE, selective("core_attn"), id="dense-attention"),
        pytest.param(DENSE | ROPE, selective("core_attn"), id="rope-attention", marks=SLOW),
        pytest.param(
            WITH_NORMS | GROUPED | ROPE, selective("core_attn"), id="grouped-rope-norms-attention", marks=SLOW
        ),
        pytest.param(DENSE, TORCH | selective("mlp"), id="dense-mlp", marks=SLOW),
        pytest.param(SHARED, selective("moe"), id="shared-moe", marks=SLOW),
        pytest.param(MLA, selective("mla_up_proj"), id="latent-up-proj", marks=SLOW),
        pytest.param(MLA_WITH_EXPERTS, selective("layernorm"), id="latent-experts-layernorm", marks=SLOW),
        pytest.param(
            MLA_WITH_EXPERTS, selective("moe", "layernorm", "mla_up_proj", "core_attn"), id="every-module"
        ),
    ],
)
def test_a_layer_saves_what_the_estimate_counts(
    model: dict[str, Any], training: dict[str, Any], process_groups: Any, tmp_path: Path
) -> None:
    few, more = (batch_of_two(tmp_path, model | {"num_layers": layers}, **training) for layers in (1, 3))
    measured = saved_by_model(more, process_groups) - saved_by_model(few, process_groups)
    assert estimated(more) - estimated(few) == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize(
    ("model", "lora"),
    [
        pytest.param(DENSE | GROUPED, LoraConfig(rank=16), id="grouped"),
        pytest.param(SHARED, LoraConfig(rank=16, dropout=0.1), id="shared-dropout"),
        pytest.param(DENSE, LoraConfig(rank=16, target_modules=("linear_fc1",)), id="frozen-others"),
        pytest.param(MOE, LoraConfig(rank=16, target_modules=("linear_qkv",)), id="frozen-experts"),
        pytest.param(SHARED, LoraConfig(rank=16, target_modules=("linear_qkv",)), id="frozen-shared"),
    ],
)
def test_a_layer_with_adapters_saves_what_the_estimate_counts(
    model: dict[str, Any], lora: LoraConfig, process_groups: Any, tmp_path: Path
) -> None:
    few, more = (
        resolve(dataclasses.replace(batch_of_two(tmp_path, model | {"num_layers": layers}), lora=lora))
        for layers in (1, 3)
    )
    measured = saved_by_model(more, process_groups) - saved_by_model(few, process_groups)
    assert estimated(more) - estimated(few) == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize(
    ("model", "training"),
    [
        pytest.param(MLA, {}, id="latent", marks=SLOW),
        pytest.param(MLA_WITH_EXPERTS, {}, id="latent-experts"),
        pytest.param(
            MLA_WITH_EXPERTS, selective("moe", "mla_up_proj"), id="latent-experts-selective", marks=SLOW
        ),
        pytest.param(MLA, UNIFORM, id="latent-full"),
    ],
)
def test_an_mtp_layer_saves_what_the_estimate_counts(
    model: dict[str, Any], training: dict[str, Any], process_groups: Any, tmp_path: Path
) -> None:
    plain, mtp = (
        batch_of_two(tmp_path, model | {"mtp_num_layers": count}, **training) for count in (None, 1)
    )
    measured = saved_by_model(mtp, process_groups) - saved_by_model(plain, process_groups)
    setup = setup_of(mtp)
    layer = Layer.of(setup, has_experts=mtp.model.num_moe_experts is not None)
    counted = setup.tokens * mtp_bytes(setup, layer.kept) + loss_bytes(setup) - loss_bytes(setup_of(plain))
    assert counted == pytest.approx(measured, rel=0.03)


def test_packed_attention_keeps_its_output_twice_with_several_samples() -> None:
    """As flash attention on a GPU, that of the CPU saves queries, keys, values and the output."""
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    weight = torch.rand(96, 96, requires_grad=True)

    def attend(*packed: Any) -> torch.Tensor:
        query, key, value = (x.transpose(0, 1)[None] for x in packed[:3])
        context = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        return context[0].transpose(0, 1).flatten(1)

    def saved(samples: int) -> int:
        shape = (64, samples, 4, 24)
        x = torch.rand(shape, requires_grad=True)
        boundaries = torch.arange(0, 64 * samples + 1, 16)
        return saved_bytes(
            lambda: (
                packing.attend_packed(
                    *(each.contiguous() * 2 for each in (x, x, x)), boundaries, group, attend
                )
                @ weight
            ),
            {weight.untyped_storage()._cdata},
        )

    model = resolve_model(
        ModelConfig(num_layers=1, hidden_size=96, num_attention_heads=4, seq_length=64, vocab_size=9)
    )
    training = TrainingConfig(micro_batch_size=2, global_batch_size=2, train_iters=1)
    layout = Layout.make(model, ParallelismConfig(), training, 1)
    assert layout is not None
    setups = [
        Setup(model, ParallelismConfig(), training, layout, ADAMW, documents) for documents in (False, True)
    ]
    plain, documents = (attention_part(setup).kept * setup.tokens for setup in setups)
    assert saved(2) - 2 * saved(1) == 2 * (documents - plain)
