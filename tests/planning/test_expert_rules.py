"""The rules of mixtures of experts from both sides: what passes, and what a user reads when it does not."""

from __future__ import annotations

import pytest

from tests.planning.cases import errors, warnings

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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {EP: 16},
            "parallelism.expert_model_parallel_size does not divide model.num_moe_experts = 8 (8 / 16); "
            "use 1, 2, 4 or 8",
        ),
        (
            {EXPERTS: 32, EP: 32},
            "parallelism.expert_model_parallel_size results in ETP x EP = 1 x 32 = 32, which does not divide the "
            "16 ranks of a pipeline stage (16 / 32); use 1, 2, 4, 8 or 16",
        ),
        (
            {TP: 2, SP: True, EP: 8, "parallelism__pipeline_model_parallel_size": 2},
            "parallelism.expert_model_parallel_size results in ETP x EP = 2 x 8 = 16, which does not divide the "
            "8 ranks of a pipeline stage (8 / 16); use 1, 2 or 4, or set expert_tensor_parallel_size to 1",
        ),
        (
            {ETP: 3},
            "parallelism.expert_tensor_parallel_size does not divide model.moe_ffn_hidden_size = 4096 (4096 / 3); "
            "use 1, 2, 4, 8 or 16",
        ),
        (
            {TP: 2, SP: True, WIDTH: 4097},
            "parallelism.tensor_model_parallel_size does not divide model.moe_ffn_hidden_size = 4097 (4097 / 2); use 1",
        ),
        (
            {WIDTH: 4097, "evaluation__tensor_model_parallel_size": 2},
            "evaluation.tensor_model_parallel_size does not divide model.moe_ffn_hidden_size = 4097 (4097 / 2); use 1",
        ),
        (
            {"model__add_bias_linear": True, "evaluation__tensor_model_parallel_size": 2},
            "evaluation.tensor_model_parallel_size divides the experts, which is not supported with "
            "model.add_bias_linear = true; use 1",
        ),
        (
            {TP: 2, SP: True, SHARED: 4097},
            "parallelism.tensor_model_parallel_size does not divide model.moe_shared_expert_intermediate_size = 4097 "
            "(4097 / 2); use 1",
        ),
        (
            {TP: 2},
            "parallelism.sequence_parallel does not work with experts and TP = 2, because all tensor-parallel ranks "
            "would send the same tokens to the experts; use true",
        ),
        (
            {
                TP: 2,
                SP: True,
                "model__add_bias_linear": True,
            },
            "model.add_bias_linear is not supported for experts that 2 ranks share (ETP = 2); use false, or set "
            "parallelism.expert_tensor_parallel_size to 1",
        ),
        (
            {"model__add_bias_linear": True, "parallelism__moe_grouped_gemm": True},
            "parallelism.moe_grouped_gemm does not support model.add_bias_linear = true; use null",
        ),
        (
            {"parallelism__moe_grouped_gemm": True, "training__transformer_impl": "torch"},
            "parallelism.moe_grouped_gemm requires Transformer Engine, but training.transformer_impl is torch; "
            "use null",
        ),
        (
            {"training__cuda_graph_impl": "transformer_engine"},
            "training.cuda_graph_impl cannot record layers with experts, because the number of their tokens "
            "changes; use none",
        ),
        (
            {EP: 8, "parallelism__num_distributed_optimizer_instances": 4},
            "parallelism.num_distributed_optimizer_instances does not divide the 2 ranks that hold the same experts "
            "(2 / 4); use 1 or 2",
        ),
        ({TOPK: 9}, "model.moe_router_topk is more than num_moe_experts = 8; use at most 8"),
        (
            {TOPK: 1},
            "model.moe_router_topk has no gradient for the router, because the softmax of a single score is always "
            "1; set moe_router_pre_softmax to true",
        ),
        (
            {"model__moe_router_pre_softmax": True, **SIGMOID},
            "model.moe_router_pre_softmax has no effect with moe_router_score_function = sigmoid; use false",
        ),
        (
            {FREQ: (1, 1)},
            "model.moe_layer_freq has 2 numbers, but num_layers = 12; write one number per layer, or null for "
            "experts in every layer",
        ),
        (
            {FREQ: (0,) * 12},
            "model.moe_layer_freq contains no 1, so no layer has experts; set num_moe_experts to null",
        ),
        (
            {SHARED: 4096, "model__add_bias_linear": True},
            "model.moe_shared_expert_intermediate_size does not support add_bias_linear = true; set add_bias_linear "
            "to false",
        ),
        (
            {BIAS: True},
            "model.moe_router_enable_expert_bias requires moe_router_score_function = sigmoid, but it is softmax; "
            "set moe_router_score_function to sigmoid",
        ),
        (
            {"model__moe_router_bias_update_rate": 1e-2},
            "model.moe_router_bias_update_rate has no effect, because moe_router_enable_expert_bias is false; set "
            "moe_router_enable_expert_bias to true, or use 0.001",
        ),
        (
            {BALANCE: "none"},
            "model.moe_aux_loss_coeff has no effect, because moe_router_load_balancing_type is none; set "
            "moe_router_load_balancing_type to aux_loss, or use 0",
        ),
        (
            {GROUP_TOPK: 2},
            "model.moe_router_group_topk requires moe_router_num_groups; set moe_router_num_groups",
        ),
        (
            {GROUPS: 2},
            "model.moe_router_num_groups has no effect without moe_router_group_topk; set moe_router_group_topk, "
            "or remove both",
        ),
        (
            {GROUPS: 3, GROUP_TOPK: 1},
            "model.moe_router_num_groups does not divide num_moe_experts = 8 (8 / 3); use 1, 2, 4 or 8",
        ),
        (
            {GROUPS: 2, GROUP_TOPK: 3},
            "model.moe_router_group_topk is more than moe_router_num_groups = 2; use at most 2",
        ),
        (
            {GROUPS: 8, GROUP_TOPK: 4},
            "model.moe_router_group_topk is more than moe_router_topk = 2; use at most 2",
        ),
        (
            {GROUPS: 4, GROUP_TOPK: 1, TOPK: 3},
            "model.moe_router_topk is more than the 1 x 2 = 2 experts of moe_router_group_topk groups; choose more "
            "groups or fewer experts",
        ),
        (
            {PAD: True},
            "model.moe_pad_expert_input_to_capacity requires moe_expert_capacity_factor; set "
            "moe_expert_capacity_factor",
        ),
        (
            {"model__moe_token_drop_policy": "position"},
            "model.moe_token_drop_policy has no effect, because moe_expert_capacity_factor is null; set "
            "moe_expert_capacity_factor, or use probs",
        ),
        (
            {CAPACITY: 5.0},
            "model.moe_expert_capacity_factor results in a capacity of 1.25 times the tokens, which is never "
            "reached; use at most 4, or null",
        ),
        (
            {"training__fp8": "hybrid", WIDTH: 1000},
            "model.moe_ffn_hidden_size over ETP = 1 results in matrices 1000 wide, but training.fp8 = hybrid requires "
            "multiples of 16; use 992 or 1008, or set training.fp8 to null",
        ),
    ],
)
def test_what_a_user_reads(changes, message):
    assert errors(**{**MOE, **changes}) == [message]


