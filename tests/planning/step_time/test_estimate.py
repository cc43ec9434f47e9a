"""The predicted step: the work that it counts, and how its parts follow from layouts and settings."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hpcgen.config.node_types import load_node_type
from hpcgen.planning.setup import Setup
from hpcgen.planning.step_time import Machine, StepTime, estimate_step_time
from hpcgen.planning.step_time import estimate as estimate_module
from hpcgen.planning.step_time.kernels import Attention, Kernels, Product
from tests.planning.test_memory import GPT, MIXTRAL_3_LAYERS
from tests.planning.test_model_size import llama3_8b
from trainer.contract.attention.visibility import visible_pairs
from trainer.contract.config import ModelConfig, ParallelismConfig, TrainingConfig
from trainer.contract.config.resolve import resolve_model
from trainer.contract.model.flops import flops
from trainer.contract.model.layout import Layout
from trainer.contract.optimizers.adamw import ADAMW

AXES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
}
H200 = dataclasses.replace(Machine.of(load_node_type("h200-sxm"), nvlink_devices=8), measurements=None)
LLAMA = llama3_8b(8, 8192)
LATENT = resolve_model(
    ModelConfig(
        num_layers=4,
        hidden_size=2048,
        num_attention_heads=16,
        seq_length=4096,
        position_embedding_type="rope",
        normalization="RMSNorm",
        swiglu=True,
        add_bias_linear=False,
        multi_latent_attention=True,
        q_lora_rank=1536,
        qk_layernorm=True,
        num_moe_experts=64,
        moe_ffn_hidden_size=1408,
        moe_router_topk=6,
        moe_shared_expert_intermediate_size=2816,
        moe_layer_freq=(0, 1, 1, 1),
        ffn_hidden_size=10944,
        mtp_num_layers=1,
        vocab_size=102400,
        untie_embeddings_and_output_weights=True,
    )
)


def setup(
    model: ModelConfig, *, ranks: int = 1, micro: int = 1, num_microbatches: int = 8, **keys: Any
) -> Setup:
    """A run; `keys` are axes, and keys of the sections parallelism and training."""
    axes = {AXES.get(name, name): value for name, value in keys.items() if not hasattr(TrainingConfig, name)}
    training = {name: value for name, value in keys.items() if hasattr(TrainingConfig, name)}
    axes = {
        "sequence_parallel": "tp" in keys,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    } | axes
    parallelism = ParallelismConfig(**axes)
    replicas = ranks // (keys.get("tp", 1) * keys.get("pp", 1) * keys.get("cp", 1))
    batch = micro * num_microbatches * replicas
    config = TrainingConfig(micro_batch_size=micro, global_batch_size=batch, train_iters=1, **training)
    layout = Layout.make(model, parallelism, config, ranks)
    assert layout is not None
    return Setup(model, parallelism, config, layout, ADAMW)


def step(model: ModelConfig, **keys: Any) -> StepTime:
    return estimate_step_time(setup(model, **keys), H200)


class FlopCounter(Kernels):
    """Kernels that take a second for each floating-point operation of a product, and no time for anything else."""

    def product(self, product: Product) -> float:
        return 2.0 * product.m * product.n * product.k * product.groups

    def attention(self, attention: Attention) -> float:
        pairs = attention.batch * attention.heads * attention.seq**2 / 2
        passes = {"forward": 1, "backward": 2}[
            attention.direction
        ]  # without the scores that are computed again
        return 2.0 * passes * pairs * (attention.qk_dim + attention.v_dim)

    def memory(self, *_: object) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("model", "keys"),
    [
        (GPT, {}),
        (LLAMA, {"micro": 2}),
        (dataclasses.replace(LLAMA, window_size=1024), {}),
        (LLAMA, {"ranks": 4, "tp": 4}),
        (LLAMA, {"ranks": 4, "cp": 4}),
        (LLAMA, {"ranks": 4, "cp": 4, "cp_comm_type": "a2a"}),
        (LLAMA, {"ranks": 4, "cp": 4, "cp_comm_type": "all_gather"}),
        (
            LLAMA,
            {"ranks": 8, "cp": 8, "cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": (2, 4)},
        ),
        (MIXTRAL_3_LAYERS, {"ranks": 4, "ep": 4}),
        (MIXTRAL_3_LAYERS, {"ranks": 4, "ep": 2, "tp": 2}),
        (MIXTRAL_3_LAYERS, {"ranks": 4, "tp": 4, "moe_token_dispatcher_type": "allgather"}),
        (LATENT, {"ranks": 4, "tp": 2, "ep": 4, "expert_tensor_parallel_size": 1}),
    ],
    ids=[
        *("GPT", "Llama", "window", "TP", "CP ring", "CP heads", "CP gathered", "CP in two levels"),
        *("EP", "ETP", "allgather", "latent attention with shared experts and MTP"),
    ],
)
def test_all_products_of_the_model_are_counted(
    model: ModelConfig, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The products of all ranks are those of Megatron-LM's formula, which leaves out the router."""
    monkeypatch.setattr(estimate_module, "kernels_of", FlopCounter)
    found = setup(model, **keys)
    tokens = found.training.global_batch_size * model.seq_length
    pairs = found.training.global_batch_size * visible_pairs(model, [model.seq_length])
    expected = flops(model, tokens, pairs)
    counted = estimate_step_time(found, H200).compute * found.layout.world_size
    assert counted == pytest.approx(expected, rel=1e-6)
