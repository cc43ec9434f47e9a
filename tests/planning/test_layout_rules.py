"""Rules for parallelism and the batch from both sides: what passes, and what a user reads when it does not."""

from __future__ import annotations

import dataclasses

import pytest

from hpcgen.planning.repairs import check
from tests.planning.cases import (
    BATCH,
    CP,
    GROUPS,
    HEADS,
    MLA,
    MTP,
    PP,
    RAMPUP,
    SP,
    TP,
    VPP,
    YARN,
    broken,
    errors,
)
from trainer.contract.config import (
    BlendConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelismConfig,
    TrainingConfig,
)
from trainer.contract.rules import batch, latent_attention, multi_token, parallelism
from trainer.contract.rules.facts import Facts, World

FIRST = "parallelism__num_layers_in_first_pipeline_stage"
EMBEDDING = "parallelism__account_for_embedding_in_pipeline_split"
LOSS = "parallelism__account_for_loss_in_pipeline_split"
LAYOUT = "parallelism__pipeline_model_parallel_layout"

REFUSED_LAYOUTS = {
    "two ways to divide the layers": {PP: 2, FIRST: 4, LAYOUT: "Et*4|t*8L"},
    "a layout with another number of layers": {PP: 2, LAYOUT: "Et*4|t*9L"},
    "a layout with another number of stages": {PP: 2, LAYOUT: "Et*4|t*4|t*4L"},
    "a layout with an empty stage": {PP: 4, LAYOUT: "Et*6||t*6|L"},
    "a layout without its ends": {PP: 2, LAYOUT: "t*6|t*6"},
    "a layout with a layer of another kind": {PP: 2, LAYOUT: "Et*6|t*6xL"},
    "a layout with MTP layers that the model lacks": {PP: 2, LAYOUT: "Et*6|t*6mL"},
    "an MTP layer before another layer": MTP | {PP: 2, LAYOUT: "Et*6m|t*6L"},
    "MTP layers on two stages": MTP | {"model__mtp_num_layers": 2, PP: 4, LAYOUT: "Et*6|t*6|m|mL"},
    "an MTP layer before another layer, in a layout too long for an example": MTP
    | {"model__num_layers": 32, PP: 16, VPP: 2, LAYOUT: "Et|(t|)*29m|ttL"},
    "an MTP layer on the first stage": MTP | {PP: 2, VPP: 2, LAYOUT: "Et*6|t*4|ttm|L"},
}
"""Values of pipeline_model_parallel_layout that contradict the layers or the stages."""

