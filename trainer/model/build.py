"""Builds this rank's chunks of the GPT from the configuration, wrapped for data parallelism."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from trainer.contract import imports
from trainer.contract.config import ModelConfig, ParallelismConfig, TrainerConfig
from trainer.contract.experts import expert_tensor_parallel_size, num_moe_layers
from trainer.contract.pipeline import chunk_layers, core_layout, uneven_keys
from trainer.model import cuda_graphs, experts, layers, multi_token, rotary
from trainer.model.activation import activation
from trainer.model.initialization import initialize_by_name
from trainer.model.kernels import Kernels

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Data type of the model for each precision that has fp32 master weights."""


def build_model(
    config: TrainerConfig, groups: ProcessGroupCollection, kernels: Kernels
) -> list[DistributedDataParallel]:
    """Build this rank's model chunks, in pipeline order: one, or virtual_pipeline_model_parallel_size."""
    core = transformer_config(config, kernels)
    if core.tp_comm_overlap:
        _allocate_overlap_buffers(config, groups)
    chunks = build_chunks(config, core, groups, kernels)
    for chunk in chunks:
        initialize_by_name(
            chunk, config.training.seed, config.model.init_method_std, config.model.num_layers, groups
        )
    if config.training.precision in HALF:
        chunks = [Float16Module(core, chunk) for chunk in chunks]
    layout = config.parallelism
    data_parallel = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        num_distributed_optimizer_instances=layout.num_distributed_optimizer_instances,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=layout.overlap_grad_reduce,
        overlap_param_gather=layout.overlap_param_gather,
        average_in_collective=False,
    )
    with cuda_graphs.recordable_gradients(config):
        model = [
            DistributedDataParallel(
                core, data_parallel, chunk, disable_bucketing=index > 0, pg_collection=groups
            )
            for index, chunk in enumerate(chunks)
        ]
    _connect_schedule(core, layout.overlap_grad_reduce, model)
    return model


def build_chunks(
    config: TrainerConfig,
    core: TransformerConfig,
    groups: ProcessGroupCollection,
    kernels: Kernels,
) -> list[GPTModel]:
    """Build this rank's model chunks in pipeline order, with undefined weights."""
    # On a GPU, Core needs its own generators, although none of its weights are used. Core's own tracker cannot be
    # recorded in graphs, but Transformer Engine's can.
    uses_graphs = config.training.cuda_graph_impl != "none"
    model_parallel_cuda_manual_seed(config.training.seed, te_rng_tracker=uses_graphs)
    stages = config.parallelism.virtual_pipeline_model_parallel_size
    vp_stages = [None] if stages is None else range(stages)
    return [_build_chunk(config, core, groups, kernels, vp_stage) for vp_stage in vp_stages]


