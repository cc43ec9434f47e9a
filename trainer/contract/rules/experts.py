"""Rules for mixtures of experts: their layout, and how they are computed and balanced.

Unless stated otherwise, the sources are files of megatron/core.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainer.contract.config import ModelConfig
from trainer.contract.config.unused_keys import unused_keys
from trainer.contract.model.experts import MODEL_KEYS, expert_tensor_parallel_size
from trainer.contract.problem import Problem, Setting
from trainer.contract.rules.facts import Facts, Rule, divisors, indivisible, unread
from trainer.contract.rules.parallelism import TP
from trainer.contract.wording import counted, one_of

EP = "parallelism.expert_model_parallel_size"
ETP = "parallelism.expert_tensor_parallel_size"
GROUPED_GEMM = "parallelism.moe_grouped_gemm"
COEFFICIENT = "model.moe_aux_loss_coeff"

LAYOUT_KEYS = (EP, ETP, "parallelism.moe_token_dispatcher_type", GROUPED_GEMM)


def keys_of_experts_need_experts(facts: Facts) -> Iterator[Problem]:
    """The other keys of experts need num_moe_experts (hpcgen's rule: unused keys are errors)."""
    if facts.model.num_moe_experts is None:
        unused = unused_keys(facts.model, MODEL_KEYS, "num_moe_experts", "null", "set num_moe_experts")
        yield from unused


def layers_have_experts(facts: Facts) -> Iterator[Problem]:
    """One number per layer, and a 1 (models/gpt/gpt_layer_specs.py, get_gpt_decoder_layer_specs)."""
    model, layers = facts.model, facts.model.moe_layer_freq
    if model.num_moe_experts is None or layers is None:
        return
    if len(layers) != model.num_layers:
        reason = f"has {counted(len(layers), 'number')}, but num_layers = {model.num_layers}"
        advice = "write one number per layer, or null for experts in every layer"
        yield Problem(path="model.moe_layer_freq", reason=reason, hint=advice, about=("model.num_layers",))
    elif not any(layers):
        reason = "contains no 1, so no layer has experts"
        yield Problem(
            path="model.moe_layer_freq", reason=reason, settings=(Setting("model.num_moe_experts", None),)
        )


def shared_experts_have_no_biases(facts: Facts) -> Iterator[Problem]:
    """Shared experts need add_bias_linear = false (transformer/moe/shared_experts.py)."""
    model = facts.model
    has_shared = model.num_moe_experts is not None and model.moe_shared_expert_intermediate_size is not None
    if has_shared and model.add_bias_linear:
        yield Problem(
            path="model.moe_shared_expert_intermediate_size",
            reason="does not support add_bias_linear = true",
            settings=(Setting("model.add_bias_linear", False),),
            about=("model.add_bias_linear",),
        )


def router_chooses_among_experts(facts: Facts) -> Iterator[Problem]:
    """moe_router_topk <= num_moe_experts, with a gradient for the router.

    Sources: transformer/moe/moe_utils.py, topk_routing_with_score_function; transformer/transformer_config.py,
    __post_init__.
    """
    if facts.model.num_moe_experts is not None:
        yield from _routing_problems(facts.model, facts.model.num_moe_experts)


def _routing_problems(model: ModelConfig, experts: int) -> Iterator[Problem]:
    topk = model.moe_router_topk
    if topk > experts:
        yield Problem(
            "model.moe_router_topk",
            f"is more than num_moe_experts = {experts}",
            f"use at most {experts}",
            about=("model.num_moe_experts",),
        )
    is_softmax = model.moe_router_score_function == "softmax"
    if topk == 1 and is_softmax and not model.moe_router_pre_softmax:
        reason = "has no gradient for the router, because the softmax of a single score is always 1"
        yield Problem(
            "model.moe_router_topk", reason, settings=(Setting("model.moe_router_pre_softmax", True),)
        )
    if model.moe_router_pre_softmax and not is_softmax:
        reason = f"has no effect with moe_router_score_function = {model.moe_router_score_function}"
        yield Problem(
            "model.moe_router_pre_softmax", reason, "use false", about=("model.moe_router_score_function",)
        )


def groups_of_experts_fit(facts: Facts) -> Iterator[Problem]:
    """Groups divide the experts, and the chosen groups hold moe_router_topk experts.

    Sources: transformer/transformer_config.py, __post_init__; transformer/moe/moe_utils.py, group_limited_topk.
    """
    model = facts.model
    is_limited = model.moe_router_num_groups is not None or model.moe_router_group_topk is not None
    if model.num_moe_experts is not None and is_limited:
        yield from _group_problems(model, model.num_moe_experts)


def _group_problems(model: ModelConfig, experts: int) -> Iterator[Problem]:
    groups, chosen, topk = model.moe_router_num_groups, model.moe_router_group_topk, model.moe_router_topk
    if groups is None:
        yield Problem(
            "model.moe_router_group_topk",
            "requires moe_router_num_groups",
            "set moe_router_num_groups",
            about=("model.moe_router_num_groups",),
        )
        return
    if chosen is None:
        reason = "has no effect without moe_router_group_topk"
        yield Problem(
            "model.moe_router_num_groups",
            reason,
            "set moe_router_group_topk, or remove both",
            about=("model.moe_router_group_topk",),
        )
        return
    if experts % groups:
        reason = f"does not divide num_moe_experts = {experts} ({experts} / {groups})"
        divisors = [str(number) for number in range(1, min(experts, 1024) + 1) if experts % number == 0]
        yield Problem(
            "model.moe_router_num_groups", reason, f"use {one_of(divisors)}", about=("model.num_moe_experts",)
        )
    elif chosen > groups:
        yield Problem(
            "model.moe_router_group_topk",
            f"is more than moe_router_num_groups = {groups}",
            f"use at most {groups}",
            about=("model.moe_router_num_groups",),
        )
    elif chosen > topk:
        # Core rates a group by its best topk // group_topk experts. With none, all groups are equal.
        yield Problem(
            "model.moe_router_group_topk",
            f"is more than moe_router_topk = {topk}",
            f"use at most {topk}",
            about=("model.moe_router_topk",),
        )
    elif topk > chosen * (experts // groups):
        in_groups = f"{chosen} x {experts // groups} = {chosen * (experts // groups)}"
        reason = f"is more than the {in_groups} experts of moe_router_group_topk groups"
        yield Problem(
            "model.moe_router_topk",
            reason,
            "choose more groups or fewer experts",
            about=("model.moe_router_group_topk",),
        )


def balancing_fits_router(facts: Facts) -> Iterator[Problem]:
    """Expert biases need sigmoid scores, and coefficients what they belong to.

    Source: transformer/transformer_config.py, __post_init__. Keys that have no effect are errors here, and ignored by
    Core.
    """
    if facts.model.num_moe_experts is not None:
        yield from _balancing_problems(facts.model)


def _balancing_problems(model: ModelConfig) -> Iterator[Problem]:
    if model.moe_router_enable_expert_bias and model.moe_router_score_function != "sigmoid":
        reason = f"requires moe_router_score_function = sigmoid, but it is {model.moe_router_score_function}"
        yield Problem(
            "model.moe_router_enable_expert_bias",
            reason,
            settings=(Setting("model.moe_router_score_function", "sigmoid"),),
            about=("model.moe_router_score_function",),
        )
    if not model.moe_router_enable_expert_bias:
        needed = "set moe_router_enable_expert_bias to true"
        keys = ("moe_router_bias_update_rate",)
        yield from unused_keys(model, keys, "moe_router_enable_expert_bias", "false", needed)
    if model.moe_router_load_balancing_type == "none" and model.moe_aux_loss_coeff > 0:
        reason = "has no effect, because moe_router_load_balancing_type is none"
        yield Problem(
            "model.moe_aux_loss_coeff",
            reason,
            "set moe_router_load_balancing_type to aux_loss, or use 0",
            about=("model.moe_router_load_balancing_type",),
        )


def capacity_is_reached(facts: Facts) -> Iterator[Problem]:
    """Padding and dropping need a capacity that tokens can exceed.

    Sources: transformer/transformer_config.py, __post_init__; transformer/moe/moe_utils.py, get_capacity and permute.
    """
    if facts.model.num_moe_experts is not None:
        yield from _capacity_problems(facts.model, facts.model.num_moe_experts)


def _capacity_problems(model: ModelConfig, experts: int) -> Iterator[Problem]:
    factor, topk = model.moe_expert_capacity_factor, model.moe_router_topk
    if factor is None:
        if model.moe_pad_expert_input_to_capacity:
            advice = "set moe_expert_capacity_factor"
            yield Problem(
                "model.moe_pad_expert_input_to_capacity",
                "requires moe_expert_capacity_factor",
                advice,
                about=("model.moe_expert_capacity_factor",),
            )
        needed = "set moe_expert_capacity_factor"
        yield from unused_keys(
            model, ("moe_token_drop_policy",), "moe_expert_capacity_factor", "null", needed
        )
    elif topk <= experts < factor * topk:
        # Padding fails in Core above the number of tokens, and a capacity that is never reached drops nothing.
        reason = (
            f"results in a capacity of {factor * topk / experts:g} times the tokens, which is never reached"
        )
        yield Problem("model.moe_expert_capacity_factor", reason, f"use at most {experts / topk:g}, or null")


def layout_of_experts_needs_experts(facts: Facts) -> Iterator[Problem]:
    """EP > 1 needs num_moe_experts (transformer/transformer_config.py, __post_init__). The other keys would be
    ignored."""
    if facts.model.num_moe_experts is None:
        reason = "has no effect, because model.num_moe_experts is null"
        yield from unread(facts, LAYOUT_KEYS, reason, about=("model.num_moe_experts",))


def expert_parallel_divides_experts(facts: Facts) -> Iterator[Problem]:
    """num_moe_experts % EP == 0 (transformer/moe/moe_layer.py, BaseMoELayer)."""
    experts, size = facts.model.num_moe_experts, facts.parallelism.expert_model_parallel_size
    if experts is not None and experts % size:
        yield indivisible(EP, size, "model.num_moe_experts", experts)


def expert_layout_divides_world(facts: Facts) -> Iterator[Problem]:
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
    yield Problem(
        path=path,
        reason=f"results in ETP x EP = {tensor} x {size} = {tensor * size}, which does not divide the "
        f"{counted(stage, 'rank')} of a pipeline stage ({stage} / {tensor * size})",
        candidates=candidates,
        settings=(Setting(ETP, 1),) if path == EP and tensor > 1 and stage % size == 0 else (),
    )


def optimizer_instances_divide_expert_ranks(facts: Facts) -> Iterator[Problem]:
    """Expert DP % num_distributed_optimizer_instances == 0 (parallel_state.py, initialize_model_parallel)."""
    ranks, instances = facts.expert_data_parallel_size, facts.parallelism.num_distributed_optimizer_instances
    if ranks is not None and ranks % instances:
        holders = "1 rank that holds" if ranks == 1 else f"{ranks} ranks that hold"
        yield Problem(
            path="parallelism.num_distributed_optimizer_instances",
            reason=f"does not divide the {holders} the same experts ({ranks} / {instances})",
            candidates=divisors(ranks, near=instances),
        )


def expert_tensor_parallel_divides_experts(facts: Facts) -> Iterator[Problem]:
    """moe_ffn_hidden_size % ETP == 0 (tensor_parallel/layers.py, asserted by `divide`)."""
    width, size = facts.resolved_model.moe_ffn_hidden_size, expert_tensor_parallel_size(facts.parallelism)
    if width is not None and width % size:
        path = TP if facts.parallelism.expert_tensor_parallel_size is None else ETP
        yield indivisible(path, size, "model.moe_ffn_hidden_size", width)


def tensor_parallel_divides_shared_experts(facts: Facts) -> Iterator[Problem]:
    """moe_shared_expert_intermediate_size % TP == 0 (tensor_parallel/layers.py, asserted by `divide`)."""
    size = facts.parallelism.tensor_model_parallel_size
    width = facts.model.moe_shared_expert_intermediate_size
    if width is not None and width % size:
        yield indivisible(TP, size, "model.moe_shared_expert_intermediate_size", width)


def experts_with_tensor_parallel_need_sequence_parallel(facts: Facts) -> Iterator[Problem]:
    """TP > 1 with experts needs sequence_parallel (transformer/moe/moe_layer.py, MoELayer.forward)."""
    axes = facts.parallelism
    if facts.model.num_moe_experts is None or axes.sequence_parallel or axes.tensor_model_parallel_size == 1:
        return
    yield Problem(
        path="parallelism.sequence_parallel",
        reason=f"does not work with experts and TP = {axes.tensor_model_parallel_size}, because all tensor-parallel "
        "ranks would send the same tokens to the experts",
        candidates=[True],
    )


def expert_biases_need_undivided_experts(facts: Facts) -> Iterator[Problem]:
    """add_bias_linear needs ETP = 1 (transformer/transformer_config.py, __post_init__)."""
    size = expert_tensor_parallel_size(facts.parallelism)
    if facts.model.num_moe_experts is not None and facts.model.add_bias_linear and size > 1:
        yield Problem(
            path="model.add_bias_linear",
            reason=f"is not supported for experts that {counted(size, 'rank')} share (ETP = {size})",
            candidates=[False],
            settings=(Setting(ETP, 1),),
        )


def grouped_products_need_transformer_engine(facts: Facts) -> Iterator[Problem]:
    """moe_grouped_gemm needs Transformer Engine, and no biases.

    Core 0.16.1 has no other grouped product that is still maintained (extensions/transformer_engine_spec_provider.py,
    grouped_mlp_modules). TEGroupedMLP refuses biases (transformer/moe/experts.py).
    """
    if facts.model.num_moe_experts is None or not facts.parallelism.moe_grouped_gemm:
        return
    engine = facts.engine_problem
    for is_missing, key, why in (
        (engine, "training.transformer_impl", f"requires Transformer Engine, but {engine}"),
        (
            facts.model.add_bias_linear,
            "model.add_bias_linear",
            "does not support model.add_bias_linear = true",
        ),
    ):
        if is_missing:
            yield Problem(
                path=GROUPED_GEMM,
                reason=why,
                candidates=[None],
                about=(key,),
            )
            return


def balancing_loss_has_a_coefficient(facts: Facts) -> Iterator[Problem]:
    """seq_aux_loss needs moe_aux_loss_coeff (hpcgen's rule: it would have no effect)."""
    model = facts.model
    is_chosen = model.num_moe_experts is not None and model.moe_router_load_balancing_type == "seq_aux_loss"
    if is_chosen and model.moe_aux_loss_coeff == 0:
        yield Problem(
            path="model.moe_router_load_balancing_type",
            reason=f"has no effect, because {COEFFICIENT} is 0",
            candidates=["none"],
            hint="set moe_aux_loss_coeff",
            about=("model.moe_aux_loss_coeff",),
        )


def experts_stay_in_node(facts: Facts) -> Iterator[Problem]:
    """EP x ETP divides the number of devices connected by NVLink (hpcgen's rule).

    Every MoE layer exchanges each token moe_router_topk times in both directions. An H100 node has 450 GB/s per GPU and
    direction over NVLink and 50 GB/s over its InfiniBand port (topologies/ndv5.yaml), so the exchange takes up to nine
    times as long between nodes.
    """
    experts, axes = facts.model.num_moe_experts, facts.parallelism
    tensor = expert_tensor_parallel_size(axes)
    size = axes.expert_model_parallel_size
    if experts is None or size == 1 or not facts.crosses_network(tensor * size):
        return
    yield Problem(
        path=EP,
        reason=f"results in EP x ETP = {size} x {tensor} = {size * tensor}, "
        f"{facts.too_large(size * tensor)}, so every MoE layer sends {facts.model.moe_router_topk} copies of each "
        "token over the network and back",
        candidates=[d for d in divisors(experts, near=size) if not facts.crosses_network(d * tensor)],
        offers=1,
        hint="ignore this warning if the experts do not fit there",
    )


def load_is_balanced(facts: Facts) -> Iterator[Problem]:
    """At least one method balances the load (hpcgen's rule; Fedus et al., arXiv 2101.03961, section 2.2).

    Without it, routers prefer the experts that they have trained, and the others are never used.
    """
    model = facts.model
    if model.num_moe_experts is None or model.moe_router_load_balancing_type == "none":
        return
    if model.moe_aux_loss_coeff == 0 and not model.moe_router_enable_expert_bias:
        yield Problem(
            path=COEFFICIENT,
            reason="balances nothing, so a few experts may process all tokens",
            candidates=[0.01],
            hint="set moe_router_load_balancing_type to none if this is intended",
        )


OF_MODEL: tuple[Rule, ...] = (
    keys_of_experts_need_experts,
    layers_have_experts,
    shared_experts_have_no_biases,
    router_chooses_among_experts,
    groups_of_experts_fit,
    balancing_fits_router,
    capacity_is_reached,
)
"""Rules of keys of the section `model` that contradict each other."""

RULES: tuple[Rule, ...] = (
    *OF_MODEL,
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
