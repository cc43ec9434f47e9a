"""The rules of experts on random runs, compared with Megatron-Core itself: its configuration, groups and routing."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

from hpcgen.planning.repairs import check
from tests.planning.cases import valid_facts
from tests.trainer.core_groups import core_groups
from trainer.contract.model.experts import MODEL_KEYS, expert_tensor_parallel_size
from trainer.contract.rules.facts import Facts

pytestmark = pytest.mark.filterwarnings("ignore")  # Megatron-Core warns about its own defaults

RANKS, TOKENS = 16, 64
TINY = {
    "model__num_layers": 2,
    "model__hidden_size": 64,
    "model__num_attention_heads": 4,
    "model__seq_length": TOKENS,
    "model__add_bias_linear": False,
    "model__num_moe_experts": 8,
    "model__moe_aux_loss_coeff": 0.01,
    "parallelism__moe_grouped_gemm": False,
    "training__micro_batch_size": 1,
}
CHOICES: dict[str, list[Any]] = {
    "model__num_moe_experts": [4, 6, 8, 16],
    "model__moe_layer_freq": [None, None, None, (1, 0), (0, 1), (1,), (1, 0, 1)],
    "model__moe_ffn_hidden_size": [None, 64, 66],
    "model__moe_shared_expert_intermediate_size": [None, None, 64],
    "model__moe_router_topk": [1, 2, 2, 3, 5, 8],
    "model__moe_router_score_function": ["softmax", "sigmoid"],
    "model__moe_router_pre_softmax": [False, False, True],
    "model__moe_router_num_groups": [None, None, 2, 3, 4],
    "model__moe_router_group_topk": [None, None, 1, 2, 4],
    "model__moe_router_enable_expert_bias": [False, False, True],
    "model__moe_expert_capacity_factor": [None, None, 0.5, 1.0, 2.0, 4.0],
    "model__moe_pad_expert_input_to_capacity": [False, False, True],
    "model__moe_token_drop_policy": ["probs", "probs", "position"],
    "model__add_bias_linear": [False, False, True],
    "parallelism__tensor_model_parallel_size": [1, 2, 4],
    "parallelism__pipeline_model_parallel_size": [1, 2],
    "parallelism__expert_model_parallel_size": [1, 2, 3, 4, 8, 16],
    "parallelism__expert_tensor_parallel_size": [None, None, 1, 2, 4],
    "parallelism__num_distributed_optimizer_instances": [1, 1, 2],
}


def random_run(source: random.Random) -> Facts:
    """A run with most keys at their defaults, so that some runs break no rule."""
    changes = {key: source.choice(values) for key, values in CHOICES.items() if source.random() < 0.25}
    tensor = changes.get("parallelism__tensor_model_parallel_size", 1)
    changes["parallelism__sequence_parallel"] = (tensor > 1) == (source.random() < 0.95)
    return valid_facts(**{**TINY, **changes})


def build_in_core(facts: Facts) -> None:
    """Build Core's configuration and experts for `facts`, and route random tokens.

    Raises:
        Exception: Core refuses the run.
    """
    model, axes = facts.resolved_model, facts.parallelism
    tensor = axes.tensor_model_parallel_size
    shared = {
        name: getattr(model, name)
        for name in (
            *("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "add_bias_linear"),
            *("num_moe_experts", *(key for key in MODEL_KEYS if key != "moe_layer_freq")),
        )
    }
    config = TransformerConfig(
        **shared,
        moe_layer_freq=1 if model.moe_layer_freq is None else list(model.moe_layer_freq),
        moe_token_dispatcher_type="alltoall",
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=axes.pipeline_model_parallel_size,
        pipeline_dtype=torch.float32,
        expert_model_parallel_size=axes.expert_model_parallel_size,
        expert_tensor_parallel_size=expert_tensor_parallel_size(axes),
        sequence_parallel=axes.sequence_parallel,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    specs = get_gpt_decoder_layer_specs(config, use_transformer_engine=False)
    builders = [spec.submodules.mlp for spec in specs]
    # Core 0.19 has partial functions in place of specs
    modules = [getattr(builder, "func", None) or builder.module for builder in builders]
    assert MoELayer in modules, "no layer has experts"
    builder = builders[modules.index(MoELayer)]
    submodules = builder.keywords["submodules"] if hasattr(builder, "func") else builder.submodules
    layer = MoELayer(config, submodules, layer_number=1)
    if tensor > 1 and not axes.sequence_parallel:
        layer(torch.rand(TOKENS, 1, model.hidden_size))  # refused before the first collective
    route(config)


def route(config: TransformerConfig) -> None:
    """Route random tokens. Each must have its number of experts, and a gradient for its router."""
    logits = torch.rand(TOKENS, config.num_moe_experts, requires_grad=True)
    probs, chosen = moe_utils.topk_routing_with_score_function(
        logits,
        config.moe_router_topk,
        use_pre_softmax=config.moe_router_pre_softmax,
        num_groups=config.moe_router_num_groups,
        group_topk=config.moe_router_group_topk,
        score_function=config.moe_router_score_function,
    )
    assert (chosen.sum(1) == config.moe_router_topk).all()
    factor, pad = config.moe_expert_capacity_factor, config.moe_pad_expert_input_to_capacity
    if factor is None:
        return
    probs, chosen = moe_utils.apply_router_token_dropping(
        probs,
        chosen,
        router_topk=config.moe_router_topk,
        capacity_factor=factor,
        drop_policy=config.moe_token_drop_policy,
        pad_to_capacity=pad,
    )
    if pad:
        capacity = moe_utils.get_capacity(
            TOKENS * config.moe_router_topk, config.num_moe_experts, capacity_factor=factor
        )
        tokens = torch.rand(TOKENS, config.hidden_size)
        count = capacity * config.num_moe_experts
        moe_utils.permute(tokens, chosen, probs=probs, num_out_tokens=count, drop_and_pad=True)


def refusal(facts: Facts) -> str:
    """Core's message if it refuses the run; empty if it accepts it."""
    try:
        with core_groups(facts.parallelism, RANKS):
            build_in_core(facts)
    except Exception as error:  # Core raises many types
        return repr(error) or "no message"
    return ""


@pytest.mark.parametrize("number", [60, pytest.param(200, marks=pytest.mark.slow)])
def test_core_builds_what_the_rules_accept(number: int) -> None:
    """Core refuses many of these runs, so a missing rule would show."""
    source = random.Random(17)
    runs = [random_run(source) for _ in range(number)]
    refusals = [refusal(facts) for facts in runs]
    accepted = [not check(facts)[0] for facts in runs]
    assert [why for why, is_accepted in zip(refusals, accepted, strict=True) if why and is_accepted] == []
    assert sum(accepted) > number / 4
    assert sum(map(bool, refusals)) > number / 4