def test_keys_of_experts_need_experts():
    found = errors(**{EP: 2, "parallelism__moe_grouped_gemm": True, WIDTH: 512, COEFF: 0.1})
    assert [line.partition(";")[0] for line in found] == [
        "model.moe_ffn_hidden_size has no effect, because num_moe_experts is null. The same applies to "
        "moe_aux_loss_coeff",
        "parallelism.expert_model_parallel_size has no effect, because model.num_moe_experts is null",
        "parallelism.moe_grouped_gemm has no effect, because model.num_moe_experts is null",
    ]


def test_all_mistakes_are_reported_at_once():
    found = errors(**{**MOE, EP: 5, TOPK: 9, FREQ: (1,), PAD: True, TP: 2})
    assert [line.partition(" ")[0] for line in found] == [
        "model.moe_layer_freq",
        "model.moe_router_topk",
        "model.moe_pad_expert_input_to_capacity",
        "parallelism.expert_model_parallel_size",
        "parallelism.sequence_parallel",
    ]


def test_experts_that_leave_the_node_are_reported():
    assert warnings(**{**MOE, EXPERTS: 16, EP: 16}) == [
        "parallelism.expert_model_parallel_size results in EP x ETP = 16 x 1 = 16, more than the 8 GPUs of a node, so "
        "every MoE layer sends 2 copies of each token over the network and back; use 8, or ignore this warning if the "
        "experts do not fit in a node"
    ]


def test_nothing_that_balances_the_load_is_reported():
    expected = (
        "model.moe_aux_loss_coeff balances nothing, so a few experts may process all tokens; use 0.01, or set "
        "moe_router_load_balancing_type to none if this is intended"
    )
    assert warnings(**{**MOE, COEFF: 0.0}) == [expected]
    assert warnings(**{**MOE, COEFF: 0.0, BALANCE: "none"}) == []


@pytest.mark.parametrize(
    "changes", [{EXPERTS: 2**53}, {EP: 2**53}, {EXPERTS: 2**53, EP: 2**53}, {ETP: 2**53}]
)
def test_absurd_numbers_end_in_a_message(changes):
    """A run file has at most 10,000 layers (LayerCount)."""
    for message in errors(**{**MOE, **changes}):
        assert len(message) < 300
    assert len(errors(**{**MOE, **changes, "model__num_layers": 10_000})) <= 2
