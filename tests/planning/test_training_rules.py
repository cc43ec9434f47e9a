"""Rules for precision, CUDA graphs, recomputation and the schedule, from both sides."""

from __future__ import annotations

import pytest

from tests.planning.cases import MLA, MTP, PP, RAMPUP, ROPE, SP, TP, VPP, broken, errors
from trainer.contract.rules import (
    cuda_graphs,
    losses,
    multi_token,
    parallelism,
    parameter_patterns,
    precision,
    recompute,
    schedule,
)

FULL = {"training__recompute_granularity": "full"}
EXPERTS = {
    "model__num_moe_experts": 4,
    "model__add_bias_linear": False,
    "model__moe_aux_loss_coeff": 0.01,
}
GRAPHS = {"training__cuda_graph_impl": "transformer_engine"}

FREEZE = "training__freeze"

REFUSED = {
    "a frozen pattern without a match": (
        {FREEZE: ("embedding.*", "layers.0.*")},
        "training.freeze",
        parameter_patterns.frozen_patterns_match,
    ),
    "nothing to train": (
        {FREEZE: ("*.weight", "*.bias", "*layer_norm_*")},
        "training.freeze",
        parameter_patterns.frozen_patterns_match,
    ),
    "some experts of a layer are frozen": (
        ROPE | EXPERTS | {FREEZE: ("*.experts.local_experts.0.*", "*.linear_fc?.weight0")},
        "training.freeze",
        parameter_patterns.experts_are_frozen_together,
    ),
    "frozen layers in graphs": (
        GRAPHS | {FREEZE: ("embedding.*",)},
        "training.cuda_graph_impl",
        parameter_patterns.frozen_layers_need_no_cuda_graphs,
    ),
    "MTP in uniform groups": (
        MTP | FULL | {"training__recompute_method": "uniform", "training__recompute_num_layers": 2},
        "training.recompute_num_layers",
        multi_token.mtp_is_recomputed_by_layer,
    ),
    "MTP in graphs": (
        MTP | GRAPHS,
        "training.cuda_graph_impl",
        cuda_graphs.cuda_graphs_need_tested_layers,
    ),
    "MLA in graphs": (
        MLA | GRAPHS,
        "training.cuda_graph_impl",
        cuda_graphs.cuda_graphs_need_tested_layers,
    ),
    "fp8 without Transformer Engine": (
        {"training__fp8": "hybrid", "training__transformer_impl": "torch"},
        "training.transformer_impl",
        precision.fp8_needs_transformer_engine,
    ),
    "fp8 of fp32": (
        {"training__fp8": "hybrid", "training__precision": "fp32"},
        "training.precision",
        precision.fp8_needs_half_precision,
    ),
    "fp8 with an odd MLP": (
        {"training__fp8": "hybrid", "model__ffn_hidden_size": 4104, TP: 2},
        "model.ffn_hidden_size",
        precision.fp8_fits_widths,
    ),
    "fp8 with an odd latent": (
        MLA | {"training__fp8": "hybrid", "model__q_lora_rank": 24},
        "model.q_lora_rank",
        precision.fp8_fits_widths,
    ),
    "fp8 with odd values": (
        MLA | {"training__fp8": "hybrid", "model__v_head_dim": 65, TP: 4, SP: True},
        "model.v_head_dim",
        precision.fp8_fits_widths,
    ),
    "fp8 with odd queries, keys and values together": (
        {"training__fp8": "hybrid", "model__kv_channels": 20, "model__num_query_groups": 1},
        "model.kv_channels",
        precision.fp8_fits_widths,
    ),
    "fp8 with odd tokens": (
        {"training__fp8": "hybrid", "model__seq_length": 2046},
        "model.seq_length",
        precision.fp8_fits_widths,
    ),
    "fp8 with tokens that only the forward pass accepts": (
        {"training__fp8": "hybrid", "training__micro_batch_size": 1, "model__seq_length": 2040},
        "model.seq_length",
        precision.fp8_fits_widths,
    ),
    "fp8 with an odd part for positions": (
        MLA | {"training__fp8": "hybrid", "model__qk_pos_emb_head_dim": 40},
        "model.qk_pos_emb_head_dim",
        precision.fp8_fits_widths,
    ),
    "fp8 with odd keys": (
        MLA | {"training__fp8": "hybrid", "model__qk_head_dim": 65, TP: 4, SP: True},
        "model.qk_head_dim",
        precision.fp8_fits_widths,
    ),
    "graphs of torch's layers": (
        GRAPHS | {"training__transformer_impl": "torch"},
        "training.transformer_impl",
        cuda_graphs.cuda_graphs_need_transformer_engine,
    ),
    "graphs of fp16": (
        GRAPHS | {"training__precision": "fp16"},
        "training.precision",
        cuda_graphs.cuda_graphs_need_bf16,
    ),
    "graphs with dropout": (
        GRAPHS | {"model__hidden_dropout": 0.1},
        "model.hidden_dropout",
        cuda_graphs.cuda_graphs_need_no_dropout,
    ),
    "graphs of recomputed layers": (
        GRAPHS | FULL | {"training__recompute_method": "uniform", "training__recompute_num_layers": 1},
        "training.cuda_graph_impl",
        cuda_graphs.cuda_graphs_need_no_full_recompute,
    ),
    "graphs of a pipeline with a ramp-up": (
        GRAPHS | {PP: 2, RAMPUP: (32, 32, 10_000)},
        "training.cuda_graph_impl",
        cuda_graphs.cuda_graphs_in_pipelines_need_constant_batch,
    ),
    "an fp8 recipe without fp8": (
        {"training__fp8_recipe": "delayed"},
        "training.fp8_recipe",
        precision.fp8_details_need_their_recipe,
    ),
    "a history that nothing looks at": (
        {"training__fp8": "hybrid", "training__fp8_amax_history_len": 16},
        "training.fp8_amax_history_len",
        precision.fp8_details_need_their_recipe,
    ),
    "a loss scale for bf16": (
        {"optimizer__loss_scale": 128.0},
        "optimizer.loss_scale",
        precision.loss_scale_needs_fp16,
    ),
    "a least loss scale above the first": (
        {
            "training__precision": "fp16",
            "optimizer__initial_loss_scale": 4.0,
            "optimizer__min_loss_scale": 8.0,
        },
        "optimizer.min_loss_scale",
        precision.loss_scale_starts_above_its_minimum,
    ),
    "full recompute without a method": (
        {**FULL, "training__recompute_num_layers": 1},
        "training.recompute_method",
        recompute.full_recompute_needs_method,
    ),
    "full recompute without a number": (
        {**FULL, "training__recompute_method": "block"},
        "training.recompute_num_layers",
        recompute.full_recompute_needs_num_layers,
    ),
    "selective recompute with a number": (
        {"training__recompute_granularity": "selective", "training__recompute_num_layers": 2},
        "training.recompute_num_layers",
        recompute.recompute_details_need_full,
    ),
    "a method without recompute": (
        {"training__recompute_method": "block"},
        "training.recompute_method",
        recompute.recompute_details_need_full,
    ),
    "uniform groups do not fill a chunk": (
        {
            **FULL,
            PP: 2,
            VPP: 2,
            "training__recompute_method": "uniform",
            "training__recompute_num_layers": 2,
        },
        "training.recompute_num_layers",
        recompute.recompute_fits_chunk,
    ),
    "more block layers than a chunk has": (
        {**FULL, "training__recompute_method": "block", "training__recompute_num_layers": 15},
        "training.recompute_num_layers",
        recompute.recompute_fits_chunk,
    ),
    "min_lr above lr": (
        {"optimizer__min_lr": 1e-3},
        "optimizer.min_lr",
        schedule.min_lr_is_not_above_lr,
    ),
    "warm-up given twice": (
        {"optimizer__lr_warmup_iters": 5, "optimizer__lr_warmup_fraction": 0.1},
        "optimizer.lr_warmup_iters",
        schedule.warmup_is_given_once,
    ),
    "warm-up as long as the run": (
        {"optimizer__lr_warmup_iters": 1000},
        "optimizer.lr_warmup_iters",
        schedule.warmup_ends_before_decay,
    ),
    "warm-up as long as the decay": (
        {"optimizer__lr_warmup_iters": 500, "optimizer__lr_decay_iters": 500},
        "optimizer.lr_warmup_iters",
        schedule.warmup_ends_before_decay,
    ),
    "a default warm-up as long as the decay": (
        {"optimizer__lr_decay_iters": 100},
        "optimizer.lr_warmup_iters",
        schedule.warmup_ends_before_decay,
    ),
    "a warm-up from above": (
        {"optimizer__lr_warmup_init": 1.0},
        "optimizer.lr_warmup_init",
        schedule.warmup_starts_below_lr,
    ),
    "the start of a warm-up without steps": (
        {"optimizer__lr_warmup_init": 1e-7, "optimizer__lr_warmup_iters": 0},
        "optimizer.lr_warmup_init",
        schedule.warmup_has_a_start,
    ),
    "WSD's tail without WSD": (
        {"optimizer__lr_wsd_decay_iters": 10},
        "optimizer.lr_wsd_decay_iters",
        schedule.wsd_details_need_wsd,
    ),
    "WSD's tail within the warm-up": (
        {"optimizer__lr_decay_style": "WSD", "optimizer__lr_wsd_decay_iters": 950},
        "optimizer.lr_wsd_decay_iters",
        schedule.wsd_decay_follows_warmup,
    ),
    "a schedule that is no import path": (
        {"optimizer__lr_schedule": "cosine_restarts"},
        "optimizer.lr_schedule",
        schedule.schedule_is_an_import_path,
    ),
    "a loss that is no import path": (
        {"training__loss": "focal"},
        "training.loss",
        losses.losses_are_import_paths,
    ),
    "a metric with the name of a column": (
        {"training__metrics": ("m.py:accuracy", "m.py:grad_norm")},
        "training.metrics[1]",
        losses.metrics_have_columns_of_their_own,
    ),
    "two metrics of one name": (
        {"training__metrics": ("m.py:accuracy", "n.py:accuracy")},
        "training.metrics[1]",
        losses.metrics_have_columns_of_their_own,
    ),
    "overlap of TP without GPUs": (
        {"device": "cpu", TP: 2, SP: True, "parallelism__tp_comm_overlap": True},
        "parallelism.tp_comm_overlap",
        parallelism.tensor_parallel_overlap_needs_sequence_parallel,
    ),
    "fp8 without GPUs": (
        {"device": "cpu", "training__fp8": "hybrid"},
        "training.fp8",
        precision.fp8_needs_transformer_engine,
    ),
    "Transformer Engine without GPUs": (
        {"device": "cpu", "training__transformer_impl": "transformer_engine"},
        "training.transformer_impl",
        precision.transformer_engine_needs_gpus,
    ),
    "Transformer Engine's cross entropy without GPUs": (
        {"device": "cpu", "training__cross_entropy_fusion_impl": "te"},
        "training.cross_entropy_fusion_impl",
        precision.transformer_engine_needs_gpus,
    ),
    "graphs without GPUs": (
        {"device": "cpu", **GRAPHS},
        "training.cuda_graph_impl",
        cuda_graphs.cuda_graphs_need_transformer_engine,
    ),
}


@pytest.mark.parametrize(("changes", "path", "rule"), REFUSED.values(), ids=REFUSED)
def test_a_broken_rule_is_one_problem(changes, path, rule):
    assert broken(**changes) == [(path, rule)]


ACCEPTED = {
    "frozen embeddings and norms": {FREEZE: ("embedding.*", "decoder.layers.?.*norm*")},
    "frozen experts": ROPE | EXPERTS | {FREEZE: ("*.experts.*", "decoder.layers.1.mlp.router.*")},
    "frozen layers of a user's model": {FREEZE: ("mine.*",), "model__model_provider": "mine:Model"},
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
    changes = {
        "training__fp8": "hybrid",
        "parallelism__tp_comm_overlap": True,
        "training__cuda_graph_impl": "transformer_engine",
        "training__transformer_impl": "transformer_engine",
        "training__cross_entropy_fusion_impl": "te",
    }
    assert [path for path, _ in broken(device="cpu", **changes, **{TP: 2, SP: True})] == [
        "parallelism.tp_comm_overlap",
        "training.fp8",
        "training.transformer_impl",
        "training.cross_entropy_fusion_impl",
        "training.cuda_graph_impl",
    ]
