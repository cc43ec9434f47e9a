"""The rules of mixtures of experts from both sides: what passes, and what a user reads when it does not."""

from __future__ import annotations

import pytest

from tests.planning.cases import broken, errors, warned, warnings
from trainer.contract.rules import cuda_graphs, evaluation, experts, precision

TP = "parallelism__tensor_model_parallel_size"
SP = "parallelism__sequence_parallel"
EP = "parallelism__expert_model_parallel_size"
ETP = "parallelism__expert_tensor_parallel_size"
EXPERTS = "model__num_moe_experts"
TOPK = "model__moe_router_topk"
WIDTH = "model__moe_ffn_hidden_size"
SHARED = "model__moe_shared_expert_intermediate_size"
FREQ = "model__moe_layer_freq"
FUNCTION = "model__moe_router_score_function"
BALANCE = "model__moe_router_load_balancing_type"
COEFF = "model__moe_aux_loss_coeff"
BIAS = "model__moe_router_enable_expert_bias"
GROUPS = "model__moe_router_num_groups"
GROUP_TOPK = "model__moe_router_group_topk"
CAPACITY = "model__moe_expert_capacity_factor"
PAD = "model__moe_pad_expert_input_to_capacity"

MOE = {EXPERTS: 8, COEFF: 0.01, "model__add_bias_linear": False}
"""A mixture of experts that breaks no rule."""
SIGMOID = {FUNCTION: "sigmoid"}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {EP: 8},
        {EP: 4, TP: 2, SP: True},
        {EP: 8, TP: 2, SP: True, ETP: 1},
        {TP: 4, SP: True},
        {TOPK: 1, "model__moe_router_pre_softmax": True},
        {TOPK: 1, **SIGMOID},
        {TOPK: 8},
        {FREQ: (0,) + (1,) * 11},
        {SHARED: 4096},
        {BIAS: True, "model__moe_router_bias_update_rate": 1e-2, COEFF: 0.0, **SIGMOID},
        {GROUPS: 4, GROUP_TOPK: 2, **SIGMOID},
        {CAPACITY: 1.25, PAD: True, "model__moe_token_drop_policy": "position"},
        {CAPACITY: 4.0},
        {"parallelism__moe_grouped_gemm": True},
        {"model__add_bias_linear": True},
        {TP: 2, SP: True, ETP: 1},
        {BALANCE: "seq_aux_loss"},
        {"model__ffn_hidden_size": 1001, WIDTH: 512, TP: 2, SP: True},  # no layer is dense
        {"parallelism__moe_token_dispatcher_type": "allgather"},
        {"model__moe_router_topk_scaling_factor": 2.5},
    ],
)
def test_valid_mixtures_of_experts(changes):
    assert errors(**{**MOE, **changes}) == []