def transformer_config(config: TrainerConfig, kernels: Kernels) -> TransformerConfig:
    """Megatron-Core's configuration for the model and layout."""
    model, layout, training = config.model, config.parallelism, config.training
    dtype = HALF.get(training.precision, torch.float32)
    interleaved = layout.virtual_pipeline_model_parallel_size is not None
    on_gpu, has_engine = kernels.on_gpu, kernels.transformer_engine is not None
    compiles = on_gpu and not training.deterministic_mode
    activation_func, bias_activation_fusion = activation(model, on_gpu=on_gpu)
    is_latent = model.multi_latent_attention
    return (MLATransformerConfig if is_latent else TransformerConfig)(
        **(_latent_attention(model) if is_latent else {}),
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        ffn_hidden_size=model.ffn_hidden_size,
        num_query_groups=model.num_query_groups,
        kv_channels=model.kv_channels,
        normalization=model.normalization,
        layernorm_epsilon=model.layernorm_epsilon,
        gated_linear_unit=model.swiglu,
        activation_func=activation_func,
        add_bias_linear=model.add_bias_linear,
        add_qkv_bias=model.add_qkv_bias,
        qk_layernorm=model.qk_layernorm,
        mtp_num_layers=model.mtp_num_layers,
        mtp_loss_scaling_factor=model.mtp_loss_scaling_factor,
        # Core counts the keys before the token itself and those after it.
        window_size=None if model.window_size is None else (model.window_size - 1, 0),
        cp_comm_type=_cp_comm_type(config) if has_engine else None,
        hierarchical_context_parallel_sizes=list(layout.hierarchical_context_parallel_sizes or ()) or None,
        softmax_scale=rotary.softmax_scale(model),
        attention_dropout=model.attention_dropout,
        hidden_dropout=model.hidden_dropout,
        init_method=_leave_as_is,
        output_layer_init_method=_leave_as_is,
        use_cpu_initialization=not on_gpu,
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline_model_parallel_size,
        pipeline_model_parallel_layout=_pipeline_layout(config),
        context_parallel_size=layout.context_parallel_size,
        sequence_parallel=layout.sequence_parallel,
        tp_comm_overlap=layout.tp_comm_overlap,
        bf16=training.precision == "bf16",
        fp16=training.precision == "fp16",
        fp8=training.fp8,
        fp8_recipe=training.fp8_recipe,
        fp8_amax_history_len=training.fp8_amax_history_len,
        fp8_amax_compute_algo=training.fp8_amax_compute_algo,
        cuda_graph_impl=training.cuda_graph_impl,
        deterministic_mode=training.deterministic_mode,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        recompute_granularity=training.recompute_granularity,
        recompute_method=training.recompute_method,
        recompute_num_layers=training.recompute_num_layers,
        recompute_modules=None if training.recompute_modules is None else list(training.recompute_modules),
        # In an interleaved schedule with 2 stages, batched point-to-point calls silently produce wrong gradients.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        # The loss is the mean over the tokens of the global batch, independent of their distribution over ranks.
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=kernels.weight_gradient is not None,
        **_experts(model, layout, kernels),
        cross_entropy_loss_fusion=compiles,  # not deterministic, according to Megatron-LM
        cross_entropy_fusion_impl=kernels.cross_entropy,
        bias_activation_fusion=bias_activation_fusion,
        bias_dropout_fusion=on_gpu,
        masked_softmax_fusion=False,
        # Core's fused rope for latent attention is experimental, and only for YaRN.
        apply_rope_fusion=has_engine and model.position_embedding_type == "rope" and not is_latent,
        persist_layer_norm=has_engine,
    )


def _latent_attention(model: ModelConfig) -> dict[str, Any]:
    """The arguments that only MLATransformerConfig has."""
    return {
        "q_lora_rank": model.q_lora_rank,
        "kv_lora_rank": model.kv_lora_rank,
        "qk_head_dim": model.qk_head_dim,
        "qk_pos_emb_head_dim": model.qk_pos_emb_head_dim,
        "v_head_dim": model.v_head_dim,
        **rotary.latent_attention(model),
    }


def _experts(model: ModelConfig, layout: ParallelismConfig, kernels: Kernels) -> dict[str, Any]:
    """Fields of Core's configuration for a mixture of experts. Empty for a dense model."""
    if model.num_moe_experts is None:
        return {}
    has_dense_layers = num_moe_layers(model) < model.num_layers
    return {
        **{
            field.name: getattr(model, field.name)
            for field in dataclasses.fields(model)
            if "moe" in field.name
        },
        # With a pattern, Core stores each layer under its own number instead of stacking all of them.
        "moe_layer_freq": list(model.moe_layer_freq or ()) if has_dense_layers else 1,
        "expert_model_parallel_size": layout.expert_model_parallel_size,
        "expert_tensor_parallel_size": expert_tensor_parallel_size(layout),
        "moe_token_dispatcher_type": layout.moe_token_dispatcher_type,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": kernels.grouped_gemm,
        "moe_permute_fusion": kernels.transformer_engine is not None and experts.has_fused_permutation(),
    }


