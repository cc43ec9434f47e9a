"""What one device must hold: parameters with their gradients and optimizer state, and activations.

The activation terms are those of Korthikanti et al., "Reducing activation recomputation in large transformer
models", arXiv 2205.05198, section 4, written per term so that grouped queries and gated MLPs fit; for GPT-3
shapes with dropout they sum to the paper's s x b x h x (10 + 24 / TP). Attention is taken to be fused: its
score matrix is never stored. In FP8 some inputs are kept in one byte in place of two; the estimate is bf16's.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcgen.planning.layout import Layout
from hpcgen.planning.model_size import layer_parameter_count
from trainer.contract.config import ModelConfig, ParallelismConfig, TrainingConfig

GIB = 1024**3
LOGIT_BYTES = 4
"""Logits and their gradient in bf16; what the unfused cross-entropy keeps goes before the backward pass ends."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the fullest device, by what holds them; fragmentation, NCCL and CUDA itself come on top."""

    parameter_bytes: int
    """Weights, gradients and optimizer state."""
    activation_bytes: int
    """What the forward passes in flight keep for their backward passes, and the logits."""

    @property
    def total_gib(self) -> float:
        """Both together (GiB)."""
        return (self.parameter_bytes + self.activation_bytes) / GIB


def estimate_memory(
    model: ModelConfig, parallelism: ParallelismConfig, training: TrainingConfig, layout: Layout
) -> MemoryEstimate:
    """The estimate for the resolved `model`; tests hold it to 6% of what GPUs showed."""
    parameters = _parameters_per_device(model, layout)
    in_flight = _layers_in_flight(layout)
    tokens = training.micro_batch_size * model.seq_length // layout.context_parallel_size
    per_layer = tokens * _layer_activation_bytes(model, parallelism)
    if training.recompute_granularity == "full":
        layer_input = 2 * tokens * model.hidden_size
        if parallelism.sequence_parallel:
            layer_input //= layout.tensor_model_parallel_size
        activations = _recomputed_activation_bytes(training, layout, in_flight, per_layer, layer_input)
    else:
        activations = int(in_flight * per_layer)
    if training.cuda_graph_impl != "none":
        # A mask of a byte per query and key for each layer in flight (transformer_layer.py, get_layer_static_inputs).
        activations += int(in_flight * tokens * model.seq_length)
    assert model.padded_vocab_size
    if layout.pipeline_model_parallel_size == 1:
        # With more stages the logits are on the last one, which keeps the fewest microbatches.
        activations += LOGIT_BYTES * tokens * model.padded_vocab_size // layout.tensor_model_parallel_size
    scale = 2 if training.precision == "fp32" else 1
    return MemoryEstimate(int(parameters * bytes_per_parameter(training, layout)), scale * activations)


def bytes_per_parameter(training: TrainingConfig, layout: Layout) -> float:
    """Bytes of a parameter on a device that holds it; the distributed optimizer shards over DP x CP.

    bf16 and fp16: weight 2, fp32 gradient 4, and fp32 copy and two moments 12 / shards (Megatron-Core's
    docs/api-guide/dist_optimizer.md). fp32: weight 4, gradient 4, and two moments 8 / shards. FP8 adds a byte for
    the weight and one for its transpose, which Transformer Engine keeps from micro-batch to micro-batch.
    """
    shards = layout.data_parallel_size * layout.context_parallel_size
    if training.precision == "fp32":
        return 8 + 8 / shards
    return (8 if training.fp8 else 6) + 12 / shards


def _parameters_per_device(model: ModelConfig, layout: Layout) -> float:
    """Parameters of the fullest pipeline stage over TP, as if norms and biases were split too."""
    stages = layout.pipeline_model_parallel_size
    assert model.padded_vocab_size
    assert model.max_position_embeddings
    table = model.padded_vocab_size * model.hidden_size
    if stages == 1 and model.untie_embeddings_and_output_weights:
        table *= 2
    if model.position_embedding_type == "learned_absolute":
        table += model.max_position_embeddings * model.hidden_size
    layers = model.num_layers // stages * layer_parameter_count(model)
    return (layers + table) / layout.tensor_model_parallel_size


def _layers_in_flight(layout: Layout) -> float:
    """Layers of the first stage times the microbatches that it keeps (arXiv 2205.05198, section 4.2.3)."""
    stages, chunks = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size
    layers_per_stage = layout.num_layers_per_chunk * chunks
    if chunks > 1:
        return layers_per_stage * min(stages + (stages - 1) / chunks, layout.num_microbatches)
    return layers_per_stage * min(stages, layout.num_microbatches)


def _layer_activation_bytes(model: ModelConfig, parallelism: ParallelismConfig) -> float:
    """Bytes in bf16 that one layer keeps for one token on one device."""
    assert model.kv_channels
    assert model.num_query_groups
    assert model.ffn_hidden_size
    tensor_parallel = parallelism.tensor_model_parallel_size
    query_size = model.kv_channels * model.num_attention_heads
    key_value_size = 2 * model.kv_channels * model.num_query_groups
    fc1_size = model.ffn_hidden_size * (2 if model.swiglu else 1)
    # Inputs of both norms, of the QKV product and of the MLP, and a one-byte mask per residual dropout.
    outside = model.hidden_size * (8 + (2 if model.hidden_dropout else 0))
    # Query, key and value, the attention's output, and the MLP before and after its activation function.
    inside = 2 * (query_size + key_value_size + query_size + fc1_size + model.ffn_hidden_size)
    return (
        outside / tensor_parallel if parallelism.sequence_parallel else outside
    ) + inside / tensor_parallel


def _recomputed_activation_bytes(
    training: TrainingConfig, layout: Layout, in_flight: float, per_layer: float, layer_input: int
) -> int:
    """Full recomputation: inputs of the recomputed layers, the others whole, and the group at work whole.

    Recomputed layers come in groups of recompute_num_layers with one stored input each (uniform), or are the
    first recompute_num_layers of every chunk, each with its own (block).
    """
    num_layers = training.recompute_num_layers or 1
    if training.recompute_method == "uniform":
        return int(in_flight / num_layers * layer_input + num_layers * per_layer)
    recomputed = min(1.0, num_layers / layout.num_layers_per_chunk) * in_flight
    return int(recomputed * layer_input + (in_flight - recomputed + 1) * per_layer)
