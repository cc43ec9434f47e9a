"""Memory estimate of one device: parameters with their gradients and optimizer state, and activations.

The activation terms are those of Korthikanti et al., "Reducing activation recomputation in large transformer
models", arXiv 2205.05198, section 4, with separate terms to cover grouped queries and gated MLPs. For GPT-3 shapes with
dropout they sum to the paper's s x b x h x (10 + 24 / TP). Attention is assumed to be fused, so its score matrix is
never stored. In FP8 some inputs take one byte in place of two; the estimate uses the bf16 sizes. Experts are assumed
to have equal loads.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcgen.planning.layout import Layout
from hpcgen.planning.long_context import gathered_bytes, not_stored_bytes
from hpcgen.planning.model_size import (
    experts_parameter_count,
    last_layer_has_experts,
    layer_parameter_count,
    mtp_parameter_count,
)
from trainer.contract.config import ModelConfig, ParallelismConfig, TrainingConfig
from trainer.contract.experts import num_moe_layers
from trainer.contract.latent_attention import latent_width, value_width

GIB = 1024**3
LOGIT_BYTES = 4
"""Logits and their gradient in bf16. The buffers of the unfused cross entropy are freed during the backward pass."""

ROUTER_BYTES = 12
"""Logits, scores and weights of each expert in fp32."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the device with the most memory in use, without fragmentation, NCCL and CUDA itself."""

    parameter_bytes: int
    """Weights, gradients and optimizer state."""
    activation_bytes: int
    """Activations kept for the backward passes of the microbatches in flight, and the logits."""

    @property
    def total_gib(self) -> float:
        """Total in GiB."""
        return (self.parameter_bytes + self.activation_bytes) / GIB


def estimate_memory(
    model: ModelConfig,
    parallelism: ParallelismConfig,
    training: TrainingConfig,
    layout: Layout,
    *,
    separates_documents: bool = False,
) -> MemoryEstimate:
    """The estimate for the resolved `model`. Tests check that it is within 6% of GPU measurements.

    `separates_documents` is the value of data.reset_attention_mask.
    """
    stages = range(layout.pipeline_model_parallel_size)
    estimates = [
        _stage_memory(model, parallelism, training, layout, stage, separates_documents) for stage in stages
    ]
    return max(estimates, key=lambda estimate: estimate.total_gib)


def _stage_memory(
    model: ModelConfig,
    parallelism: ParallelismConfig,
    training: TrainingConfig,
    layout: Layout,
    stage: int,
    separates_documents: bool,
) -> MemoryEstimate:
    """The estimate for the devices of one pipeline stage."""
    moe_layers = sum(num_moe_layers(model, layers) for layers in layout.layers_of_stage(stage))
    dense_layers = layout.stage_layers(stage) - moe_layers
    in_flight = _layers_in_flight(layout, stage)
    tokens = training.micro_batch_size * model.seq_length // layout.context_parallel_size
    per_layer = tokens * _mean_activation_bytes(model, layout, parallelism, dense_layers, moe_layers)
    if training.recompute_granularity == "full":
        layer_input = 2 * tokens * model.hidden_size
        if parallelism.sequence_parallel:
            layer_input //= layout.tensor_model_parallel_size
        chunk_layers = max(layout.chunk_layers[stage :: layout.pipeline_model_parallel_size])
        activations = _recomputed_activation_bytes(training, chunk_layers, in_flight, per_layer, layer_input)
    else:
        not_stored = tokens * not_stored_bytes(model, parallelism, training)
        share = dense_layers / max(1, dense_layers + moe_layers)  # only dense MLPs are recomputed
        activations = int(
            in_flight * (per_layer - share * not_stored) + not_stored
        )  # one layer is being recomputed
    if training.cuda_graph_impl != "none":
        # one mask byte per query and key for each layer in flight (transformer_layer.py, get_layer_static_inputs)
        activations += int(in_flight * tokens * model.seq_length)
    activations += _mask_bytes(model, training, layout)
    activations += int(
        gathered_bytes(
            model, parallelism, training, layers=in_flight, separates_documents=separates_documents
        )
    )
    if stage == layout.pipeline_model_parallel_size - 1:
        activations += int(tokens * _last_stage_activation_bytes(model, layout, parallelism))
    scale = 2 if training.precision == "fp32" else 1
    return MemoryEstimate(_parameter_bytes(model, training, layout, stage, moe_layers), scale * activations)


