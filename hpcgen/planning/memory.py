"""Memory estimate of one device: parameters with their gradients and optimizer state, and activations.

The activation terms are those of Korthikanti et al., "Reducing activation recomputation in large transformer
models", arXiv 2205.05198, section 4, with separate terms to cover grouped queries and gated MLPs. For GPT-3 shapes with
dropout they sum to the paper's s x b x h x (10 + 24 / TP). Attention is assumed to be fused, so its score matrix is
never stored. In FP8 some inputs take one byte in place of two; the estimate uses the bf16 sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcgen.planning.layout import Layout
from hpcgen.planning.long_context import gathered_bytes, not_stored_bytes
from hpcgen.planning.model_size import layer_parameter_count
from trainer.contract.config import ModelConfig, ParallelismConfig, TrainingConfig

GIB = 1024**3
LOGIT_BYTES = 4
"""Logits and their gradient in bf16. The buffers of the unfused cross entropy are freed during the backward pass."""


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
    parameters = _parameters_per_device(model, layout, stage)
    in_flight = _layers_in_flight(layout, stage)
    tokens = training.micro_batch_size * model.seq_length // layout.context_parallel_size
    per_layer = tokens * _layer_activation_bytes(model, parallelism)
    if training.recompute_granularity == "full":
        layer_input = 2 * tokens * model.hidden_size
        if parallelism.sequence_parallel:
            layer_input //= layout.tensor_model_parallel_size
        chunk_layers = max(layout.chunk_layers[stage :: layout.pipeline_model_parallel_size])
        activations = _recomputed_activation_bytes(training, chunk_layers, in_flight, per_layer, layer_input)
    else:
        not_stored = tokens * not_stored_bytes(model, parallelism, training)
        activations = int(in_flight * (per_layer - not_stored) + not_stored)  # one layer is being recomputed
    if training.cuda_graph_impl != "none":
        # one mask byte per query and key for each layer in flight (transformer_layer.py, get_layer_static_inputs)
        activations += int(in_flight * tokens * model.seq_length)
    activations += _mask_bytes(model, training, layout)
    activations += int(
        gathered_bytes(
            model, parallelism, training, layers=in_flight, separates_documents=separates_documents
        )
    )
    assert model.padded_vocab_size
    if stage == layout.pipeline_model_parallel_size - 1:
        activations += LOGIT_BYTES * tokens * model.padded_vocab_size // layout.tensor_model_parallel_size
    scale = 2 if training.precision == "fp32" else 1
    return MemoryEstimate(int(parameters * bytes_per_parameter(training, layout)), scale * activations)


def bytes_per_parameter(training: TrainingConfig, layout: Layout) -> float:
    """Bytes per parameter on a device. The distributed optimizer shards its state over DP x CP / instances.

    bf16 and fp16: weight 2, fp32 gradient 4, and fp32 copy and two moments 12 / shards (Megatron-Core's
    docs/api-guide/dist_optimizer.md). fp32: weight 4, gradient 4, and two moments 8 / shards. FP8 adds a byte for
    the weight and one for its transpose, which Transformer Engine caches between microbatches.
    """
    ranks = layout.data_parallel_size * layout.context_parallel_size
    shards = ranks // layout.num_distributed_optimizer_instances
    if training.precision == "fp32":
        return 8 + 8 / shards
    return (8 if training.fp8 else 6) + 12 / shards


def _parameters_per_device(model: ModelConfig, layout: Layout, stage: int) -> float:
    """Parameters of a pipeline stage divided by TP, as if norms and biases were sharded too.

    The first stage has the embeddings and the last stage the output layer, which is a copy of the embedding if they
    are tied.
    """
    last = layout.pipeline_model_parallel_size - 1
    assert model.padded_vocab_size
    assert model.max_position_embeddings
    table = model.padded_vocab_size * model.hidden_size
    tables = 0
    if stage == 0:
        tables += table
        if model.position_embedding_type == "learned_absolute":
            tables += model.max_position_embeddings * model.hidden_size
    if stage == last and (last > 0 or model.untie_embeddings_and_output_weights):
        tables += table
    layers = layout.stage_layers(stage) * layer_parameter_count(model)
    return (layers + tables) / layout.tensor_model_parallel_size


def _layers_in_flight(layout: Layout, stage: int) -> float:
    """Layers of a stage times its microbatches in flight (arXiv 2205.05198, section 4.2.3, for the first stage).

    Source for the other stages: megatron/core/pipeline_parallel/schedules.py, get_pp_rank_microbatches: one more than
    the forward passes before the first backward pass.
    """
    stages, chunks = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size
    after = stages - 1 - stage
    in_flight = stages + (2 * after - stages + 1) / chunks if chunks > 1 else 1 + after
    return layout.stage_layers(stage) * min(in_flight, layout.num_microbatches)


def _layer_activation_bytes(model: ModelConfig, parallelism: ParallelismConfig) -> float:
    """Activation bytes of one layer for one token on one device, in bf16."""
    assert model.kv_channels
    assert model.num_query_groups
    assert model.ffn_hidden_size
    tensor_parallel = parallelism.tensor_model_parallel_size
    query_size = model.kv_channels * model.num_attention_heads
    key_value_size = 2 * model.kv_channels * model.num_query_groups
    fc1_size = model.ffn_hidden_size * (2 if model.swiglu else 1)
    # inputs of both norms, the QKV projection and the MLP, and a one-byte mask per residual dropout
    outside = model.hidden_size * (8 + (2 if model.hidden_dropout else 0))
    # query, key and value, the attention output, and the MLP before and after its activation function
    inside = 2 * (query_size + key_value_size + query_size + fc1_size + model.ffn_hidden_size)
    if model.qk_layernorm:  # the inputs of these norms: queries and keys
        inside += 2 * (query_size + key_value_size // 2)
    return (
        outside / tensor_parallel if parallelism.sequence_parallel else outside
    ) + inside / tensor_parallel


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
