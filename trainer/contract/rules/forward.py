"""Rules for computing a trained model in a layout of its own, without gradients: evaluation and generation."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.contract.model.experts import expert_tensor_parallel_size
from trainer.contract.problem import Problem
from trainer.contract.rules import experts, parallelism
from trainer.contract.rules.facts import Facts, Rule, indivisible
from trainer.contract.rules.parallelism import PP, TP


def tensor_parallel_divides_query_groups(facts: Facts) -> Iterator[Problem]:
    """num_query_groups % TP == 0, because each rank caches its own keys and values (trainer/inference/attention.py)."""
    size, groups = facts.parallelism.tensor_model_parallel_size, facts.resolved_model.num_query_groups
    assert groups is not None
    if groups % size:
        yield indivisible(TP, size, "model.num_query_groups", groups)


def stages_have_layers(facts: Facts) -> Iterator[Problem]:
    """PP <= num_layers. The stages may have different numbers of layers (trainer/inference/checkpoint.py)."""
    layers, stages = facts.model.num_layers, facts.parallelism.pipeline_model_parallel_size
    if stages > layers:
        yield Problem(
            path=PP,
            reason=f"is more than model.num_layers = {layers}",
            candidates=[layers],
            about=("model.num_layers",),
        )


def experts_with_biases_are_whole(facts: Facts) -> Iterator[Problem]:
    """TP = 1 for experts with biases, since the ranks of a replica share each expert.

    Source: megatron/core/transformer/transformer_config.py, __post_init__.
    """
    size = expert_tensor_parallel_size(facts.parallelism)
    if facts.model.num_moe_experts is not None and facts.model.add_bias_linear and size > 1:
        yield Problem(
            path=TP,
            reason="divides the experts, which is not supported with model.add_bias_linear = true",
            candidates=[1],
            hint="divide the model with pipeline stages",
            about=("model.add_bias_linear",),
        )


RULES: tuple[Rule, ...] = (
    parallelism.tensor_parallel_divides_heads,
    tensor_parallel_divides_query_groups,
    parallelism.tensor_parallel_divides_mlp,
    parallelism.tensor_parallel_divides_vocabulary,
    experts.expert_tensor_parallel_divides_experts,
    experts.tensor_parallel_divides_shared_experts,
    stages_have_layers,
    experts_with_biases_are_whole,
)