def _cp_comm_type(config: TrainerConfig) -> str:
    """How Transformer Engine's context-parallel ranks exchange keys and values.

    Its p2p refuses windows (context_parallel.py, attn_forward_func_with_cp).
    """
    default = "p2p" if config.model.window_size is None else "all_gather"
    return config.parallelism.cp_comm_type or default


def _pipeline_layout(config: TrainerConfig) -> list[list[str]] | None:
    """Core's layout of an uneven pipeline, for any of the keys that divide the layers unevenly."""
    num_mtp = config.model.mtp_num_layers
    chunks = chunk_layers(config.model.num_layers, config.parallelism, num_mtp)
    return core_layout(chunks, num_mtp) if chunks is not None and uneven_keys(config.parallelism) else None


def _leave_as_is(weight: torch.Tensor) -> torch.Tensor:
    """Initialization hook for Core that does nothing. `initialize_by_name` initializes the chunk after it is built.

    perform_initialization = False would also skip the attribute that marks a weight as split over tensor-parallel
    ranks, and the gradient norm would then only count one rank's part.
    """
    return weight


def _build_chunk(
    config: TrainerConfig,
    core: TransformerConfig,
    groups: ProcessGroupCollection,
    kernels: Kernels,
    vp_stage: int | None,
) -> GPTModel:
    model = config.model
    last_vp_stage = (config.parallelism.virtual_pipeline_model_parallel_size or 1) - 1
    spec: Any = layers.block_submodules(
        core, vp_stage, kernels.transformer_engine is not None, config.data.reset_attention_mask
    )
    if model.layer_spec is not None:
        spec = imports.load(model.layer_spec, "model.layer_spec")(core, vp_stage, spec)
    provider: imports.ModelProvider = GPTModel
    mtp: dict[str, Any] = {}
    if model.mtp_num_layers is not None:
        provider, mtp = multi_token.PredictingModel, multi_token.block_spec(core, spec, vp_stage, kernels)
    if model.model_provider is not None:
        provider = imports.load(model.model_provider, "model.model_provider")
    chunk = provider(
        config=core,
        transformer_layer_spec=spec,
        vocab_size=model.padded_vocab_size,
        max_sequence_length=model.max_position_embeddings,
        pre_process=groups.pp.rank() == 0 and (vp_stage or 0) == 0,
        post_process=groups.pp.rank() == groups.pp.size() - 1 and (vp_stage or 0) == last_vp_stage,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        rotary_base=model.rotary_base,
        pg_collection=groups,
        vp_stage=vp_stage,
        **mtp,
    )
    rotary.scale_frequencies(chunk, model)
    experts.reduce_over_expert_ranks(chunk, etp=groups.expt_tp.size(), tp=groups.tp.size())
    if config.data.reset_attention_mask:
        layers.require_separated_documents(chunk)
    if config.device == "cuda":
        chunk.cuda(torch.cuda.current_device())
    return chunk


def _allocate_overlap_buffers(config: TrainerConfig, groups: ProcessGroupCollection) -> None:
    """Allocate the buffers for Transformer Engine's overlap, into which tensor-parallel ranks write directly.

    Source: Megatron-LM initialize.py, _initialize_tp_communicators: [tokens on a context-parallel rank, hidden].
    """
    from transformer_engine.pytorch.module.base import initialize_ub

    tokens = config.model.seq_length * config.training.micro_batch_size // groups.cp.size()
    initialize_ub(
        shape=[tokens, config.model.hidden_size],
        tp_size=groups.tp.size(),
        use_fp8=config.training.fp8 is not None,
        bootstrap_backend="nccl",
    )


def _connect_schedule(core: TransformerConfig, overlap: bool, model: list[DistributedDataParallel]) -> None:
    """Tell the pipeline schedule how to reduce gradients: one function for a single chunk, else a list."""
    core.finalize_model_grads_func = finalize_model_grads
    if overlap:
        no_sync, start = [chunk.no_sync for chunk in model], [chunk.start_grad_sync for chunk in model]
        core.no_sync_func = no_sync if len(model) > 1 else no_sync[0]
        core.grad_sync_func = start if len(model) > 1 else start[0]