REFUSED = {
    "TP does not divide heads": (
        {TP: 6},
        "parallelism.tensor_model_parallel_size",
        parallelism.tensor_parallel_divides_heads,
    ),
    "TP does not divide heads, on three nodes": (
        {TP: 5, "nodes": 3, BATCH: 480},
        "parallelism.tensor_model_parallel_size",
        parallelism.tensor_parallel_divides_heads,
    ),
    "TP and query groups": (
        {HEADS: 48, "model__hidden_size": 3072, GROUPS: 8, TP: 12, "nodes": 3, BATCH: 384},
        "parallelism.tensor_model_parallel_size",
        parallelism.tensor_parallel_fits_query_groups,
    ),
    "TP does not divide queries, keys and values": (
        {GROUPS: 1, "model__kv_channels": 6, TP: 8},
        "parallelism.tensor_model_parallel_size",
        parallelism.tensor_parallel_divides_projection,
    ),
    "TP does not divide the MLP": (
        {"model__ffn_hidden_size": 4098, TP: 4},
        "parallelism.tensor_model_parallel_size",
        parallelism.tensor_parallel_divides_mlp,
    ),
    "TP does not divide the vocabulary": (
        {"model__padded_vocab_size": 50258, TP: 4},
        "parallelism.tensor_model_parallel_size",
        parallelism.tensor_parallel_divides_vocabulary,
    ),
    "sequence parallel without TP": (
        {SP: True},
        "parallelism.sequence_parallel",
        parallelism.sequence_parallel_needs_tensor_parallel,
    ),
    "PP does not divide layers": (
        {PP: 5},
        "parallelism.pipeline_model_parallel_size",
        parallelism.pipeline_divides_layers,
    ),
    "126 layers on 16 stages": (
        {PP: 16, "model__num_layers": 126},
        "parallelism.pipeline_model_parallel_size",
        parallelism.pipeline_divides_layers,
    ),
    "an uneven pipeline without PP": (
        {FIRST: 4},
        "parallelism.num_layers_in_first_pipeline_stage",
        parallelism.uneven_pipeline_has_all_layers,
    ),
    "layers left for the other stages": (
        {FIRST: 4, PP: 4},
        "parallelism.num_layers_in_first_pipeline_stage",
        parallelism.uneven_pipeline_has_all_layers,
    ),
    "a first stage that VPP does not divide": (
        {FIRST: 3, PP: 4, VPP: 2},
        "parallelism.num_layers_in_first_pipeline_stage",
        parallelism.uneven_pipeline_has_all_layers,
    ),
    "embedding and loss as layers": (
        {PP: 4, EMBEDDING: True, LOSS: True},
        "parallelism.account_for_embedding_in_pipeline_split",
        parallelism.uneven_pipeline_has_all_layers,
    ),
    "MTP that TP does not divide": (
        MLA | MTP | {"model__hidden_size": 1022, "model__num_attention_heads": 8, SP: True, TP: 4},
        "parallelism.tensor_model_parallel_size",
        multi_token.tensor_parallel_divides_mtp_projection,
    ),
    "MTP without a layer of the user before it": (
        MTP | {PP: 2, LAYOUT: "Et*12|mL", "model__layer_spec": "my.layers:spec"},
        "model.layer_spec",
        multi_token.mtp_is_after_a_layer_of_the_user,
    ),
    "MLA at TP without sequence parallelism": (
        MLA | {TP: 2},
        "parallelism.sequence_parallel",
        latent_attention.latent_attention_needs_sequence_parallel,
    ),
    "MLA with overlapped communication": (
        MLA | {TP: 2, SP: True, "parallelism__tp_comm_overlap": True},
        "parallelism.tp_comm_overlap",
        latent_attention.latent_attention_has_no_communication_overlap,
    ),
    "MTP with overlapped communication": (
        MTP | {TP: 2, SP: True, "parallelism__tp_comm_overlap": True},
        "parallelism.tp_comm_overlap",
        multi_token.mtp_has_no_communication_overlap,
    ),
    "YaRN of MLA over too many ranks": (
        MLA | {CP: 4, "model__rope_scaling": dataclasses.replace(YARN, original_max_position_embeddings=4)},
        "parallelism.context_parallel_size",
        latent_attention.yarn_of_latent_attention_divides_context,
    ),
    "windows of MLA over ranks": (
        MLA | {CP: 2, "model__window_size": 512},
        "model.window_size",
        latent_attention.windows_of_latent_attention_are_on_one_rank,
    ),
    "an exchange of MLA by heads": (
        MLA | {CP: 2, "parallelism__cp_comm_type": "a2a"},
        "parallelism.cp_comm_type",
        latent_attention.latent_attention_exchanges_around_a_ring,
    ),
    "a layout that does not fit into memory": (
        {PP: 2, LAYOUT: "E(t*9999)*9999|L"},
        "parallelism.pipeline_model_parallel_layout",
        parallelism.uneven_pipeline_has_all_layers,
    ),
    "VPP beside a layout": (
        {PP: 2, LAYOUT: "Et*3|t*3|t*3|t*3L"},
        "parallelism.virtual_pipeline_model_parallel_size",
        parallelism.uneven_pipeline_has_all_layers,
    ),
    "instances of the optimizer": (
        {"parallelism__num_distributed_optimizer_instances": 3},
        "parallelism.num_distributed_optimizer_instances",
        parallelism.optimizer_instances_divide_ranks,
    ),
    "VPP without PP": (
        {VPP: 2},
        "parallelism.virtual_pipeline_model_parallel_size",
        parallelism.interleaving_needs_pipeline,
    ),
    "VPP does not divide a stage": (
        {PP: 2, VPP: 4},
        "parallelism.virtual_pipeline_model_parallel_size",
        parallelism.chunks_divide_stage,
    ),
    "CP does not divide the sequence": (
        {CP: 3},
        "parallelism.context_parallel_size",
        parallelism.context_parallel_divides_sequence,
    ),
    "sequence parallel does not divide the sequence": (
        {"model__seq_length": 2050, TP: 4, SP: True},
        "model.seq_length",
        parallelism.sequence_parallel_divides_sequence,
    ),
    "too few nodes": (
        {TP: 8, PP: 4},
        "slurm.train.nodes",
        parallelism.model_parallel_divides_world,
    ),
    "nodes do not fit": (
        {"nodes": 3, TP: 2, PP: 4, CP: 2},
        "slurm.train.nodes",
        parallelism.model_parallel_divides_world,
    ),
    "gather overlap without reduce overlap": (
        {"parallelism__overlap_param_gather": True},
        "parallelism.overlap_param_gather",
        parallelism.param_gather_overlap_needs_grad_reduce_overlap,
    ),
    "batch is not whole microbatches": (
        {BATCH: 500},
        "training.global_batch_size",
        batch.batch_is_multiple_of_microbatches,
    ),
    "batch below one microbatch": (
        {BATCH: 16},
        "training.global_batch_size",
        batch.batch_is_multiple_of_microbatches,
    ),
    "interleaving with an unfilled pipeline": (
        {PP: 4, VPP: 3, BATCH: 24},
        "training.global_batch_size",
        batch.interleaving_fills_pipeline,
    ),
    "a ramp-up that passes the batch by": (
        {RAMPUP: (64, 100, 10_000)},
        "training.rampup_batch_size",
        batch.rampup_reaches_batch,
    ),
    "a ramp-up of two numbers": (
        {RAMPUP: (64, 64)},
        "training.rampup_batch_size",
        batch.rampup_reaches_batch,
    ),
    "a ramp-up from above": (
        {RAMPUP: (1024, 32, 10_000)},
        "training.rampup_batch_size",
        batch.rampup_reaches_batch,
    ),
    "a ramp-up through parts of microbatches": (
        {RAMPUP: (32, 16, 10_000)},
        "training.rampup_batch_size",
        batch.rampup_is_multiple_of_microbatches,
    ),
    "a ramp-up that leaves the pipeline unfilled": (
        {RAMPUP: (8, 8, 10_000), PP: 4, VPP: 3},
        "training.rampup_batch_size",
        batch.rampup_is_multiple_of_microbatches,
    ),
    "overlap of TP without sequence parallel": (
        {TP: 2, "parallelism__tp_comm_overlap": True},
        "parallelism.tp_comm_overlap",
        parallelism.tensor_parallel_overlap_needs_sequence_parallel,
    ),
    **{
        name: (
            changes,
            "parallelism.pipeline_model_parallel_layout",
            parallelism.uneven_pipeline_has_all_layers,
        )
        for name, changes in REFUSED_LAYOUTS.items()
    },
}


@pytest.mark.parametrize(("changes", "path", "rule"), REFUSED.values(), ids=REFUSED)
def test_a_broken_rule_is_one_problem(changes, path, rule):
    assert broken(**changes) == [(path, rule)]


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


def test_nodes_with_which_the_model_does_not_fit_are_not_advised():
    """Ranks of 2 and 4 nodes can be divided, but fewer than 6 do not share the optimizer state enough."""
    shape = {
        "model__num_layers": 40,
        "model__hidden_size": 5120,
        HEADS: 40,
        "training__micro_batch_size": 1,
        TP: 4,
        PP: 4,
        BATCH: 1440,
    }
    [message] = errors(nodes=3, device_memory_gib=17, **shape)
    assert "; use 6 or 8, or choose parallel sizes" in message
