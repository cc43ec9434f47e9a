"""Rules for mixtures of experts: their layout, and how they are computed and balanced.

Keys of the section `model` that contradict each other are checked with those of dense models
(trainer/contract/model/experts.py). Unless stated otherwise, the sources are files of megatron/core.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainer.contract.model.experts import expert_tensor_parallel_size
from trainer.contract.rules.facts import Facts, Rule, Violation, divisors, unread
from trainer.contract.rules.parallelism import TP
from trainer.contract.wording import counted

EP = "parallelism.expert_model_parallel_size"
ETP = "parallelism.expert_tensor_parallel_size"
GROUPED_GEMM = "parallelism.moe_grouped_gemm"
COEFFICIENT = "model.moe_aux_loss_coeff"

LAYOUT_KEYS = (EP, ETP, "parallelism.moe_token_dispatcher_type", GROUPED_GEMM)


def layout_of_experts_needs_experts(facts: Facts) -> Iterator[Violation]:
    """EP > 1 needs num_moe_experts (transformer/transformer_config.py, __post_init__). The other keys would be
    ignored."""
    if facts.model.num_moe_experts is None:
        reason = "has no effect, because model.num_moe_experts is null"
        yield from unread(facts, LAYOUT_KEYS, reason)


def expert_parallel_divides_experts(facts: Facts) -> Iterator[Violation]:
    """num_moe_experts % EP == 0 (transformer/moe/moe_layer.py, BaseMoELayer)."""
    experts, size = facts.model.num_moe_experts, facts.parallelism.expert_model_parallel_size
    if experts is not None and experts % size:
        yield Violation(
            path=EP,
            reason=f"does not divide model.num_moe_experts = {experts} ({experts} / {size})",
            candidates=divisors(experts, near=size),
        )


def expert_layout_divides_world(facts: Facts) -> Iterator[Violation]:
    """world_size % (ETP x EP x PP) == 0 (parallel_state.py, initialize_model_parallel).

    The expert ranks of a pipeline stage are its TP x CP x DP ranks, divided differently.
    """
    experts, axes = facts.model.num_moe_experts, facts.parallelism
    if experts is None or facts.data_parallel_size is None:
        return
    stage = facts.world.size // axes.pipeline_model_parallel_size
    tensor, size = expert_tensor_parallel_size(axes), axes.expert_model_parallel_size
    if stage % (tensor * size) == 0:
        return
    if stage % tensor == 0:
        path, candidates = EP, [d for d in divisors(stage // tensor, near=size) if experts % d == 0]
    else:
        path = ETP
        candidates = [d for d in divisors(axes.tensor_model_parallel_size, near=tensor) if stage % d == 0]
    yield Violation(
        path=path,
        reason=f"results in ETP x EP = {tensor} x {size} = {tensor * size}, which does not divide the "
        f"{counted(stage, 'rank')} of a pipeline stage ({stage} / {tensor * size})",
        candidates=candidates,
        advice=f"set {ETP} to 1" if path == EP and tensor > 1 and stage % size == 0 else "",
    )


def optimizer_instances_divide_expert_ranks(facts: Facts) -> Iterator[Violation]:
    """Expert DP % num_distributed_optimizer_instances == 0 (parallel_state.py, initialize_model_parallel)."""
    ranks, instances = facts.expert_data_parallel_size, facts.parallelism.num_distributed_optimizer_instances
    if ranks is not None and ranks % instances:
        holders = "1 rank that holds" if ranks == 1 else f"{ranks} ranks that hold"
        yield Violation(
            path="parallelism.num_distributed_optimizer_instances",
            reason=f"does not divide the {holders} the same experts ({ranks} / {instances})",
            candidates=divisors(ranks, near=instances),
        )


def expert_tensor_parallel_divides_experts(facts: Facts) -> Iterator[Violation]:
    """moe_ffn_hidden_size % ETP == 0 (tensor_parallel/layers.py, asserted by `divide`)."""
    width, size = facts.resolved_model.moe_ffn_hidden_size, expert_tensor_parallel_size(facts.parallelism)
    if width is not None and width % size:
        yield Violation(
            path=TP if facts.parallelism.expert_tensor_parallel_size is None else ETP,
            reason=f"does not divide model.moe_ffn_hidden_size = {width} ({width} / {size})",
            candidates=divisors(width, near=size),
        )


def tensor_parallel_divides_shared_experts(facts: Facts) -> Iterator[Violation]:
    """moe_shared_expert_intermediate_size % TP == 0 (tensor_parallel/layers.py, asserted by `divide`)."""
    size = facts.parallelism.tensor_model_parallel_size
    width = facts.model.moe_shared_expert_intermediate_size
    if width is not None and width % size:
        yield Violation(
            path=TP,
            reason=f"does not divide model.moe_shared_expert_intermediate_size = {width} ({width} / {size})",
            candidates=divisors(width, near=size),
        )


def experts_with_tensor_parallel_need_sequence_parallel(facts: Facts) -> Iterator[Violation]:
    """TP > 1 with experts needs sequence_parallel (transformer/moe/moe_layer.py, MoELayer.forward)."""
    axes = facts.parallelism
    if facts.model.num_moe_experts is None or axes.sequence_parallel or axes.tensor_model_parallel_size == 1:
        return
    yield Violation(
        path="parallelism.sequence_parallel",
        reason=f"does not work with experts and TP = {axes.tensor_model_parallel_size}, because all tensor-parallel "
        "ranks would send the same tokens to the experts",
        candidates=[True],
    )


def expert_biases_need_undivided_experts(facts: Facts) -> Iterator[Violation]:
    """add_bias_linear needs ETP = 1 (transformer/transformer_config.py, __post_init__)."""
    size = expert_tensor_parallel_size(facts.parallelism)
    if facts.model.num_moe_experts is not None and facts.model.add_bias_linear and size > 1:
        yield Violation(
            path="model.add_bias_linear",
            reason=f"is not supported for experts that {counted(size, 'rank')} share (ETP = {size})",
            candidates=[False],
            advice=f"set {ETP} to 1",
        )


def grouped_products_need_transformer_engine(facts: Facts) -> Iterator[Violation]:
    """moe_grouped_gemm needs Transformer Engine, and no biases.

    Core 0.16.1 has no other grouped product that is still maintained (extensions/transformer_engine_spec_provider.py,
    grouped_mlp_modules). TEGroupedMLP refuses biases (transformer/moe/experts.py).
    """
    if facts.model.num_moe_experts is None or not facts.parallelism.moe_grouped_gemm:
        return
    for is_missing, why in (
        (facts.engine_problem, f"requires Transformer Engine, but {facts.engine_problem}"),
        (facts.model.add_bias_linear, "does not support model.add_bias_linear = true"),
    ):
        if is_missing:
            yield Violation(
                path=GROUPED_GEMM,
                reason=why,
                candidates=[None],
            )
            return


def balancing_loss_has_a_coefficient(facts: Facts) -> Iterator[Violation]:
    """seq_aux_loss needs moe_aux_loss_coeff (hpcgen's rule: it would have no effect)."""
    model = facts.model
    is_chosen = model.num_moe_experts is not None and model.moe_router_load_balancing_type == "seq_aux_loss"
    if is_chosen and model.moe_aux_loss_coeff == 0:
        yield Violation(
            path="model.moe_router_load_balancing_type",
            reason=f"has no effect, because {COEFFICIENT} is 0",
            candidates=["none"],
            advice="set moe_aux_loss_coeff",
        )


def experts_stay_in_node(facts: Facts) -> Iterator[Violation]:
    """EP x ETP <= the devices connected by NVLink (hpcgen's rule).

    Every MoE layer exchanges each token moe_router_topk times in both directions. An H100 node has 450 GB/s per GPU and
    direction over NVLink and 50 GB/s over its InfiniBand port (topologies/ndv5.yaml), so the exchange takes up to nine
    times as long between nodes.
    """
    experts, axes, node = facts.model.num_moe_experts, facts.parallelism, facts.gpus_per_node
    tensor = expert_tensor_parallel_size(axes)
    size = axes.expert_model_parallel_size
    if experts is None or size == 1 or tensor * size <= node:
        return
    yield Violation(
        path=EP,
        reason=f"results in EP x ETP = {size} x {tensor} = {size * tensor}, more than the {facts.devices_of_node} of "
        f"a node, so every MoE layer sends {facts.model.moe_router_topk} copies of each token over the network and "
        "back",
        candidates=[d for d in divisors(experts, near=size) if d * tensor <= node],
        offers=1,
        advice="ignore this warning if the experts do not fit in a node",
    )


def load_is_balanced(facts: Facts) -> Iterator[Violation]:
    """Something balances the load (hpcgen's rule; Fedus et al., arXiv 2101.03961, section 2.2).

    Without it, routers prefer the experts that they have trained, and the others are never used.
    """
    model = facts.model
    if model.num_moe_experts is None or model.moe_router_load_balancing_type == "none":
        return
    if model.moe_aux_loss_coeff == 0 and not model.moe_router_enable_expert_bias:
        yield Violation(
            path=COEFFICIENT,
            reason="balances nothing, so a few experts may process all tokens",
            candidates=[0.01],
            advice="set moe_router_load_balancing_type to none if this is intended",
        )


RULES: tuple[Rule, ...] = (
    layout_of_experts_needs_experts,
    expert_parallel_divides_experts,
    expert_tensor_parallel_divides_experts,
    expert_layout_divides_world,
    optimizer_instances_divide_expert_ranks,
    tensor_parallel_divides_shared_experts,
    experts_with_tensor_parallel_need_sequence_parallel,
    expert_biases_need_undivided_experts,
    grouped_products_need_transformer_engine,
    balancing_loss_has_a_coefficient,
)

WARNINGS: tuple[Rule, ...] = (
    experts_stay_in_node,
    load_is_balanced,
)
