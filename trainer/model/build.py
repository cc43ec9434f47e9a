"""Builds this rank's chunks of the GPT from the configuration, wrapped for data parallelism."""

from __future__ import annotations

from collections.abc import Iterable
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
from megatron.core.transformer.transformer_config import TransformerConfig

from trainer.contract.code import code_loading, imports
from trainer.contract.config import ParallelismConfig, TrainerConfig
from trainer.contract.optimizers import optimizer_of
from trainer.lora import adapter
from trainer.model import cuda_graphs, custom, experts, freezing, layers, multi_token
from trainer.model.attention import parts_of
from trainer.model.core_config import HALF, transformer_config
from trainer.model.initialization import initialize_by_name
from trainer.model.kernels import Kernels


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
    freezing.freeze(chunks, config.training)
    if config.training.precision in HALF:
        chunks = [Float16Module(core, chunk) for chunk in chunks]
    layout = config.parallelism
    data_parallel = DistributedDataParallelConfig(
        use_distributed_optimizer=optimizer_of(config.optimizer).sharding == "distributed",
        num_distributed_optimizer_instances=layout.num_distributed_optimizer_instances,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=layout.overlap_grad_reduce,
        overlap_param_gather=layout.overlap_param_gather,
        # Modules would start it when the input of their stage arrives, so the first microbatch would wait for the
        # weights of all stages, one after the other. With this, train_step starts it.
        align_param_gather=layout.overlap_param_gather and layout.pipeline_model_parallel_size > 1,
        average_in_collective=False,
    )
    with cuda_graphs.recordable_gradients(config):
        model = [
            DistributedDataParallel(
                core, data_parallel, chunk, disable_bucketing=index > 0, pg_collection=groups
            )
            for index, chunk in enumerate(chunks)
        ]
    _connect_schedule(core, layout, model)
    return model


def gather_weights(model: Iterable[DistributedDataParallel]) -> None:
    """Gather the weights that other data-parallel ranks have updated. With replicated optimizers there are none."""
    for chunk in model:
        if chunk.ddp_config.use_distributed_optimizer:
            chunk.start_param_sync(force_sync=True)


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


def _build_chunk(
    config: TrainerConfig,
    core: TransformerConfig,
    groups: ProcessGroupCollection,
    kernels: Kernels,
    vp_stage: int | None,
) -> GPTModel:
    model = config.model
    last_vp_stage = config.parallelism.num_chunks - 1
    spec = layers.block_submodules(config, core, vp_stage, uses_engine=kernels.transformer_engine is not None)
    if model.layer_spec is not None:
        spec = custom.block_submodules(model.layer_spec, core, vp_stage, spec)
    provider: imports.ModelProvider = GPTModel
    mtp: dict[str, Any] = {}
    if model.mtp_num_layers is not None:
        provider = multi_token.PredictingModel
        mtp = multi_token.block_spec(config, core, spec, vp_stage, kernels)
    if model.model_provider is not None:
        provider = code_loading.load(model.model_provider, "model.model_provider")
    assert model.max_position_embeddings
    chunk = provider(
        config=core,
        transformer_layer_spec=spec,
        vocab_size=model.num_rows,
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
    if model.rope_scaling is not None:
        parts_of(model).scale_frequencies(chunk, model)
    if config.lora.rank is not None:
        adapter.attach(chunk, config, groups)
    experts.correct_ranks(chunk, etp=groups.expt_tp.size(), tp=groups.tp.size())
    custom.refuse_wrong_parts(chunk, separate_documents=config.data.separates_documents)
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


def _connect_schedule(
    core: TransformerConfig, layout: ParallelismConfig, model: list[DistributedDataParallel]
) -> None:
    """Tell the pipeline schedule how to reduce gradients: one function for a single chunk, else a list.

    With several instances of the distributed optimizer, Core does not remember that the schedule has started a
    reduction (param_and_grad_buffer.py, start_grad_sync). It would reduce the gradients of all stages but the first
    twice. Without a function to start it, a reduction starts when its gradients are ready.
    """
    core.finalize_model_grads_func = _finalize_sums
    if layout.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in model]
        core.no_sync_func = no_sync if len(model) > 1 else no_sync[0]
    if layout.overlap_grad_reduce and layout.num_distributed_optimizer_instances == 1:
        start = [chunk.start_grad_sync for chunk in model]
        core.grad_sync_func = start if len(model) > 1 else start[0]


def _finalize_sums(model: list[DistributedDataParallel], num_tokens: torch.Tensor, **kwargs: Any) -> None:
    """Core's `finalize_model_grads`, which leaves the division by `num_tokens` to `trainer.optimizer.gradients`."""
    finalize_model_grads(model, None, **kwargs)