def _last_stage_activation_bytes(model: ModelConfig, layout: Layout, parallelism: ParallelismConfig) -> float:
    """Activation bytes of logits and MTP layers for one token on one device, in bf16.

    Each MTP layer has logits, and keeps the inputs of its three norms and of its projection in addition to those of a
    layer. They are counted as if they were not recomputed.
    """
    assert model.padded_vocab_size
    logits = LOGIT_BYTES * model.padded_vocab_size / layout.tensor_model_parallel_size
    if model.mtp_num_layers is None:
        return logits
    layer = _layer_activation_bytes(model, layout, parallelism, last_layer_has_experts(model))
    own = 2 * (3 + 2) * model.hidden_size
    if parallelism.sequence_parallel:
        own //= layout.tensor_model_parallel_size
    return logits + model.mtp_num_layers * (layer + own + logits)


def _mean_activation_bytes(
    model: ModelConfig, layout: Layout, parallelism: ParallelismConfig, dense_layers: int, moe_layers: int
) -> float:
    """Mean activation bytes of the layers of a stage for one token on one device, in bf16."""
    total = sum(
        count * _layer_activation_bytes(model, layout, parallelism, has_experts)
        for count, has_experts in ((dense_layers, False), (moe_layers, True))
        if count
    )
    return total / max(1, dense_layers + moe_layers)


def bytes_per_parameter(training: TrainingConfig, layout: Layout, *, of_expert: bool = False) -> float:
    """Bytes per parameter on a device. The distributed optimizer shards its state over DP x CP / instances, and that of
    experts over the ranks that hold the same experts.

    bf16 and fp16: weight 2, fp32 gradient 4, and fp32 copy and two moments 12 / shards (Megatron-Core's
    docs/api-guide/dist_optimizer.md). fp32: weight 4, gradient 4, and two moments 8 / shards. FP8 adds a byte for
    the weight and one for its transpose, which Transformer Engine caches between microbatches.
    """
    ranks = layout.data_parallel_size * layout.context_parallel_size
    if of_expert:
        assert layout.expert_data_parallel_size
        ranks = layout.expert_data_parallel_size
    shards = ranks // layout.num_distributed_optimizer_instances
    if training.precision == "fp32":
        return 8 + 8 / shards
    return (8 if training.fp8 else 6) + 12 / shards


def _parameter_bytes(
    model: ModelConfig, training: TrainingConfig, layout: Layout, stage: int, moe_layers: int
) -> int:
    """Bytes of the weights of a pipeline stage with their gradients and optimizer state, on one device.

    `moe_layers` of its layers have experts. All other parameters are divided by TP, as if norms, biases and routers
    were sharded too. The first stage has the embeddings and the last stage the output layer, which is a copy of the
    embedding if they are tied.
    """
    last = layout.pipeline_model_parallel_size - 1
    assert model.padded_vocab_size
    assert model.max_position_embeddings
    table = model.padded_vocab_size * model.hidden_size
    shared = (layout.stage_layers(stage) - moe_layers) * layer_parameter_count(model)
    if stage == 0:
        shared += table
        if model.position_embedding_type == "learned_absolute":
            shared += model.max_position_embeddings * model.hidden_size
    if stage == last and (last > 0 or model.untie_embeddings_and_output_weights):
        shared += table
    if moe_layers:
        shared += moe_layers * layer_parameter_count(model, has_experts=True)
    if stage == last and model.mtp_num_layers is not None:
        mtp_experts = experts_parameter_count(model) if last_layer_has_experts(model) else 0
        shared += model.mtp_num_layers * (mtp_parameter_count(model) - mtp_experts)
        shared += table if last > 0 else 0  # the embedding's copy for the MTP layers
        moe_layers += model.mtp_num_layers if mtp_experts else 0
    experts = moe_layers * experts_parameter_count(model) if moe_layers else 0.0
    experts /= layout.expert_model_parallel_size * layout.expert_tensor_parallel_size
    size = shared / layout.tensor_model_parallel_size * bytes_per_parameter(training, layout)
    if experts:
        size += experts * bytes_per_parameter(training, layout, of_expert=True)
    return int(size)


