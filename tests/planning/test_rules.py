"""Every rule from both sides: what passes, and what a user reads when it does not."""

from __future__ import annotations

import pytest

from hpcgen.planning.rules import Facts, World, check
from tests.planning.cases import errors, valid_facts
from trainer.config import (
    BlendConfig,
    Dataset,
    ModelConfig,
    OptimizerConfig,
    ParallelismConfig,
    TrainingConfig,
)

TP = "parallelism__tensor_model_parallel_size"
PP = "parallelism__pipeline_model_parallel_size"
VPP = "parallelism__virtual_pipeline_model_parallel_size"
CP = "parallelism__context_parallel_size"
SP = "parallelism__sequence_parallel"
HEADS = "model__num_attention_heads"
GROUPS = "model__num_query_groups"
BATCH = "training__global_batch_size"
FULL = {"training__recompute_granularity": "full"}
ROPE = {"model__position_embedding_type": "rope"}
CORPUS, WEIGHED = Dataset(prefix="corpus"), Dataset(prefix="weighed", weight=0.5)

REFUSED = {
    "heads do not divide hidden size": (
        {HEADS: 24},
        "model.num_attention_heads does not divide model.hidden_size = 1024 (1024 / 24), and "
        "model.kv_channels is null; use 4, 8, 16 or 32",
    ),
    "query groups do not divide heads": (
        {GROUPS: 3},
        "model.num_query_groups does not divide model.num_attention_heads = 16 (16 / 3); "
        "use 1, 2, 4, 8 or 16",
    ),
    "odd kv_channels with rope": (
        {**ROPE, "model__kv_channels": 63},
        "model.kv_channels is odd, and position_embedding_type = rope rotates channels in pairs; "
        "use 62 or 64",
    ),
    "odd derived head width with rope": (
        {**ROPE, "model__hidden_size": 1008},
        "model.num_attention_heads makes heads of 63 channels (1008 / 16), and position_embedding_type = "
        "rope rotates channels in pairs; use 12, 14, 18 or 21",
    ),
    "positions shorter than the sequence": (
        {"model__max_position_embeddings": 1024},
        "model.max_position_embeddings is less than model.seq_length = 2048; use 2048, "
        "or a shorter seq_length",
    ),
    "padding cuts tokens off": (
        {"model__padded_vocab_size": 50000},
        "model.padded_vocab_size is less than the vocabulary, model.vocab_size = 50257; use 50304, or null, "
        "which pads vocab_size to a multiple of 128",
    ),
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
        "of it (8 / 12); use 1, 2, 4, 8 or 24",
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
        "parallelism.sequence_parallel shards activations over tensor-parallel ranks, and "
        "parallelism.tensor_model_parallel_size = 1 has no others; use false",
    ),
    "PP does not divide layers": (
        {PP: 5},
        "parallelism.pipeline_model_parallel_size does not divide model.num_layers = 12 (12 / 5); "
        "use 1, 2 or 4",
    ),
    "VPP without PP": (
        {VPP: 2},
        "parallelism.virtual_pipeline_model_parallel_size interleaves pipeline stages, and "
        "parallelism.pipeline_model_parallel_size = 1 has only one; use null",
    ),
    "VPP does not divide a stage": (
        {PP: 2, VPP: 4},
        "parallelism.virtual_pipeline_model_parallel_size does not divide the layers of a stage, "
        "model.num_layers / parallelism.pipeline_model_parallel_size = 12 / 2 = 6 (6 / 4); use 2, 3 or 6",
    ),
    "CP does not divide the sequence": (
        {CP: 3},
        "parallelism.context_parallel_size cuts each sequence into 2 x 3 slices, and model.seq_length = 2048 "
        "is not a multiple of 6 (2048 / 6); use 1, 2, 4, 8 or 16",
    ),
    "sequence parallel does not divide the sequence": (
        {"model__seq_length": 2050, TP: 4, SP: True},
        "model.seq_length is not a multiple of CP x TP = 1 x 4 = 4, over which "
        "parallelism.sequence_parallel = true shares it out (2050 / 4); use 2048 or 2052",
    ),
    "too few nodes": (
        {TP: 8, PP: 4},
        "slurm.train.nodes gives 2 x 8 = 16 ranks, and TP x PP x CP = 8 x 4 x 1 = 32 does not divide them "
        "(16 / 32); use 4 or 8, or parallel sizes whose product divides 16",
    ),
    "nodes do not fit": (
        {"nodes": 3, TP: 2, PP: 4, CP: 2},
        "slurm.train.nodes gives 3 x 8 = 24 ranks, and TP x PP x CP = 2 x 4 x 2 = 16 does not divide them "
        "(24 / 16); use 2 or 4, or parallel sizes whose product divides 24",
    ),
    "gather overlap without reduce overlap": (
        {"parallelism__overlap_param_gather": True},
        "parallelism.overlap_param_gather needs parallelism.overlap_grad_reduce = true, which is false; "
        "use false, or overlap_grad_reduce: true beside it",
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
        "training.global_batch_size makes 24 / (micro_batch_size x DP) = 24 / 8 = 3 microbatches, and "
        "parallelism.virtual_pipeline_model_parallel_size = 3 needs a multiple of "
        "parallelism.pipeline_model_parallel_size = 4 (3 / 4); use 32 or 64",
    ),
    "full recompute without a method": (
        {**FULL, "training__recompute_num_layers": 1},
        "training.recompute_method leaves open which layers training.recompute_granularity = full "
        "recomputes; use uniform or block",
    ),
    "full recompute without a number": (
        {**FULL, "training__recompute_method": "block"},
        "training.recompute_num_layers leaves open how many layers training.recompute_granularity = full "
        "recomputes; use 1",
    ),
    "selective recompute with a number": (
        {"training__recompute_granularity": "selective", "training__recompute_num_layers": 2},
        "training.recompute_num_layers is for recompute_granularity = full, and it is selective; use null, "
        "or recompute_granularity: full",
    ),
    "a method without recompute": (
        {"training__recompute_method": "block"},
        "training.recompute_method is for recompute_granularity = full, and it is null; use null, "
        "or recompute_granularity: full",
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
        "training.recompute_num_layers is more than the 12 layers of a model chunk; use 12, or less",
    ),
    "min_lr above lr": (
        {"optimizer__min_lr": 1e-3},
        "optimizer.min_lr is greater than optimizer.lr = 0.0003; use 3e-05",
    ),
    "warm-up given twice": (
        {"optimizer__lr_warmup_iters": 5, "optimizer__lr_warmup_fraction": 0.1},
        "optimizer.lr_warmup_iters and lr_warmup_fraction = 0.1 both set the warm-up; use null",
    ),
    "warm-up as long as the run": (
        {"optimizer__lr_warmup_iters": 1000},
        "optimizer.lr_warmup_iters is not less than training.train_iters = 1000, where the decay ends; "
        "use 100 or null",
    ),
    "warm-up as long as the decay": (
        {"optimizer__lr_warmup_iters": 500, "optimizer__lr_decay_iters": 500},
        "optimizer.lr_warmup_iters is not less than optimizer.lr_decay_iters = 500, where the decay ends; "
        "use 50 or null",
    ),
    "a default warm-up as long as the decay": (
        {"optimizer__lr_decay_iters": 100},
        "optimizer.lr_warmup_iters (null means 100) is not less than optimizer.lr_decay_iters = 100, where the "
        "decay ends; use 10",
    ),
    "data two ways": (
        {"data__datasets": (CORPUS,)},
        "data.mock and data.datasets are both given; samples come from one of them; "
        "keep one of datasets, mock",
    ),
    "no data": (
        {"data__mock": False},
        "data names no samples; give data.datasets, or data.train (with valid and test), or data.mock: true",
    ),
    "validation without training data": (
        {"data__mock": False, "data__valid": (CORPUS,)},
        "data.valid names a blend for one split, and data.train is empty; give data.train, or leave "
        "data.valid out and let data.split cut data.datasets",
    ),
    "some weights": (
        {"data__mock": False, "data__datasets": (WEIGHED, CORPUS)},
        "data.datasets[1].weight is missing, and other datasets of data.datasets have a weight; give every "
        "dataset a weight, or none to weigh by tokens",
    ),
    "split below zero": (
        {"data__mock": False, "data__datasets": (CORPUS,), "data__split": "99,-1,2"},
        "data.split is not three weights, for train, valid and test, with train's above 0; use 99990,8,2",
    ),
    "evaluation without documents": (
        {"data__mock": False, "data__datasets": (CORPUS,), "data__split": "100,0,0"},
        "training.eval_iters has nothing to read: data.split = 100,0,0 leaves no validation documents; "
        "use 0, or a data.split that gives valid a weight, as 99990,8,2",
    ),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_a_broken_rule_is_one_message_with_values_that_work(changes, message):
    assert errors(**changes) == [message]


