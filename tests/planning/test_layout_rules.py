"""Rules for parallelism and the batch from both sides: what passes, and what a user reads when it does not."""

from __future__ import annotations

import dataclasses

import pytest

from hpcgen.planning.repairs import check
from tests.planning.cases import BATCH, CP, GROUPS, HEADS, MLA, MTP, PP, RAMPUP, SP, TP, VPP, YARN, errors
from trainer.contract.config import (
    BlendConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelismConfig,
    TrainingConfig,
)
from trainer.contract.rules.facts import Facts, World

FIRST = "parallelism__num_layers_in_first_pipeline_stage"
EMBEDDING = "parallelism__account_for_embedding_in_pipeline_split"
LOSS = "parallelism__account_for_loss_in_pipeline_split"
LAYOUT = "parallelism__pipeline_model_parallel_layout"

REFUSED = {
    "TP does not divide heads": (
        {TP: 6},
        "parallelism.tensor_model_parallel_size does not divide model.num_attention_heads = 16 (16 / 6); "
        "use 1, 2, 4, 8 or 16",
    ),
    "TP does not divide heads, on three nodes": (
        {TP: 5, "nodes": 3, BATCH: 480},
        "parallelism.tensor_model_parallel_size does not divide model.num_attention_heads = 16 (16 / 5); "
        "use 1, 2, 4 or 8",
    ),
    "TP and query groups": (
        {HEADS: 48, "model__hidden_size": 3072, GROUPS: 8, TP: 12, "nodes": 3, BATCH: 384},
        "parallelism.tensor_model_parallel_size neither divides model.num_query_groups = 8 nor is a multiple "
        "of it (8 / 12); use 1, 2, 4 or 8",
    ),
    "TP does not divide queries, keys and values": (
        {GROUPS: 1, "model__kv_channels": 6, TP: 8},
        "parallelism.tensor_model_parallel_size does not divide (model.num_attention_heads + 2 x "
        "model.num_query_groups) x model.kv_channels = (16 + 2 x 1) x 6 = 108 (108 / 8); use 1, 2 or 4",
    ),
    "TP does not divide the MLP": (
        {"model__ffn_hidden_size": 4098, TP: 4},
        "parallelism.tensor_model_parallel_size does not divide model.ffn_hidden_size = 4098 (4098 / 4); "
        "use 1 or 2",
    ),
    "TP does not divide the vocabulary": (
        {"model__padded_vocab_size": 50258, TP: 4},
        "parallelism.tensor_model_parallel_size does not divide model.padded_vocab_size = 50258 (50258 / 4); "
        "use 1 or 2",
    ),
    "sequence parallel without TP": (
        {SP: True},
        "parallelism.sequence_parallel requires parallelism.tensor_model_parallel_size > 1, but it is 1; "
        "use false",
    ),
    "PP does not divide layers": (
        {PP: 5},
        "parallelism.pipeline_model_parallel_size does not divide model.num_layers = 12 (12 / 5); "
        "use 1, 2 or 4, or divide the layers unevenly with pipeline_model_parallel_layout",
    ),
    "126 layers on 16 stages": (
        {PP: 16, "model__num_layers": 126},
        "parallelism.pipeline_model_parallel_size does not divide model.num_layers = 126 (126 / 16); use 1 or 2, or "
        "set account_for_embedding_in_pipeline_split to true and account_for_loss_in_pipeline_split to true",
    ),
    "an uneven pipeline without PP": (
        {FIRST: 4},
        "parallelism.num_layers_in_first_pipeline_stage needs parallelism.pipeline_model_parallel_size > 1, but it is "
        "1; remove it, or use more pipeline stages",
    ),
    "layers left for the other stages": (
        {FIRST: 4, PP: 4},
        "parallelism.num_layers_in_first_pipeline_stage leaves 8 of 12 layers for 3 other stages, which cannot share "
        "them evenly; use 3, 6 or 9",
    ),
    "a first stage that VPP does not divide": (
        {FIRST: 3, PP: 4, VPP: 2},
        "parallelism.num_layers_in_first_pipeline_stage results in a stage of 3 layers, which VPP = 2 does not divide; "
        "use 6",
    ),
    "embedding and loss as layers": (
        {PP: 4, EMBEDDING: True, LOSS: True},
        "parallelism.account_for_embedding_in_pipeline_split results in model.num_layers + 2 = 12 + 2 = 14 layers, "
        "which PP = 4 does not divide; change model.num_layers or the number of pipeline stages",
    ),
    "two ways to divide the layers": (
        {PP: 2, FIRST: 4, LAYOUT: "Et*4|t*8L"},
        "parallelism.pipeline_model_parallel_layout cannot be combined with "
        "parallelism.num_layers_in_first_pipeline_stage; use one of them",
    ),
    "a layout with another number of layers": (
        {PP: 2, LAYOUT: "Et*4|t*9L"},
        "parallelism.pipeline_model_parallel_layout has 13 layers, but model.num_layers = 12; use for example "
        "Et*6|t*6L",
    ),
    "a layout with another number of stages": (
        {PP: 2, LAYOUT: "Et*4|t*4|t*4L"},
        "parallelism.pipeline_model_parallel_layout has 3 parts between |, which PP = 2 does not divide; use for "
        "example Et*6|t*6L",
    ),
    "a layout with an empty stage": (
        {PP: 4, LAYOUT: "Et*6||t*6|L"},
        "parallelism.pipeline_model_parallel_layout has no layer in part 2 of 4; use for example "
        "Et*3|t*3|t*3|t*3L",
    ),
    "a layout without its ends": (
        {PP: 2, LAYOUT: "t*6|t*6"},
        "parallelism.pipeline_model_parallel_layout must begin with its only E and end with its only L; use for "
        "example Et*6|t*6L",
    ),
    "a layout with a layer of another kind": (
        {PP: 2, LAYOUT: "Et*6|t*6xL"},
        "parallelism.pipeline_model_parallel_layout has 'x'; use E (embedding), t (transformer layer), m (MTP layer), "
        "L (loss), |, commas, and repetitions such as t*3 or (tt|)*2",
    ),
    "a layout with MTP layers that the model lacks": (
        {PP: 2, LAYOUT: "Et*6|t*6mL"},
        "parallelism.pipeline_model_parallel_layout has 1 m, but model.mtp_num_layers = 0; use for example Et*6|t*6L",
    ),
    "an MTP layer before another layer": (
        MTP | {PP: 2, LAYOUT: "Et*6m|t*6L"},
        "parallelism.pipeline_model_parallel_layout must have all MTP layers (m) after the last t, directly before L "
        "or |L; use for example Et*6|t*6mL",
    ),
    "MTP layers on two stages": (
        MTP | {"model__mtp_num_layers": 2, PP: 4, LAYOUT: "Et*6|t*6|m|mL"},
        "parallelism.pipeline_model_parallel_layout must have all MTP layers (m) after the last t, directly before L "
        "or |L; use for example Et*3|t*3|t*3|t*3mmL",
    ),
    "an MTP layer before another layer, in a layout too long for an example": (
        MTP | {"model__num_layers": 32, PP: 16, VPP: 2, LAYOUT: "Et|(t|)*29m|ttL"},
        "parallelism.pipeline_model_parallel_layout must have all MTP layers (m) after the last t, directly before L "
        "or |L; write mL",
    ),
    "an MTP layer on the first stage": (
        MTP | {PP: 2, VPP: 2, LAYOUT: "Et*6|t*4|ttm|L"},
        "parallelism.pipeline_model_parallel_layout has MTP layers (m) on the first stage, where Megatron-Core does "
        "not support them; use for example Et*6|t*4|tt|mL",
    ),
    "MTP that TP does not divide": (
        MLA | MTP | {"model__hidden_size": 1022, "model__num_attention_heads": 8, SP: True, TP: 4},
        "parallelism.tensor_model_parallel_size does not divide model.hidden_size = 1022 (1022 / 4), which "
        "model.mtp_num_layers requires; use 2",
    ),
    "MTP without a layer of the user before it": (
        MTP | {PP: 2, LAYOUT: "Et*12|mL", "model__layer_spec": "my.layers:spec"},
        "model.layer_spec would not change the MTP layers, which copy the spec of the last layer on their pipeline "
        "stage, but there is none; move a layer to that stage",
    ),
    "MLA at TP without sequence parallelism": (
        MLA | {TP: 2},
        "parallelism.sequence_parallel must be true for model.multi_latent_attention with TP = 2, because "
        "Megatron-Core leaves out gradients otherwise; use true",
    ),
    "MLA with overlapped communication": (
        MLA | {TP: 2, SP: True, "parallelism__tp_comm_overlap": True},
        "parallelism.tp_comm_overlap has no effect with model.multi_latent_attention = true; use false",
    ),
    "MTP with overlapped communication": (
        MTP | {TP: 2, SP: True, "parallelism__tp_comm_overlap": True},
        "parallelism.tp_comm_overlap is not supported with model.mtp_num_layers = 1, because Transformer Engine has no "
        "buffer for the projection of an MTP layer; use false",
    ),
    "YaRN of MLA over too many ranks": (
        MLA | {CP: 4, "model__rope_scaling": dataclasses.replace(YARN, original_max_position_embeddings=4)},
        "parallelism.context_parallel_size requires that model.rope_scaling.original_max_position_embeddings = 4 is a "
        "multiple of 2 x 4 with model.multi_latent_attention = true (4 / 8); use 1 or 2",
    ),
    "windows of MLA over ranks": (
        MLA | {CP: 2, "model__window_size": 512},
        "model.window_size is not supported by Transformer Engine with model.multi_latent_attention = true and "
        "parallelism.context_parallel_size = 2; use null, or set parallelism.context_parallel_size to 1",
    ),
    "an exchange of MLA by heads": (
        MLA | {CP: 2, "parallelism__cp_comm_type": "a2a"},
        "parallelism.cp_comm_type is not supported by Transformer Engine before 2.16 with "
        "model.multi_latent_attention = true; use null or p2p",
    ),
    "a layout that does not fit into memory": (
        {PP: 2, LAYOUT: "E(t*9999)*9999|L"},
        "parallelism.pipeline_model_parallel_layout has more than 100,000 characters when its repetitions are written "
        "out; write a shorter layout",
    ),
    "VPP beside a layout": (
        {PP: 2, LAYOUT: "Et*3|t*3|t*3|t*3L"},
        "parallelism.virtual_pipeline_model_parallel_size does not fit parallelism.pipeline_model_parallel_layout, "
        "which has 4 parts for 2 stages; set it to 2",
    ),
    "instances of the optimizer": (
        {"parallelism__num_distributed_optimizer_instances": 3},
        "parallelism.num_distributed_optimizer_instances does not divide DP x CP = 16 x 1 = 16 (16 / 3); use 1, 2, 4, "
        "8 or 16",
    ),
    "VPP without PP": (
        {VPP: 2},
        "parallelism.virtual_pipeline_model_parallel_size requires "
        "parallelism.pipeline_model_parallel_size > 1, but it is 1; use null",
    ),
    "VPP does not divide a stage": (
        {PP: 2, VPP: 4},
        "parallelism.virtual_pipeline_model_parallel_size does not divide the layers of a stage, "
        "model.num_layers / parallelism.pipeline_model_parallel_size = 12 / 2 = 6 (6 / 4); use 2, 3 or 6",
    ),
    "CP does not divide the sequence": (
        {CP: 3},
        "parallelism.context_parallel_size divides each sequence into 2 x 3 slices, but model.seq_length = "
        "2048 is not a multiple of 6 (2048 / 6); use 1, 2, 4, 8 or 16",
    ),
    "sequence parallel does not divide the sequence": (
        {"model__seq_length": 2050, TP: 4, SP: True},
        "model.seq_length is not a multiple of CP x TP = 1 x 4 = 4, which parallelism.sequence_parallel = "
        "true requires (2050 / 4); use 2048 or 2052",
    ),
    "too few nodes": (
        {TP: 8, PP: 4},
        "slurm.train.nodes results in 2 x 8 = 16 ranks, which TP x PP x CP = 8 x 4 x 1 = 32 does not "
        "divide (16 / 32); use 4 or 8, or choose parallel sizes whose product divides 16",
    ),
    "nodes do not fit": (
        {"nodes": 3, TP: 2, PP: 4, CP: 2},
        "slurm.train.nodes results in 3 x 8 = 24 ranks, which TP x PP x CP = 2 x 4 x 2 = 16 does not "
        "divide (24 / 16); use 2 or 4, or choose parallel sizes whose product divides 24",
    ),
    "gather overlap without reduce overlap": (
        {"parallelism__overlap_param_gather": True},
        "parallelism.overlap_param_gather requires parallelism.overlap_grad_reduce = true, but it is "
        "false; use false, or set overlap_grad_reduce to true",
    ),
    "batch is not whole microbatches": (
        {BATCH: 500},
        "training.global_batch_size is not a multiple of micro_batch_size x DP = 2 x 16 = 32 (500 / 32); "
        "use 480 or 512",
    ),
    "batch below one microbatch": (
        {BATCH: 16},
        "training.global_batch_size is not a multiple of micro_batch_size x DP = 2 x 16 = 32 (16 / 32); "
        "use 32 or 64",
    ),
    "interleaving with an unfilled pipeline": (
        {PP: 4, VPP: 3, BATCH: 24},
        "training.global_batch_size results in 24 / (micro_batch_size x DP) = 24 / 8 = 3 microbatches, but "
        "parallelism.virtual_pipeline_model_parallel_size = 3 requires a multiple of "
        "parallelism.pipeline_model_parallel_size = 4 (3 / 4); use 32 or 64",
    ),
    "a ramp-up that passes the batch by": (
        {RAMPUP: (64, 100, 10_000)},
        "training.rampup_batch_size does not reach global_batch_size = 512: 512 - 64 is not a multiple of 100; "
        "use [64, 64, 10000]",
    ),
    "a ramp-up of two numbers": (
        {RAMPUP: (64, 64)},
        "training.rampup_batch_size must be three numbers: start, increment and samples; ",
    ),
    "a ramp-up from above": (
        {RAMPUP: (1024, 32, 10_000)},
        "training.rampup_batch_size starts above global_batch_size = 512; use [480, 32, 10000]",
    ),
    "a ramp-up through parts of microbatches": (
        {RAMPUP: (32, 16, 10_000)},
        "training.rampup_batch_size results in batch sizes that are not multiples of micro_batch_size x DP "
        "= 2 x 16 = 32 (16 / 32); use [32, 32, 10000]",
    ),
    "a ramp-up that leaves the pipeline unfilled": (
        {RAMPUP: (8, 8, 10_000), PP: 4, VPP: 3},
        "training.rampup_batch_size results in batch sizes that are not multiples of micro_batch_size x DP "
        "x PP = 2 x 4 x 4 = 32 (8 / 32); use [32, 32, 10000]",
    ),
    "overlap of TP without sequence parallel": (
        {TP: 2, "parallelism__tp_comm_overlap": True},
        "parallelism.tp_comm_overlap requires parallelism.sequence_parallel = true, but it is false; use "
        "false, or set sequence_parallel to true, with parallelism.tensor_model_parallel_size above 1",
    ),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_a_broken_rule_is_one_message_with_values_that_work(changes, message):
    assert errors(**changes) == [message]


ACCEPTED = {
    "query groups below TP": {GROUPS: 4, TP: 8},
    "query groups above TP": {GROUPS: 8, TP: 2},
    "a padded size from elsewhere": {"model__padded_vocab_size": 50432, TP: 2},
    "sequence parallel": {TP: 2, SP: True},
    "context and sequence parallel": {TP: 2, SP: True, CP: 2},
    "context parallel alone": {CP: 2},
    "a virtual pipeline of one": {VPP: 1},
    "interleaving over two stages": {PP: 2, VPP: 3},
    "both overlaps": {"parallelism__overlap_grad_reduce": True, "parallelism__overlap_param_gather": True},
    "reduce overlap alone": {"parallelism__overlap_grad_reduce": True},
    "one microbatch": {BATCH: 32},
    "fewer microbatches than stages": {PP: 4, BATCH: 8},
    "a ramp-up": {RAMPUP: (32, 32, 10_000)},
    "a ramp-up in one step": {RAMPUP: (512, 32, 10_000)},
    "overlap of TP": {TP: 2, SP: True, "parallelism__tp_comm_overlap": True},
    "MTP after a layer of a package": MTP
    | {PP: 2, LAYOUT: "Et*11|tmL", "model__layer_spec": "my.layers:spec"},
    "MLA": MLA | {TP: 2, SP: True, "model__hidden_size": 1000, "model__rope_scaling": YARN},
    "MTP after a layer of a package, on the stage before the loss": MTP
    | {PP: 4, LAYOUT: "Et*4|t*4|t*4m|L", "model__layer_spec": "my.layers:spec"},
    "MTP": MLA | MTP | {PP: 2, LAYOUT: "Et*7|t*5mL"},
    "MTP on the stage before the loss": MTP | {PP: 4, LAYOUT: "Et*6|t*6|m|L"},
    "MTP in the layout of NVIDIA's recipe for DeepSeek-V3": MTP
    | {"model__num_layers": 61, PP: 16, VPP: 2, LAYOUT: "Et*3|(tt|)*29m|L"},
}


@pytest.mark.parametrize("changes", ACCEPTED.values(), ids=ACCEPTED)
def test_valid_values_pass(changes):
    assert errors(**changes) == []


WEAK_SCALING = [
    # heads, hidden, layers, TP, PP, GPUs, global batch
    (16, 2048, 24, 1, 1, 48, 192),
    (32, 4096, 30, 2, 1, 96, 192),
    (48, 6144, 32, 4, 1, 192, 192),
    (56, 7168, 48, 8, 1, 384, 192),
    (64, 8192, 84, 8, 2, 768, 384),
    (80, 10240, 92, 8, 4, 1536, 768),
    (96, 12288, 96, 8, 6, 2304, 1152),
    (128, 16384, 96, 8, 8, 3072, 1536),
    (144, 18432, 112, 8, 16, 6144, 3072),
]
"""Megatron-LM's README, weak scaling on H100: sequence 4096, vocabulary 131072, micro batch 1."""


@pytest.mark.parametrize(("heads", "hidden", "layers", "tensor", "pipeline", "gpus", "batch"), WEAK_SCALING)
def test_published_layouts_pass(heads, hidden, layers, tensor, pipeline, gpus, batch):
    facts = Facts(
        model=ModelConfig(
            num_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            seq_length=4096,
            vocab_size=131072,
        ),
        parallelism=ParallelismConfig(
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            sequence_parallel=tensor > 1,
        ),
        training=TrainingConfig(micro_batch_size=1, global_batch_size=batch, train_iters=100),
        optimizer=OptimizerConfig(lr=1e-4),
        data=BlendConfig(mock=True),
        world=World(path="slurm.train.nodes", count=gpus // 8, ranks_each=8),
        gpus_per_node=8,
        device_memory_gib=80,
    )
    found, _ = check(facts)
    assert found == []
    assert facts.layout is not None
    assert facts.layout.data_parallel_size == gpus // (tensor * pipeline)
