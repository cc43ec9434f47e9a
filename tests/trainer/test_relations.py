"""Different models that must compute the same: keys without an effect, experts in another order, a layer of zeros.

No reference is needed, so every combination of features can be compared. Losses and gradients are those of a training
step on one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.utils import unwrap_model

from tests.trainer.runs import DEEPSEEK_V3, LLAMA
from tests.trainer.single_rank import ON_CPU, resolved
from trainer.model.build import build_model
from trainer.model.experts import LOSSES

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Megatron-Core warns about its own defaults
    pytest.mark.usefixtures("mtp_losses"),
]

LENGTH = 32
SMALL = {"num_layers": 2, "hidden_size": 32, "seq_length": LENGTH}
DENSE = LLAMA | SMALL
LATENT = DEEPSEEK_V3 | SMALL | {"moe_layer_freq": [0, 1], "mtp_num_layers": 1, "rope_scaling": None}
EXPERTS = DENSE | {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 24,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.3,
    "moe_z_loss_coeff": 0.1,
}
BIASED = EXPERTS | {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
MODELS = {
    "dense": DENSE,
    "latent": LATENT,
    "experts": EXPERTS,
    "biased": BIASED,
    "all experts": EXPERTS | {"moe_router_topk": 4},
}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "original_max_position_embeddings": LENGTH}
NO_DROPS = {"moe_expert_capacity_factor": 2.0}
"""The capacity of an expert is the number of tokens."""


def scaled(by: dict[str, Any]) -> dict[str, Any]:
    return {"rope_scaling": {"factor": 1.0} | by}


@pytest.mark.parametrize(
    ("model", "without_effect"),
    [
        *((model, {"window_size": size}) for model in ("dense", "latent") for size in (LENGTH, 1000)),
        *((model, scaled({"rope_type": "linear"})) for model in ("dense", "latent")),
        *((model, scaled(YARN)) for model in ("dense", "latent")),
        ("dense", scaled(LLAMA3 | {"original_max_position_embeddings": LENGTH // 2})),
        *((model, NO_DROPS) for model in ("experts", "biased", "latent")),
        *((model, NO_DROPS | {"moe_pad_expert_input_to_capacity": True}) for model in ("experts", "biased")),
        ("experts", NO_DROPS | {"moe_token_drop_policy": "position"}),
        ("experts", {"moe_router_num_groups": 1, "moe_router_group_topk": 1}),
        ("biased", {"moe_router_num_groups": 2, "moe_router_group_topk": 2}),
        *((model, {"moe_router_topk_scaling_factor": 1.0}) for model in ("experts", "biased")),
        # The softmax of all scores and that of the chosen ones are the same.
        ("all experts", {"moe_router_pre_softmax": True}),
    ],
    ids=str,
)
def test_a_value_without_effect(
    model: str,
    without_effect: dict[str, Any],
    process_groups: ProcessGroupCollection,
    tmp_path: Path,
) -> None:
    expected = step(build(MODELS[model], process_groups, tmp_path))
    assert_same(step(build(MODELS[model] | without_effect, process_groups, tmp_path)), expected)


@pytest.mark.parametrize("model", ["experts", "biased", "latent"])
def test_the_order_of_experts_has_no_effect(
    model: str, process_groups: ProcessGroupCollection, tmp_path: Path
) -> None:
    """The biases of experts are their own too, and so are their loads."""
    chunk = build(MODELS[model], process_groups, tmp_path)
    layers = [module for module in chunk.modules() if isinstance(module, MoELayer)]
    for layer in layers:
        if layer.router.expert_bias is not None:
            layer.router.expert_bias.copy_(torch.tensor([0.3, -0.2, 0.0, 0.1]))
    before = step(chunk)
    expected = [layer.router.statistics.clone() for layer in layers]
    order = [2, 0, 3, 1]
    for layer in layers:
        reorder(layer, order)
        layer.router.statistics.zero_()
    after = step(chunk)
    unordered = ("loss", "embedding.word_embeddings.weight", "output_layer.weight")
    assert_same({name: after[name] for name in unordered}, {name: before[name] for name in unordered})
    for layer, statistics in zip(layers, expected, strict=True):
        loads, losses = layer.router.statistics.split([4, LOSSES])
        assert loads.tolist() == statistics[order].tolist()
        torch.testing.assert_close(losses, statistics[4:])


@pytest.mark.parametrize("model", ["dense", "experts"])
def test_a_layer_that_adds_zeros_has_no_effect(
    model: str, process_groups: ProcessGroupCollection, tmp_path: Path
) -> None:
    without_losses = MODELS[model] | {"moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None}
    shorter = build(without_losses, process_groups, tmp_path)
    longer = build(without_losses | {"num_layers": 3}, process_groups, tmp_path)
    weights = dict(shorter.named_parameters())
    with torch.no_grad():
        for name, weight in longer.named_parameters():
            if name in weights:
                weight.copy_(weights[name])
            elif "linear_proj" in name or "linear_fc2" in name:
                weight.zero_()
    expected = step(shorter)
    found = step(longer)
    assert_same({name: found[name] for name in expected}, expected)


def build(model: dict[str, Any], groups: ProcessGroupCollection, tmp_path: Path) -> torch.nn.Module:
    [wrapped] = build_model(resolved(tmp_path, model), groups, ON_CPU)
    chunk: torch.nn.Module = unwrap_model(wrapped).train()
    return chunk


def step(chunk: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The loss of two samples, and the gradient of each parameter by name."""
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1.0))
    tokens = torch.randint(1000, (2, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    mask = {"loss_mask": torch.ones(2, LENGTH)} if chunk.config.mtp_num_layers else {}
    loss = chunk(tokens[:, :-1], torch.arange(LENGTH)[None], None, labels=tokens[:, 1:], **mask).sum()
    named = dict(chunk.named_parameters())
    return {"loss": loss.detach()} | dict(
        zip(named, torch.autograd.grad(loss, list(named.values())), strict=True)
    )


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


@torch.no_grad()
def reorder(layer: MoELayer, order: list[int]) -> None:
    """Put the expert that was number `order[i]` in place i."""
    router, experts = layer.router, layer.experts.local_experts
    router.weight.copy_(router.weight[order].clone())
    if router.expert_bias is not None:
        router.expert_bias.copy_(router.expert_bias[order].clone())
    states = [{name: value.clone() for name, value in expert.named_parameters()} for expert in experts]
    for expert, number in zip(experts, order, strict=True):
        for name, parameter in expert.named_parameters():
            parameter.copy_(states[number][name])
