"""Every rule from both sides: what passes, and what a user reads when it does not."""

from __future__ import annotations

import dataclasses

import pytest

from hpcgen.planning.rules import Facts, World, check
from tests.planning.cases import errors, valid_facts, warnings
from trainer.contract.config import (
    BlendConfig,
    Dataset,
    ModelConfig,
    OptimizerConfig,
    ParallelismConfig,
    RopeScaling,
    TrainingConfig,
)
from trainer.contract.evaluation import EvaluationData

TP = "parallelism__tensor_model_parallel_size"
PP = "parallelism__pipeline_model_parallel_size"
FIRST = "parallelism__num_layers_in_first_pipeline_stage"
EMBEDDING = "parallelism__account_for_embedding_in_pipeline_split"
LOSS = "parallelism__account_for_loss_in_pipeline_split"
LAYOUT = "parallelism__pipeline_model_parallel_layout"
VPP = "parallelism__virtual_pipeline_model_parallel_size"
CP = "parallelism__context_parallel_size"
SP = "parallelism__sequence_parallel"
HEADS = "model__num_attention_heads"
GROUPS = "model__num_query_groups"
BATCH = "training__global_batch_size"
RAMPUP = "training__rampup_batch_size"
SECTIONS = ("model", "parallelism", "training", "optimizer", "data", "checkpoint", "logging", "evaluation")
FULL = {"training__recompute_granularity": "full"}
GRAPHS = {"training__cuda_graph_impl": "transformer_engine"}
ROPE = {"model__position_embedding_type": "rope"}
LLAMA3 = RopeScaling(
    rope_type="llama3",
    factor=8.0,
    original_max_position_embeddings=8192,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)