REFUSED = {
    "EP does not divide the experts": (
        MOE | {EP: 16},
        "parallelism.expert_model_parallel_size",
        experts.expert_parallel_divides_experts,
    ),
    "EP is more than the ranks of a pipeline stage": (
        MOE | {EXPERTS: 32, EP: 32},
        "parallelism.expert_model_parallel_size",
        experts.expert_layout_divides_world,
    ),
    "ETP x EP is more than the ranks of a pipeline stage": (
        MOE | {TP: 2, SP: True, EP: 8, "parallelism__pipeline_model_parallel_size": 2},
        "parallelism.expert_model_parallel_size",
        experts.expert_layout_divides_world,
    ),
    "ETP does not divide the experts' width": (
        MOE | {ETP: 3},
        "parallelism.expert_tensor_parallel_size",
        experts.expert_tensor_parallel_divides_experts,
    ),
    "TP does not divide the experts' width": (
        MOE | {TP: 2, SP: True, WIDTH: 4097},
        "parallelism.tensor_model_parallel_size",
        experts.expert_tensor_parallel_divides_experts,
    ),
    "TP of the evaluation does not divide the experts' width": (
        MOE | {WIDTH: 4097, "evaluation__tensor_model_parallel_size": 2},
        "evaluation.tensor_model_parallel_size",
        evaluation.layout_fits_model,
    ),
    "TP of the evaluation divides experts with biases": (
        MOE | {"model__add_bias_linear": True, "evaluation__tensor_model_parallel_size": 2},
        "evaluation.tensor_model_parallel_size",
        evaluation.layout_fits_model,
    ),
    "TP does not divide the shared expert's width": (
        MOE | {TP: 2, SP: True, SHARED: 4097},
        "parallelism.tensor_model_parallel_size",
        experts.tensor_parallel_divides_shared_experts,
    ),
    "TP without sequence parallel": (
        MOE | {TP: 2},
        "parallelism.sequence_parallel",
        experts.experts_with_tensor_parallel_need_sequence_parallel,
    ),
    "biases of experts that ranks share": (
        MOE
        | {
            TP: 2,
            SP: True,
            "model__add_bias_linear": True,
        },
        "model.add_bias_linear",
        experts.expert_biases_need_undivided_experts,
    ),
    "biases with grouped GEMM": (
        MOE | {"model__add_bias_linear": True, "parallelism__moe_grouped_gemm": True},
        "parallelism.moe_grouped_gemm",
        experts.grouped_products_need_transformer_engine,
    ),
    "grouped GEMM without Transformer Engine": (
        MOE | {"parallelism__moe_grouped_gemm": True, "training__transformer_impl": "torch"},
        "parallelism.moe_grouped_gemm",
        experts.grouped_products_need_transformer_engine,
    ),
    "graphs": (
        MOE | {"training__cuda_graph_impl": "transformer_engine"},
        "training.cuda_graph_impl",
        cuda_graphs.cuda_graphs_need_dense_layers,
    ),
    "instances of the optimizer": (
        MOE | {EP: 8, "parallelism__num_distributed_optimizer_instances": 4},
        "parallelism.num_distributed_optimizer_instances",
        experts.optimizer_instances_divide_expert_ranks,
    ),
    "more experts per token than there are": (
        MOE | {TOPK: 9},
        "model.moe_router_topk",
        experts.router_chooses_among_experts,
    ),
    "one expert per token without a gradient": (
        MOE | {TOPK: 1},
        "model.moe_router_topk",
        experts.router_chooses_among_experts,
    ),
    "softmax before the choice with sigmoid": (
        MOE | {"model__moe_router_pre_softmax": True, **SIGMOID},
        "model.moe_router_pre_softmax",
        experts.router_chooses_among_experts,
    ),
    "a frequency of another number of layers": (
        MOE | {FREQ: (1, 1)},
        "model.moe_layer_freq",
        experts.layers_have_experts,
    ),
    "no layer with experts": (
        MOE | {FREQ: (0,) * 12},
        "model.moe_layer_freq",
        experts.layers_have_experts,
    ),
    "a shared expert with biases": (
        MOE | {SHARED: 4096, "model__add_bias_linear": True},
        "model.moe_shared_expert_intermediate_size",
        experts.shared_experts_have_no_biases,
    ),
    "a balancing bias with softmax": (
        MOE | {BIAS: True},
        "model.moe_router_enable_expert_bias",
        experts.balancing_fits_router,
    ),
    "the rate of a balancing bias without one": (
        MOE | {"model__moe_router_bias_update_rate": 1e-2},
        "model.moe_router_bias_update_rate",
        experts.balancing_fits_router,
    ),
    "a balancing loss of no balancing": (
        MOE | {BALANCE: "none"},
        "model.moe_aux_loss_coeff",
        experts.balancing_fits_router,
    ),
    "the number of chosen groups without groups": (
        MOE | {GROUP_TOPK: 2},
        "model.moe_router_group_topk",
        experts.groups_of_experts_fit,
    ),
    "groups of which none are chosen": (
        MOE | {GROUPS: 2},
        "model.moe_router_num_groups",
        experts.groups_of_experts_fit,
    ),
    "groups that do not divide the experts": (
        MOE | {GROUPS: 3, GROUP_TOPK: 1},
        "model.moe_router_num_groups",
        experts.groups_of_experts_fit,
    ),
    "more chosen groups than there are": (
        MOE | {GROUPS: 2, GROUP_TOPK: 3},
        "model.moe_router_group_topk",
        experts.groups_of_experts_fit,
    ),
    "more chosen groups than experts per token": (
        MOE | {GROUPS: 8, GROUP_TOPK: 4},
        "model.moe_router_group_topk",
        experts.groups_of_experts_fit,
    ),
    "more experts per token than the chosen groups have": (
        MOE | {GROUPS: 4, GROUP_TOPK: 1, TOPK: 3},
        "model.moe_router_topk",
        experts.groups_of_experts_fit,
    ),
    "padding to the capacity without one": (
        MOE | {PAD: True},
        "model.moe_pad_expert_input_to_capacity",
        experts.capacity_is_reached,
    ),
    "a drop policy without a capacity": (
        MOE | {"model__moe_token_drop_policy": "position"},
        "model.moe_token_drop_policy",
        experts.capacity_is_reached,
    ),
    "a capacity that is never reached": (
        MOE | {CAPACITY: 5.0},
        "model.moe_expert_capacity_factor",
        experts.capacity_is_reached,
    ),
    "fp8 with an odd width of experts": (
        MOE | {"training__fp8": "hybrid", WIDTH: 1000},
        "model.moe_ffn_hidden_size",
        precision.fp8_fits_widths,
    ),
    "keys of experts without experts": (
        {WIDTH: 512, COEFF: 0.1},
        "model.moe_ffn_hidden_size",
        experts.keys_of_experts_need_experts,
    ),
    "EP without experts": (
        {EP: 2},
        "parallelism.expert_model_parallel_size",
        experts.layout_of_experts_needs_experts,
    ),
    "grouped GEMM without experts": (
        {"parallelism__moe_grouped_gemm": True},
        "parallelism.moe_grouped_gemm",
        experts.layout_of_experts_needs_experts,
    ),
}