def _layers_in_flight(layout: Layout, stage: int) -> float:
    """Layers of a stage times its microbatches in flight (arXiv 2205.05198, section 4.2.3, for the first stage).

    Source for the other stages: megatron/core/pipeline_parallel/schedules.py, get_pp_rank_microbatches: one more than
    the forward passes before the first backward pass.
    """
    stages, chunks = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size
    after = stages - 1 - stage
    in_flight = stages + (2 * after - stages + 1) / chunks if chunks > 1 else 1 + after
    return layout.stage_layers(stage) * min(in_flight, layout.num_microbatches)


def _layer_activation_bytes(
    model: ModelConfig, layout: Layout, parallelism: ParallelismConfig, has_experts: bool
) -> float:
    """Activation bytes of one layer for one token on one device, in bf16."""
    assert model.kv_channels
    assert model.num_query_groups
    tensor_parallel = parallelism.tensor_model_parallel_size
    values = value_width(model)
    query_size, output_size = (width * model.num_attention_heads for width in (model.kv_channels, values))
    key_size, value_size = (width * model.num_query_groups for width in (model.kv_channels, values))
    # inputs of both norms, the QKV projection and the MLP, and a one-byte mask per residual dropout
    outside = model.hidden_size * (8 + (2 if model.hidden_dropout else 0))
    # query, key and value, and the attention output
    inside = 2 * (query_size + key_size + value_size + output_size)
    outside += 2 * latent_width(model)
    if model.qk_layernorm:  # the inputs of these norms: queries and keys, or their latents
        outside += 2 * latent_width(model)
        inside += 0 if model.multi_latent_attention else 2 * (query_size + key_size)
    if not has_experts:
        assert model.ffn_hidden_size
        inside += _mlp_activation_bytes(model, model.ffn_hidden_size)
    elif model.moe_shared_expert_intermediate_size is not None:
        inside += _mlp_activation_bytes(model, model.moe_shared_expert_intermediate_size)
    return (
        (outside / tensor_parallel if parallelism.sequence_parallel else outside)
        + inside / tensor_parallel
        + (_expert_activation_bytes(model, layout) if has_experts else 0)
    )


def _mlp_activation_bytes(model: ModelConfig, width: int) -> int:
    """The MLP before and after its activation function."""
    return 2 * width * (3 if model.swiglu else 2)


def _expert_activation_bytes(model: ModelConfig, layout: Layout) -> float:
    """Activation bytes of the router and the routed experts for one token of the sequence, on one device.

    A tensor-parallel rank sends its share of the tokens to moe_router_topk experts each. The ranks of an expert
    receive all its tokens (megatron/core/transformer/moe/token_dispatcher.py), and divide its width.
    """
    assert model.num_moe_experts
    assert model.moe_ffn_hidden_size
    copies: float = model.moe_router_topk
    if (capacity := model.moe_expert_capacity_factor) is not None:
        copies *= capacity if model.moe_pad_expert_input_to_capacity else min(1.0, capacity)
    received = copies * layout.expert_tensor_parallel_size
    inside = _mlp_activation_bytes(model, model.moe_ffn_hidden_size) / layout.expert_tensor_parallel_size
    router = ROUTER_BYTES * model.num_moe_experts
    return (router + received * (2 * model.hidden_size + inside)) / layout.tensor_model_parallel_size


def _mask_bytes(model: ModelConfig, training: TrainingConfig, layout: Layout) -> int:
    """The mask that all layers of torch's kernels share: 2 bytes per query and key (trainer/model/layers.py).

    Transformer Engine's kernels know windows and context parallelism without a mask.
    """
    window = model.window_size
    has_mask = layout.context_parallel_size > 1 or (window is not None and window < model.seq_length)
    if training.transformer_impl != "torch" or not has_mask:
        return 0
    return 2 * model.seq_length * model.seq_length // layout.context_parallel_size


def _recomputed_activation_bytes(
    training: TrainingConfig, chunk_layers: int, in_flight: float, per_layer: float, layer_input: int
) -> int:
    """Activations with full recomputation.

    These are the inputs of the recomputed layers, all activations of the other layers, and those of the group being
    recomputed. Recomputed layers form groups of recompute_num_layers with one stored input each (uniform), or are the
    first recompute_num_layers of every chunk with one stored input per layer (block).
    """
    num_layers = training.recompute_num_layers or 1
    if training.recompute_method == "uniform":
        return int(in_flight / num_layers * layer_input + num_layers * per_layer)
    recomputed = min(1.0, num_layers / max(1, chunk_layers)) * in_flight
    return int(recomputed * layer_input + (in_flight - recomputed + 1) * per_layer)