MLA = ROPE | {"model__multi_latent_attention": True}
MTP = ROPE | {"model__mtp_num_layers": 1, "model__untie_embeddings_and_output_weights": True}
YARN = RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=8192)
WIKITEXT = EvaluationData(name="wikitext", prefix="wikitext")
TEXT = {"evaluation__data": (WIKITEXT,)}
EVALUATION_TP = "evaluation__tensor_model_parallel_size"
EVALUATION_PP = "evaluation__pipeline_model_parallel_size"
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
        "model.kv_channels is odd, but position_embedding_type = rope rotates channels in pairs; use 62 or "
        "64",
    ),
    "odd derived head width with rope": (
        {**ROPE, "model__hidden_size": 1008},
        "model.num_attention_heads results in heads of 63 channels (1008 / 16), but "
        "position_embedding_type = rope rotates channels in pairs; use 12, 14, 18 or 21",
    ),
    "positions shorter than the sequence": (
        {"model__max_position_embeddings": 1024},
        "model.max_position_embeddings is less than model.seq_length = 2048; use 2048, or reduce seq_length",
    ),
    "an activation beside swiglu": (
        {"model__swiglu": True, "model__activation_func": "gelu"},
        "model.activation_func has no effect, because swiglu = true uses SiLU; set swiglu to false or remove it",
    ),
    "biases without that of QKV": (
        {"model__add_qkv_bias": False},
        "model.add_qkv_bias contradicts add_bias_linear = true, which includes this bias; set add_bias_linear to "
        "false or remove add_qkv_bias",
    ),
    "scaled rope without rope": (
        {"model__rope_scaling": RopeScaling(rope_type="linear", factor=2.0)},
        "model.rope_scaling requires position_embedding_type = rope, but it is learned_absolute; set "
        "position_embedding_type to rope or remove rope_scaling",
    ),
    "llama3 without a key": (
        {**ROPE, "model__rope_scaling": dataclasses.replace(LLAMA3, low_freq_factor=None)},
        "model.rope_scaling has no low_freq_factor, which rope_type = llama3 requires; take the value from the model's "
        "config.json",
    ),
    "yarn without the length of the first training": (
        {**ROPE, "model__rope_scaling": RopeScaling(rope_type="yarn", factor=4.0)},
        "model.rope_scaling has no original_max_position_embeddings, which rope_type = yarn requires; set it to the "
        "seq_length of the first training, or take the value from the model's config.json",
    ),
    "linear with a key of another type": (
        {**ROPE, "model__rope_scaling": RopeScaling(rope_type="linear", factor=2.0, beta_fast=32.0)},
        "model.rope_scaling.beta_fast is not used by rope_type = linear; remove it",
    ),
    "bounds of llama3 in the wrong order": (
        {**ROPE, "model__rope_scaling": dataclasses.replace(LLAMA3, low_freq_factor=4.0)},
        "model.rope_scaling.high_freq_factor must be greater than low_freq_factor = 4; use more than 4",
    ),
    "bounds of yarn in the wrong order": (
        {**ROPE, "model__rope_scaling": dataclasses.replace(YARN, beta_slow=33.0)},
        "model.rope_scaling.beta_fast must be at least beta_slow = 33; use 33 or more",
    ),
    "padding cuts tokens off": (
        {"model__padded_vocab_size": 50000},
        "model.padded_vocab_size is less than model.vocab_size = 50257; use 50304, or set it to null, "
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
        "set account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split to true, for stages of 8 "
        "layers with one less on the first and on the last",
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
    "an MTP layer in the middle of a layout": (
        MTP | {PP: 2, LAYOUT: "Et*6m|t*6L"},
        "parallelism.pipeline_model_parallel_layout must have all MTP layers (m) directly before the L; use for "
        "example Et*6|t*6mL",
    ),
    "MTP with tied embeddings in a pipeline": (
        MTP | {PP: 2, "model__untie_embeddings_and_output_weights": False},
        "model.untie_embeddings_and_output_weights does not work with model.mtp_num_layers = 1 and "
        "parallelism.pipeline_model_parallel_size = 2, because Megatron-Core cannot save the shared matrix; use true, "
        "or set parallelism.pipeline_model_parallel_size to 1",
    ),
    "MTP with learned positions": (
        {"model__mtp_num_layers": 1},
        "model.mtp_num_layers requires position_embedding_type = rope, but it is learned_absolute; set "
        "position_embedding_type to rope or remove mtp_num_layers",
    ),
    "MTP with another model": (
        MTP | {"model__model_provider": "my.models:Model"},
        "model.mtp_num_layers requires Megatron-Core's GPTModel, but model.model_provider is set; remove one of them",
    ),
    "MTP in uniform groups": (
        MTP | FULL | {"training__recompute_method": "uniform", "training__recompute_num_layers": 2},
        "training.recompute_num_layers must be 1 with model.mtp_num_layers and recompute_method = uniform; use 1, or "
        "set recompute_method to block",
    ),
    "MTP that TP does not divide": (
        MLA | MTP | {"model__hidden_size": 1022, "model__num_attention_heads": 8, SP: True, TP: 4},
        "parallelism.tensor_model_parallel_size does not divide model.hidden_size = 1022 (1022 / 4), which "
        "model.mtp_num_layers requires; use 2",
    ),
    "MTP without a layer of the user before it": (
        MTP | {PP: 2, LAYOUT: "Et*12|mL", "model__layer_spec": "my.layers:spec"},
        "model.layer_spec would not change the MTP layers, which have the parts of the last layer on their pipeline "
        "stage, but there is none; move a layer to the last stage",
    ),
    "MTP in graphs": (
        MTP | GRAPHS,
        "training.cuda_graph_impl is not tested with model.mtp_num_layers; use none",
    ),
    "MLA in graphs": (
        MLA | GRAPHS,
        "training.cuda_graph_impl is not tested with model.multi_latent_attention; use none",
    ),
    "MLA with learned positions": (
        {"model__multi_latent_attention": True},
        "model.multi_latent_attention requires position_embedding_type = rope, but it is learned_absolute; set "
        "position_embedding_type to rope",
    ),
    "a latent without MLA": (
        {"model__kv_lora_rank": 512},
        "model.kv_lora_rank requires multi_latent_attention = true; set it, or set kv_lora_rank to null",
    ),
    "MLA with query groups": (
        MLA | {GROUPS: 4},
        "model.num_query_groups is not used by multi_latent_attention, in which each head has keys and values of its "
        "own; use null",
    ),
    "MLA with another width of heads": (
        MLA | {"model__kv_channels": 128},
        "model.kv_channels is not qk_head_dim + qk_pos_emb_head_dim = 192; use null",
    ),
    "latents without MLA": (
        {"model__q_lora_rank": 64, "model__v_head_dim": 32},
        "model.q_lora_rank requires multi_latent_attention = true. The same applies to v_head_dim; set it, or set "
        "q_lora_rank and v_head_dim to null",
    ),
    "MLA with an odd rotated width": (
        MLA | {"model__qk_pos_emb_head_dim": 33},
        "model.qk_pos_emb_head_dim is odd, but rope rotates channels in pairs; use 32 or 34",
    ),
    "MLA with a bias of queries": (
        MLA | {"model__add_qkv_bias": True},
        "model.add_qkv_bias is not supported by multi_latent_attention, which has no such bias; use false",
    ),
    "MLA with a factor of YaRN": (
        MLA | {"model__rope_scaling": dataclasses.replace(YARN, attention_factor=1.2)},
        "model.rope_scaling.attention_factor is not supported with multi_latent_attention, which computes it from "
        "mscale and mscale_all_dim; use null",
    ),
    "MLA with half of YaRN's scales": (
        MLA | {"model__rope_scaling": dataclasses.replace(YARN, mscale=1.0)},
        "model.rope_scaling requires mscale and mscale_all_dim together, both above 0, with multi_latent_attention; "
        "set both, as in the model's config.json, or neither",
    ),
    "MLA with YaRN's exact bounds": (
        MLA | {"model__rope_scaling": dataclasses.replace(YARN, truncate=False)},
        "model.rope_scaling.truncate is always true with multi_latent_attention; use true",
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
        "parallelism.context_parallel_size = 2; use null, or set context_parallel_size to 1",
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
    "fp8 without Transformer Engine": (
        {"training__fp8": "hybrid", "training__transformer_impl": "torch"},
        "training.transformer_impl does not support training.fp8 = hybrid; use transformer_engine or null",
    ),
    "fp8 of fp32": (
        {"training__fp8": "hybrid", "training__precision": "fp32"},
        "training.precision cannot be combined with training.fp8 = hybrid, which discards its precision; "
        "use bf16, or set training.fp8 to null",
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
    "fp8 with odd tokens": (
        {"training__fp8": "hybrid", "model__seq_length": 2046},
        "model.seq_length x micro_batch_size results in 4092 tokens per rank, but training.fp8 = hybrid "
        "requires a multiple of 8; use 2040 or 2048, or set training.fp8 to null",
    ),
    "graphs of torch's layers": (
        GRAPHS | {"training__transformer_impl": "torch"},
        "training.transformer_impl does not support training.cuda_graph_impl = transformer_engine; use "
        "transformer_engine or null, or set training.cuda_graph_impl to none",
    ),
    "graphs of fp16": (
        GRAPHS | {"training__precision": "fp16"},
        "training.precision does not support training.cuda_graph_impl = transformer_engine; use bf16, or "
        "set training.cuda_graph_impl to none",
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
        "training.fp8 to hybrid",
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
    "layers that are no import path": (
        {"model__layer_spec": "my layers:spec"},
        "model.layer_spec is not an import path; use package.module:function or file.py:function",
    ),
    "checkpoints to keep that are not written": (
        {"checkpoint__keep_every": 250, "checkpoint__save_interval": 100},
        "checkpoint.keep_every is not a multiple of checkpoint.save_interval = 100 (250 / 100); use 200 or 300",
    ),
    "steps to keep with saves by the clock": (
        {"checkpoint__keep_every": 250},
        "checkpoint.keep_every keeps only multiples of this step, but without checkpoint.save_interval any "
        "step may be saved; use null, or set checkpoint.save_interval to a divisor of it",
    ),
    "finetuning of nothing": (
        {"checkpoint__finetune": True},
        "checkpoint.finetune loads weights from checkpoint.load, which is null; use false, or set "
        "checkpoint.load to a directory of checkpoints",
    ),
    "a change of nothing": (
        {"checkpoint__changed": ("optimizer.lr", "training.lr")},
        "checkpoint.changed[1] is not a hyperparameter; did you mean optimizer.lr?",
    ),
    "evaluation of checkpoints that are not written": (
        {**TEXT, "evaluation__every": 250, "checkpoint__save_interval": 100},
        "evaluation.every is not a multiple of checkpoint.save_interval = 100 (250 / 100); use 200 or 300",
    ),
    "evaluation with saves by the clock": (
        {**TEXT, "evaluation__every": 250},
        "evaluation.every selects multiples of this step, but without checkpoint.save_interval any step may be saved; "
        "use null, or set checkpoint.save_interval to a divisor of it",
    ),
    "evaluation of nothing": (
        {"evaluation__every": 200, "checkpoint__save_interval": 100},
        "evaluation.every queues jobs with nothing to compute, because evaluation.data and evaluation.tasks are empty; "
        "use null, or set evaluation.data or evaluation.tasks",
    ),
    "two texts of one name": (
        {"evaluation__data": (WIKITEXT, EvaluationData(name="wikitext", prefix="other"))},
        "evaluation.data[1].name is a duplicate of evaluation.data[0].name; remove it",
    ),
    "a task twice": (
        {"evaluation__tasks": ("hellaswag", "piqa", "hellaswag")},
        "evaluation.tasks[2] is a duplicate of evaluation.tasks[0]; remove it",
    ),
    "TP of the evaluation does not divide heads": (
        {EVALUATION_TP: 3, "evaluation_ranks": 24},
        "evaluation.tensor_model_parallel_size does not divide model.num_attention_heads = 16 (16 / 3); "
        "use 1, 2, 4 or 8",
    ),
    "TP of the evaluation and query groups": (
        {EVALUATION_TP: 8, HEADS: 48, "model__hidden_size": 3072, GROUPS: 12},
        "evaluation.tensor_model_parallel_size neither divides model.num_query_groups = 12 nor is a multiple of it "
        "(12 / 8); use 1, 2 or 4",
    ),
    "stages of the evaluation without a layer": (
        {EVALUATION_PP: 16, "evaluation_ranks": 16},
        "evaluation.pipeline_model_parallel_size is more than model.num_layers = 12; use 12",
    ),
    "more model-parallel ranks than the evaluation job has": (
        {EVALUATION_TP: 16},
        "evaluation.tensor_model_parallel_size results in TP x PP = 16 x 1 = 16, which does not divide 1 x 8 = 8 ranks "
        "of the evaluation job (8 / 16); use 1, 2, 4 or 8, or change slurm.evaluate.nodes",
    ),
    "PP does not divide the ranks of the evaluation job": (
        {EVALUATION_PP: 3, EVALUATION_TP: 2},
        "evaluation.pipeline_model_parallel_size results in TP x PP = 2 x 3 = 6, which does not divide 1 x 8 = 8 ranks "
        "of the evaluation job (8 / 6); use 1, 2 or 4, or change slurm.evaluate.nodes",
    ),
    "a profile that ends before it starts": (
        {"logging__profile_step_start": 10, "logging__profile_step_end": 10},
        "logging.profile_step_end must be greater than logging.profile_step_start = 10; use 12",
    ),
    "a profile after the run": (
        {"logging__profile_step_start": 1000},
        "logging.profile_step_start must be less than training.train_iters = 1000; use 998",
    ),
    "the end of no profile": (
        {"logging__profile_step_end": 12},
        "logging.profile_step_end has no effect, because logging.profile_step_start is null; use null",
    ),
    "a profile of ranks that are not there": (
        {"logging__profile_step_start": 10, "logging__profile_ranks": (0, 16)},
        "logging.profile_ranks contains rank 16, but the last of 2 x 8 = 16 ranks is rank 15; use [0]",
    ),
    "a memory history of no profile": (
        {"logging__record_memory_history": True},
        "logging.record_memory_history is written at the end of a profile, but logging.profile_step_start "
        "is null; use false, or set logging.profile_step_start",
    ),
    "data two ways": (
        {"data__datasets": (CORPUS,)},
        "data.mock conflicts with data.datasets. Samples come from only one of them; keep one of datasets, "
        "mock",
    ),
    "no data": (
        {"data__mock": False},
        "data has no source of samples; set data.corpus, data.datasets, data.train (with valid and test), or "
        "data.mock: true",
    ),
    "validation without training data": (
        {"data__mock": False, "data__valid": (CORPUS,)},
        "data.valid requires data.train, which is empty; set data.train, or remove data.valid and divide "
        "data.datasets with data.split",
    ),
    "some weights": (
        {"data__mock": False, "data__datasets": (WEIGHED, CORPUS)},
        "data.datasets[1].weight is missing, but other datasets of data.datasets have a weight; give all "
        "datasets a weight, or none to weight them by tokens",
    ),
    "split below zero": (
        {"data__mock": False, "data__datasets": (CORPUS,), "data__split": "99,-1,2"},
        "data.split must be three weights, for train, valid and test, with train's above 0; use 99990,8,2",
    ),
    "evaluation without documents": (
        {"data__mock": False, "data__datasets": (CORPUS,), "data__split": "100,0,0"},
        "training.eval_iters requires validation documents, but data.split = 100,0,0 leaves none; use 0, "
        "or set a data.split with a weight for valid, such as 99990,8,2",
    ),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_a_broken_rule_is_one_message_with_values_that_work(changes, message):
    assert errors(**changes) == [message]


ACCEPTED = {
    "llama3": {**ROPE, "model__rope_scaling": LLAMA3},
    "yarn": {**ROPE, "model__rope_scaling": YARN},
    "linear": {**ROPE, "model__rope_scaling": RopeScaling(rope_type="linear", factor=1.0)},
    "a bias of QKV only": {"model__add_bias_linear": False, "model__add_qkv_bias": True},
    "a window longer than the sequence": {"model__window_size": 4096, "model__activation_func": "gelu"},
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
    "a ramp-up": {RAMPUP: (32, 32, 10_000)},
    "a ramp-up in one step": {RAMPUP: (512, 32, 10_000)},
    "fp8 with current scaling": {"training__fp8": "hybrid"},
    "fp8 with delayed scaling": {
        "training__fp8": "e4m3",
        "training__fp8_recipe": "delayed",
        "training__fp8_amax_history_len": 16,
    },
    "fp16 with a fixed scale": {"training__precision": "fp16", "optimizer__loss_scale": 128.0},
    "overlap of TP": {TP: 2, SP: True, "parallelism__tp_comm_overlap": True},
    "graphs in a pipeline": GRAPHS | {PP: 2, VPP: 3},
    "graphs with a ramp-up": GRAPHS | {RAMPUP: (32, 32, 10_000)},
    "graphs with selective recompute": GRAPHS | {"training__recompute_granularity": "selective"},
    "WSD": {"optimizer__lr_decay_style": "WSD", "optimizer__lr_wsd_decay_style": "linear"},
    "a schedule in a file": {"optimizer__lr_schedule": "../my schedules/restarts.py:rate"},
    "layers of a package": {"model__layer_spec": "my.layers:spec"},
    "MTP after a layer of a package": MTP
    | {PP: 2, LAYOUT: "Et*11|tmL", "model__layer_spec": "my.layers:spec"},
    "checkpoints to keep": {"checkpoint__keep_every": 300, "checkpoint__save_interval": 100},
    "evaluation": {**TEXT, "evaluation__every": 200, "checkpoint__save_interval": 100},
    "evaluation by hand": {"evaluation__tasks": ("hellaswag",), EVALUATION_TP: 4, EVALUATION_PP: 2},
    "changed hyperparameters": {"checkpoint__changed": ("optimizer.lr", "data.datasets")},
    "a profile": {"logging__profile_step_start": 10, "logging__record_memory_history": True},
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
    "MLA": MLA | {TP: 2, SP: True, "model__hidden_size": 1000, "model__rope_scaling": YARN},
    "MLA with DeepSeek's YaRN": MLA
    | {"model__rope_scaling": dataclasses.replace(YARN, mscale=1.0, mscale_all_dim=1.0)},
    "MTP": MLA | MTP | {PP: 2, LAYOUT: "Et*7|t*5mL"},
    "MTP layers that are recomputed": MTP
    | FULL
    | {"training__recompute_method": "uniform", "training__recompute_num_layers": 1},
    "no evaluation": {
        "data__mock": False,
        "data__datasets": (CORPUS,),
        "data__split": "100,0,0",
        "training__eval_iters": 0,
    },
}


@pytest.mark.parametrize("changes", ACCEPTED.values(), ids=ACCEPTED)
def test_valid_values_pass(changes):
    assert errors(**changes) == []


def test_training_does_not_queue_the_final_checkpoint_unless_it_is_a_multiple():
    evaluated = {**TEXT, "checkpoint__save_interval": 100}
    assert warnings(**evaluated, evaluation__every=200) == []
    assert warnings(**evaluated, evaluation__every=300) == [
        "evaluation.every does not divide training.train_iters = 1000, so training does not queue an evaluation of the "
        "final checkpoint; use 100 or 200"
    ]


def test_tasks_without_a_directory_of_data_sets_are_a_warning():
    tasks = {"evaluation__tasks": ("hellaswag", "own.yaml", "mmlu")}
    assert warnings(**tasks) == [
        "evaluation.hf_home is null, so a job of the cluster finds no data set for evaluation.tasks (hellaswag, mmlu); "
        "set it to a directory that python -m trainer.evaluate --download has filled"
    ]
    assert warnings(**tasks, evaluation__hf_home="/huggingface") == []
    assert warnings(evaluation__tasks=("own.yaml",)) == []


@pytest.mark.parametrize(
    "split", ["", "99", "90,10", "1,2,3,4", "0,1,1", "a,b,c", "1;2;3", "9" * 400 + ",1,1"]
)
def test_a_split_is_three_weights(split):
    found = errors(data__mock=False, data__datasets=(CORPUS,), data__split=split)
    assert found == [
        "data.split must be three weights, for train, valid and test, with train's above 0; use 99990,8,2"
    ]


def test_each_mistake_is_reported_once():
    found = errors(**{TP: 6, PP: 5, "optimizer__min_lr": 1.0, "training__recompute_num_layers": 3})
    assert [message.split()[0] for message in found] == [
        "parallelism.tensor_model_parallel_size",
        "parallelism.pipeline_model_parallel_size",
        "training.recompute_num_layers",
        "optimizer.min_lr",
    ]


def test_hints_are_consistent_with_each_other():
    """TP is taken to be 4, the nearest to 6, when PP is looked at: TP x PP must divide 16 ranks."""
    found = errors(**{TP: 6, PP: 5})
    assert [message.partition("; ")[2] for message in found] == [
        "use 1, 2, 4, 8 or 16",
        "use 1, 2 or 4, or divide the layers unevenly with pipeline_model_parallel_layout",
    ]


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
    assert problem.reason == "results in 5 ranks, which TP x PP x CP = 2 x 1 x 1 = 2 does not divide (5 / 2)"
    assert problem.hint == "use 4 or 6, or choose parallel sizes whose product divides 5"


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


def test_settings_that_need_gpus_are_refused_without_gpus():
    facts = dataclasses.replace(valid_facts(training__fp8="hybrid", **{TP: 2, SP: True}), device="cpu")
    facts = facts.with_value("parallelism.tp_comm_overlap", True)
    facts = facts.with_value("training.cuda_graph_impl", "transformer_engine")
    facts = facts.with_value("training.transformer_impl", "transformer_engine")
    facts = facts.with_value("training.cross_entropy_fusion_impl", "te")
    engine = "requires Transformer Engine, but the cluster's nodes have no GPUs"
    assert [(problem.path, problem.reason) for problem in check(facts)[0]] == [
        ("parallelism.tp_comm_overlap", "requires Transformer Engine, but the cluster's nodes have no GPUs"),
        ("training.fp8", "requires GPUs, but the cluster's nodes have none"),
        ("training.transformer_impl", engine),
        ("training.cross_entropy_fusion_impl", engine),
        ("training.cuda_graph_impl", "requires GPUs, but the cluster's nodes have none"),
    ]