ACCEPTED = {
    "nothing special": {},
    "kv_channels frees the heads": {HEADS: 24, "model__kv_channels": 64},
    "query groups below TP": {GROUPS: 4, TP: 8},
    "query groups above TP": {GROUPS: 8, TP: 2},
    "one query group": {GROUPS: 1, TP: 16},
    "an odd head width without rope": {"model__hidden_size": 1008},
    "rope": ROPE,
    "positions beyond the sequence": {"model__max_position_embeddings": 4096},
    "a padded size from elsewhere": {"model__padded_vocab_size": 50432, TP: 2},
    "no vocabulary size yet": {"model__vocab_size": None},
    "sequence parallel": {TP: 2, SP: True},
    "context and sequence parallel": {TP: 2, SP: True, CP: 2},
    "context parallel alone": {CP: 2},
    "a virtual pipeline of one": {VPP: 1},
    "interleaving over two stages": {PP: 2, VPP: 3},
    "both overlaps": {"parallelism__overlap_grad_reduce": True, "parallelism__overlap_param_gather": True},
    "reduce overlap alone": {"parallelism__overlap_grad_reduce": True},
    "one microbatch": {BATCH: 32},
    "fewer microbatches than stages": {PP: 4, BATCH: 8},
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
    "datasets": {"data__mock": False, "data__datasets": (CORPUS, CORPUS)},
    "weighed datasets": {"data__mock": False, "data__datasets": (WEIGHED, WEIGHED)},
    "a blend per split": {"data__mock": False, "data__train": (CORPUS,), "data__valid": (WEIGHED,)},
    "training data alone": {"data__mock": False, "data__train": (CORPUS,)},
    "a split with spaces and fractions": {
        "data__mock": False,
        "data__datasets": (CORPUS,),
        "data__split": "0.9, .05, 0.05",
    },
    "no evaluation": {
        "data__mock": False,
        "data__datasets": (CORPUS,),
        "data__split": "100,0,0",
        "training__eval_iters": 0,
    },
}


