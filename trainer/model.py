"""From the configuration to this rank's chunks of the GPT, wrapped for data parallelism."""

from __future__ import annotations

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
from megatron.core.transformer.transformer_config import TransformerConfig

from trainer import layers
from trainer.config import TrainerConfig
from trainer.initialization import initialize_by_name


def build_model(config: TrainerConfig, groups: ProcessGroupCollection) -> list[DistributedDataParallel]:
    """This rank's model chunks in order of the pipeline: one, or virtual_pipeline_model_parallel_size."""
    core = transformer_config(config)
    # On a GPU Core draws weights from its own generators, which must be there even though the draw is replaced.
    model_parallel_cuda_manual_seed(config.training.seed)
    stages = config.parallelism.virtual_pipeline_model_parallel_size
    vp_stages = [None] if stages is None else range(stages)
    chunks = [_build_chunk(config, core, groups, vp_stage) for vp_stage in vp_stages]
    for chunk in chunks:
        initialize_by_name(chunk, config.training.seed, config.model.init_method_std, config.model.num_layers)
    if config.training.precision == "bf16":
        chunks = [Float16Module(core, chunk) for chunk in chunks]
    layout = config.parallelism
    data_parallel = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=layout.overlap_grad_reduce,
        overlap_param_gather=layout.overlap_param_gather,
        average_in_collective=False,
    )
    model = [
        DistributedDataParallel(core, data_parallel, chunk, disable_bucketing=index > 0, pg_collection=groups)
        for index, chunk in enumerate(chunks)
    ]
    _connect_schedule(core, layout.overlap_grad_reduce, model)
    return model


def transformer_config(config: TrainerConfig) -> TransformerConfig:
    """Megatron-Core's configuration of the same model and layout."""
    model, layout, training = config.model, config.parallelism, config.training
    dtype = torch.bfloat16 if training.precision == "bf16" else torch.float32
    interleaved = layout.virtual_pipeline_model_parallel_size is not None
    on_gpu = config.device == "cuda"
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        ffn_hidden_size=model.ffn_hidden_size,
        num_query_groups=model.num_query_groups,
        kv_channels=model.kv_channels,
        normalization=model.normalization,
        layernorm_epsilon=model.layernorm_epsilon,
        gated_linear_unit=model.swiglu,
        activation_func=torch.nn.functional.silu if model.swiglu else torch.nn.functional.gelu,
        add_bias_linear=model.add_bias_linear,
        attention_dropout=model.attention_dropout,
        hidden_dropout=model.hidden_dropout,
        init_method=_leave_as_is,
        output_layer_init_method=_leave_as_is,
        use_cpu_initialization=not on_gpu,
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline_model_parallel_size,
        context_parallel_size=layout.context_parallel_size,
        sequence_parallel=layout.sequence_parallel,
        bf16=training.precision == "bf16",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        recompute_granularity=training.recompute_granularity,
        recompute_method=training.recompute_method,
        recompute_num_layers=training.recompute_num_layers,
        # Batched point-to-point calls in an interleaved schedule of 2 stages give wrong gradients, silently.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        # The loss is the mean over the tokens of the global batch, however they are cut over ranks.
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=on_gpu and (model.swiglu or model.add_bias_linear),
        bias_dropout_fusion=on_gpu,
        masked_softmax_fusion=False,
        apply_rope_fusion=layers.HAVE_TRANSFORMER_ENGINE and model.position_embedding_type == "rope",
        persist_layer_norm=layers.HAVE_TRANSFORMER_ENGINE,
    )


def _leave_as_is(weight: torch.Tensor) -> torch.Tensor:
    """Core's hook for drawing a weight; `initialize_by_name` does it once the chunk is built.

    perform_initialization = False would also skip the mark that a weight is split over tensor-parallel ranks,
    and the gradient norm would then count one rank's part only.
    """
    return weight


def _build_chunk(
    config: TrainerConfig, core: TransformerConfig, groups: ProcessGroupCollection, vp_stage: int | None
) -> GPTModel:
    model = config.model
    last_vp_stage = (config.parallelism.virtual_pipeline_model_parallel_size or 1) - 1
    chunk = GPTModel(
        config=core,
        transformer_layer_spec=layers.block_submodules(core, vp_stage),
        vocab_size=model.padded_vocab_size,
        max_sequence_length=model.max_position_embeddings,
        pre_process=groups.pp.rank() == 0 and (vp_stage or 0) == 0,
        post_process=groups.pp.rank() == groups.pp.size() - 1 and (vp_stage or 0) == last_vp_stage,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        rotary_base=model.rotary_base,
        pg_collection=groups,
        vp_stage=vp_stage,
    )
    if config.device == "cuda":
        chunk.cuda(torch.cuda.current_device())
    return chunk


def _connect_schedule(core: TransformerConfig, overlap: bool, model: list[DistributedDataParallel]) -> None:
    """Tells the pipeline schedule how to reduce gradients: one function for one chunk, else a list."""
    core.finalize_model_grads_func = finalize_model_grads
    if overlap:
        no_sync, start = [chunk.no_sync for chunk in model], [chunk.start_grad_sync for chunk in model]
        core.no_sync_func = no_sync if len(model) > 1 else no_sync[0]
        core.grad_sync_func = start if len(model) > 1 else start[0]
