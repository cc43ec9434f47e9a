"""Rules for precision, CUDA graphs, recomputation and the schedule, from both sides."""

from __future__ import annotations

import dataclasses

import pytest

from hpcgen.planning.repairs import check
from tests.planning.cases import MLA, MTP, PP, RAMPUP, SP, TP, VPP, errors, valid_facts

FULL = {"training__recompute_granularity": "full"}
GRAPHS = {"training__cuda_graph_impl": "transformer_engine"}

REFUSED = {
    "MTP in uniform groups": (
        MTP | FULL | {"training__recompute_method": "uniform", "training__recompute_num_layers": 2},
        "training.recompute_num_layers must be 1 with model.mtp_num_layers and recompute_method = uniform; use 1, or "
        "set recompute_method to block",
    ),
    "MTP in graphs": (
        MTP | GRAPHS,
        "training.cuda_graph_impl is not tested with model.mtp_num_layers; use none",
    ),
    "MLA in graphs": (
        MLA | GRAPHS,
        "training.cuda_graph_impl is not tested with model.multi_latent_attention; use none",
    ),
    "fp8 without Transformer Engine": (
        {"training__fp8": "hybrid", "training__transformer_impl": "torch"},
        "training.transformer_impl does not support training.fp8 = hybrid; use transformer_engine or null",
    ),
    "fp8 of fp32": (
        {"training__fp8": "hybrid", "training__precision": "fp32"},
        "training.precision cannot be combined with training.fp8 = hybrid, which discards its precision; "
        "use bf16, or set fp8 to null",
    ),
    "fp8 with an odd MLP": (
        {"training__fp8": "hybrid", "model__ffn_hidden_size": 4104, TP: 2},
        "model.ffn_hidden_size over TP = 2 results in matrices 2052 wide, but training.fp8 = hybrid "
        "requires multiples of 16; use 4096 or 4128, or set training.fp8 to null",
    ),
    "fp8 with an odd latent": (
        MLA | {"training__fp8": "hybrid", "model__q_lora_rank": 24},
        "model.q_lora_rank results in matrices 24 wide, but training.fp8 = hybrid requires multiples of 16; use 16 or "
        "32, or set training.fp8 to null",
    ),
    "fp8 with odd values": (
        MLA | {"training__fp8": "hybrid", "model__v_head_dim": 65, TP: 4, SP: True},
        "model.v_head_dim x num_attention_heads over TP = 4 results in matrices 260 wide, but training.fp8 = hybrid "
        "requires multiples of 16; use 64 or 80, or set training.fp8 to null",
    ),
    "fp8 with odd queries, keys and values together": (
        {"training__fp8": "hybrid", "model__kv_channels": 20, "model__num_query_groups": 1},
        "model.kv_channels x (num_attention_heads + 2 x num_query_groups) over TP = 1 results in matrices 360 wide, "
        "but training.fp8 = hybrid requires multiples of 16; use 16 or 32, or set training.fp8 to null",
    ),
    "fp8 with odd tokens": (
        {"training__fp8": "hybrid", "model__seq_length": 2046},
        "model.seq_length x micro_batch_size results in 4092 tokens per rank, but training.fp8 = hybrid "
        "requires a multiple of 16; use 2032 or 2048, or set training.fp8 to null",
    ),
    "fp8 with tokens that only the forward pass accepts": (
        {"training__fp8": "hybrid", "training__micro_batch_size": 1, "model__seq_length": 2040},
        "model.seq_length x micro_batch_size results in 2040 tokens per rank, but training.fp8 = hybrid "
        "requires a multiple of 16; use 2032 or 2048, or set training.fp8 to null",
    ),
    "fp8 with an odd part for positions": (
        MLA | {"training__fp8": "hybrid", "model__qk_pos_emb_head_dim": 40},
        "model.qk_pos_emb_head_dim + kv_lora_rank results in matrices 552 wide, but training.fp8 = hybrid requires "
        "multiples of 16; use 32 or 48, or set training.fp8 to null",
    ),
    "fp8 with odd keys": (
        MLA | {"training__fp8": "hybrid", "model__qk_head_dim": 65, TP: 4, SP: True},
        "model.qk_head_dim + v_head_dim, times num_attention_heads over TP = 4, results in matrices 772 wide, but "
        "training.fp8 = hybrid requires multiples of 16; use 64 or 80, or set training.fp8 to null",
    ),
    "graphs of torch's layers": (
        GRAPHS | {"training__transformer_impl": "torch"},
        "training.transformer_impl does not support training.cuda_graph_impl = transformer_engine; use "
        "transformer_engine or null, or set cuda_graph_impl to none",
    ),
    "graphs of fp16": (
        GRAPHS | {"training__precision": "fp16"},
        "training.precision does not support training.cuda_graph_impl = transformer_engine; use bf16, or "
        "set cuda_graph_impl to none",
    ),
    "graphs with dropout": (
        GRAPHS | {"model__hidden_dropout": 0.1},
        "model.hidden_dropout would not follow the run's seed with training.cuda_graph_impl = "
        "transformer_engine; use 0.0, or set training.cuda_graph_impl to none",
    ),
    "graphs of recomputed layers": (
        GRAPHS | FULL | {"training__recompute_method": "uniform", "training__recompute_num_layers": 1},
        "training.cuda_graph_impl does not support training.recompute_granularity = full; use none, or set "
        "recompute_granularity to selective",
    ),
    "graphs of a pipeline with a ramp-up": (
        GRAPHS | {PP: 2, RAMPUP: (32, 32, 10_000)},
        "training.cuda_graph_impl requires a fixed number of microbatches in a pipeline, but "
        "training.rampup_batch_size changes it; use none, or set rampup_batch_size to null",
    ),
    "an fp8 recipe without fp8": (
        {"training__fp8_recipe": "delayed"},
        "training.fp8_recipe has no effect, because training.fp8 is null; use tensorwise, or set "
        "fp8 to hybrid",
    ),
    "a history that nothing looks at": (
        {"training__fp8": "hybrid", "training__fp8_amax_history_len": 16},
        "training.fp8_amax_history_len is used only with training.fp8_recipe = delayed; use 1024, or set "
        "fp8_recipe to delayed",
    ),
    "a loss scale for bf16": (
        {"optimizer__loss_scale": 128.0},
        "optimizer.loss_scale is used only with training.precision = fp16, not bf16; use null",
    ),
    "a least loss scale above the first": (
        {
            "training__precision": "fp16",
            "optimizer__initial_loss_scale": 4.0,
            "optimizer__min_loss_scale": 8.0,
        },
        "optimizer.min_loss_scale is greater than optimizer.initial_loss_scale = 4; use 1.0",
    ),
    "full recompute without a method": (
        {**FULL, "training__recompute_num_layers": 1},
        "training.recompute_method must be set with training.recompute_granularity = full; use uniform or "
        "block",
    ),
    "full recompute without a number": (
        {**FULL, "training__recompute_method": "block"},
        "training.recompute_num_layers must be set with training.recompute_granularity = full; use 1",
    ),
    "selective recompute with a number": (
        {"training__recompute_granularity": "selective", "training__recompute_num_layers": 2},
        "training.recompute_num_layers is used only with recompute_granularity = full, not selective; use "
        "null, or set recompute_granularity to full",
    ),
    "a method without recompute": (
        {"training__recompute_method": "block"},
        "training.recompute_method is used only with recompute_granularity = full, not null; use null, or "
        "set recompute_granularity to full",
    ),
    "uniform groups do not fill a chunk": (
        {
            **FULL,
            PP: 2,
            VPP: 2,
            "training__recompute_method": "uniform",
            "training__recompute_num_layers": 2,
        },
        "training.recompute_num_layers does not divide the 3 layers of a model chunk (3 / 2); use 1 or 3",
    ),
    "more block layers than a chunk has": (
        {**FULL, "training__recompute_method": "block", "training__recompute_num_layers": 15},
        "training.recompute_num_layers is more than the 12 layers of a model chunk; use 12, or use fewer "
        "layers",
    ),
    "min_lr above lr": (
        {"optimizer__min_lr": 1e-3},
        "optimizer.min_lr is greater than optimizer.lr = 0.0003; use 3e-05",
    ),
    "warm-up given twice": (
        {"optimizer__lr_warmup_iters": 5, "optimizer__lr_warmup_fraction": 0.1},
        "optimizer.lr_warmup_iters conflicts with lr_warmup_fraction = 0.1; both set the warm-up; use null",
    ),
    "warm-up as long as the run": (
        {"optimizer__lr_warmup_iters": 1000},
        "optimizer.lr_warmup_iters must be less than training.train_iters = 1000, where the decay ends; "
        "use 100 or null",
    ),
    "warm-up as long as the decay": (
        {"optimizer__lr_warmup_iters": 500, "optimizer__lr_decay_iters": 500},
        "optimizer.lr_warmup_iters must be less than optimizer.lr_decay_iters = 500, where the decay ends; "
        "use 50 or null",
    ),
    "a default warm-up as long as the decay": (
        {"optimizer__lr_decay_iters": 100},
        "optimizer.lr_warmup_iters (default: 100) must be less than optimizer.lr_decay_iters = 100, where "
        "the decay ends; use 10",
    ),
    "a warm-up from above": (
        {"optimizer__lr_warmup_init": 1.0},
        "optimizer.lr_warmup_init is greater than optimizer.lr = 0.0003; use 0.0",
    ),
    "the start of a warm-up without steps": (
        {"optimizer__lr_warmup_init": 1e-7, "optimizer__lr_warmup_iters": 0},
        "optimizer.lr_warmup_init has no effect without a warm-up: optimizer.lr_warmup_iters is 0; use 0.0, or set "
        "lr_warmup_iters",
    ),
    "WSD's tail without WSD": (
        {"optimizer__lr_wsd_decay_iters": 10},
        "optimizer.lr_wsd_decay_iters is used only with lr_decay_style = WSD, not cosine; use null, or set "
        "lr_decay_style to WSD",
    ),
    "WSD's tail within the warm-up": (
        {"optimizer__lr_decay_style": "WSD", "optimizer__lr_wsd_decay_iters": 950},
        "optimizer.lr_wsd_decay_iters is more than the 900 steps from the end of the warm-up to the end of the "
        "decay; use 90",
    ),
    "a schedule that is no import path": (
        {"optimizer__lr_schedule": "cosine_restarts"},
        "optimizer.lr_schedule is not an import path; use package.module:function or file.py:function",
    ),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_a_broken_rule_is_one_message_with_values_that_work(changes, message):
    assert errors(**changes) == [message]


ACCEPTED = {
    "fp8 with current scaling": {"training__fp8": "hybrid"},
    "fp8 with delayed scaling": {
        "training__fp8": "e4m3",
        "training__fp8_recipe": "delayed",
        "training__fp8_amax_history_len": 16,
    },
    "fp16 with a fixed scale": {"training__precision": "fp16", "optimizer__loss_scale": 128.0},
    "graphs in a pipeline": GRAPHS | {PP: 2, VPP: 3},
    "graphs with a ramp-up": GRAPHS | {RAMPUP: (32, 32, 10_000)},
    "graphs with selective recompute": GRAPHS | {"training__recompute_granularity": "selective"},
    "WSD": {"optimizer__lr_decay_style": "WSD", "optimizer__lr_wsd_decay_style": "linear"},
    "a schedule in a file": {"optimizer__lr_schedule": "../my schedules/restarts.py:rate"},
    "selective recompute": {"training__recompute_granularity": "selective"},
    "uniform recompute": {
        **FULL,
        "training__recompute_method": "uniform",
        "training__recompute_num_layers": 3,
    },
    "block recompute": {**FULL, "training__recompute_method": "block", "training__recompute_num_layers": 5},
    "a constant learning rate": {"optimizer__min_lr": 3e-4},
    "no warm-up": {"optimizer__lr_warmup_iters": 0},
    "warm-up as a fraction": {"optimizer__lr_warmup_fraction": 0.01},
    "MTP layers that are recomputed": MTP
    | FULL
    | {"training__recompute_method": "uniform", "training__recompute_num_layers": 1},
}


@pytest.mark.parametrize("changes", ACCEPTED.values(), ids=ACCEPTED)
def test_valid_values_pass(changes):
    assert errors(**changes) == []


def test_settings_that_need_gpus_are_refused_without_gpus():
    facts = dataclasses.replace(valid_facts(training__fp8="hybrid", **{TP: 2, SP: True}), device="cpu")
    facts = facts.with_value("parallelism.tp_comm_overlap", True)
    facts = facts.with_value("training.cuda_graph_impl", "transformer_engine")
    facts = facts.with_value("training.transformer_impl", "transformer_engine")
    facts = facts.with_value("training.cross_entropy_fusion_impl", "te")
    engine = "requires Transformer Engine, but the cluster's nodes have no GPUs"
    assert [(problem.path, problem.reason) for problem in check(facts)[0]] == [
        ("parallelism.tp_comm_overlap", "requires Transformer Engine, but the cluster's nodes have no GPUs"),
        ("training.fp8", "requires GPUs, but the cluster's nodes have no GPUs"),
        ("training.transformer_impl", engine),
        ("training.cross_entropy_fusion_impl", engine),
        ("training.cuda_graph_impl", "requires GPUs, but the cluster's nodes have no GPUs"),
    ]