@pytest.mark.parametrize(("changes", "path", "rule"), REFUSED.values(), ids=REFUSED)
def test_a_broken_rule_is_one_problem(changes, path, rule):
    assert broken(**changes) == [(path, rule)]


def test_all_mistakes_are_reported_at_once():
    found = errors(**{EP: 2, "parallelism__moe_grouped_gemm": True, WIDTH: 512, COEFF: 0.1})
    assert [line.partition(" ")[0] for line in found] == [
        "model.moe_ffn_hidden_size",
        "parallelism.expert_model_parallel_size",
        "parallelism.moe_grouped_gemm",
    ]
    found = errors(**{**MOE, EP: 5, TOPK: 9, FREQ: (1,), PAD: True, TP: 2})
    assert [line.partition(" ")[0] for line in found] == [
        "model.moe_layer_freq",
        "model.moe_router_topk",
        "model.moe_pad_expert_input_to_capacity",
        "parallelism.expert_model_parallel_size",
        "parallelism.sequence_parallel",
    ]


WARNED = {
    "experts over nodes": (
        MOE | {EXPERTS: 16, EP: 16},
        "parallelism.expert_model_parallel_size",
        experts.experts_stay_in_node,
    ),
    "nothing that balances the load": (
        MOE | {COEFF: 0.0},
        "model.moe_aux_loss_coeff",
        experts.load_is_balanced,
    ),
}


@pytest.mark.parametrize(("changes", "path", "rule"), WARNED.values(), ids=WARNED)
def test_slow_or_unbalanced_experts_are_a_warning(changes, path, rule):
    assert warned(**changes) == [(path, rule)]


def test_no_warning_if_no_balancing_is_meant():
    assert warnings(**{**MOE, COEFF: 0.0, BALANCE: "none"}) == []


@pytest.mark.parametrize("num_layers", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "changes", [{EXPERTS: 2**53}, {EP: 2**53}, {EXPERTS: 2**53, EP: 2**53}, {ETP: 2**53}]
)
def test_absurd_numbers_end_in_a_message(changes, num_layers):
    """A run file has at most 10,000 layers (LayerCount). The memory of all repairs then takes ten seconds."""
    for message in errors(**{**MOE, **changes}):
        assert len(message) < 500
    assert len(errors(**{**MOE, **changes, "model__num_layers": num_layers})) <= 2