@pytest.mark.parametrize("changes", ACCEPTED.values(), ids=ACCEPTED)
def test_what_obeys_the_rules_passes(changes):
    assert errors(**changes) == []


@pytest.mark.parametrize(
    "split", ["", "99", "90,10", "1,2,3,4", "0,1,1", "a,b,c", "1;2;3", "9" * 400 + ",1,1"]
)
def test_a_split_is_three_weights(split):
    found = errors(data__mock=False, data__datasets=(CORPUS,), data__split=split)
    assert found == [
        "data.split is not three weights, for train, valid and test, with train's above 0; use 99990,8,2"
    ]


def test_each_mistake_is_reported_once():
    found = errors(**{TP: 6, PP: 5, "optimizer__min_lr": 1.0, "training__recompute_num_layers": 3})
    assert [message.split()[0] for message in found] == [
        "parallelism.tensor_model_parallel_size",
        "parallelism.pipeline_model_parallel_size",
        "training.recompute_num_layers",
        "optimizer.min_lr",
    ]


def test_hints_take_each_other_into_account():
    """TP is taken to be 4, the nearest to 6, when PP is looked at: TP x PP must divide 16 ranks."""
    found = errors(**{TP: 6, PP: 5})
    assert [message.partition("; ")[2] for message in found] == ["use 1, 2, 4, 8 or 16", "use 1, 2 or 4"]


def test_one_wrong_size_does_not_cascade():
    """TP = 7 fits neither the heads, the groups, the MLP, the vocabulary, the world nor the batch."""
    found = errors(**{TP: 7, GROUPS: 4, SP: True})
    assert found == [
        "parallelism.tensor_model_parallel_size does not divide model.num_attention_heads = 16 (16 / 7); "
        "use 2, 4, 8 or 16"
    ]


def test_ranks_that_are_not_in_nodes():
    """A local run counts ranks; the key is then another one."""
    facts = valid_facts(**{TP: 2, BATCH: 24})
    facts = Facts(
        model=facts.model,
        parallelism=facts.parallelism,
        training=facts.training,
        optimizer=facts.optimizer,
        data=facts.data,
        world=World(path="slurm.train.ntasks_per_node", count=5, ranks_each=1),
        gpus_per_node=5,
    )
    [problem], _ = check(facts)
    assert problem.path == "slurm.train.ntasks_per_node"
    assert problem.reason == "gives 5 ranks, and TP x PP x CP = 2 x 1 x 1 = 2 does not divide them (5 / 2)"
    assert problem.hint == "use 4 or 6, or parallel sizes whose product divides 5"


@pytest.mark.parametrize(
    "changes",
    [
        {TP: 2**53},
        {"model__hidden_size": 2**53 - 1},
        {"nodes": 2**53, TP: 3},
        {BATCH: 2**53 - 1},
        {CP: 2**53},
    ],
)
def test_absurd_numbers_end_in_a_message(changes):
    assert len(errors(**changes)) == 1


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
