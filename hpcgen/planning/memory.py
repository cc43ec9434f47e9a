"""Memory estimate of one device: parameters with their gradients and optimizer state, and activations.

hpcgen/planning/activations.py has the activations of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcgen.planning.activations import layer_activation_bytes, recomputed_bytes, sharded
from hpcgen.planning.layout import Layout
from hpcgen.planning.long_context import gathered_bytes, packed_bytes
from hpcgen.planning.model_size import (
    experts_parameter_count,
    last_layer_has_experts,
    layer_parameter_count,
    mtp_parameter_count,
)
from trainer.contract.config import ModelConfig, ParallelismConfig, TrainingConfig
from trainer.contract.experts import num_moe_layers

GIB = 1024**3


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the device with the most memory in use, without fragmentation, NCCL and CUDA itself."""

    parameter_bytes: int
    """Weights, gradients and optimizer state."""
    activation_bytes: int
    """Activations kept for the backward passes of the microbatches in flight, the logits, and their gradients."""

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
    in_flight = _layers_in_flight(layout, stage)
    tokens = training.micro_batch_size * model.seq_length // layout.context_parallel_size
    per_token = _layers_activation_bytes(model, parallelism, training, layout, stage, moe_layers)
    activations = 0
    if stage == layout.pipeline_model_parallel_size - 1:
        per_token += _last_stage_activation_bytes(model, parallelism, training, layout)
        activations += int(_logits_bytes(model, training, layout, tokens))
    activations += int(tokens * per_token)
    if training.cuda_graph_impl != "none":
        # one mask byte per query and key for each layer in flight (transformer_layer.py, get_layer_static_inputs)
        activations += int(in_flight * tokens * model.seq_length)
    activations += _mask_bytes(model, training, layout)
    for of_attention in (gathered_bytes, packed_bytes):
        activations += int(
            of_attention(
                model, parallelism, training, layers=in_flight, separates_documents=separates_documents
            )
        )
    scale = 2 if training.precision == "fp32" else 1
    return MemoryEstimate(_parameter_bytes(model, training, layout, stage, moe_layers), scale * activations)


def _layers_activation_bytes(
    model: ModelConfig,
    parallelism: ParallelismConfig,
    training: TrainingConfig,
    layout: Layout,
    stage: int,
    moe_layers: int,
) -> float:
    """Activation bytes of the layers of a stage, of which `moe_layers` have experts, for one token on one device.

    A recomputed layer, or a part of it, is complete during its own backward pass.
    """
    layers, in_flight = layout.stage_layers(stage), _layers_in_flight(layout, stage)
    counts = {
        has_experts: count
        for has_experts, count in ((False, layers - moe_layers), (True, moe_layers))
        if count
    }
    kept = {
        has_experts: layer_activation_bytes(model, parallelism, training, layout, has_experts=has_experts)
        for has_experts in counts
    }
    mean = sum(counts[has_experts] * kept[has_experts] for has_experts in counts) / max(1, layers)
    if training.recompute_granularity == "full":
        layer_input = sharded(2 * model.hidden_size, parallelism)
        chunk_layers = max(layout.chunk_layers[stage :: layout.pipeline_model_parallel_size])
        return _fully_recomputed_bytes(training, chunk_layers, in_flight, mean, layer_input)
    again = (
        recomputed_bytes(model, parallelism, training, layout, has_experts=has_experts)
        for has_experts in counts
    )
    return in_flight * mean + max(again, default=0.0)


def _last_stage_activation_bytes(
    model: ModelConfig, parallelism: ParallelismConfig, training: TrainingConfig, layout: Layout
) -> float:
    """Activation bytes before the logits and of MTP layers for one token on one device, in bf16.

    These are the inputs of the final norm and of the output layer. Each MTP layer has them as well, and keeps the
    inputs of two further norms and of its projection. With uniform recomputation it keeps the embeddings in place of
    its own activations (megatron/core/transformer/multi_token_prediction.py, _checkpointed_forward).
    """
    hidden = sharded(2 * model.hidden_size, parallelism)
    output = 2 * hidden
    if model.mtp_num_layers is None:
        return output
    has_experts = last_layer_has_experts(model)
    layer = layer_activation_bytes(model, parallelism, training, layout, has_experts=has_experts)
    is_recomputed = training.recompute_granularity == "full" and training.recompute_method == "uniform"
    own = hidden if is_recomputed else layer + 4 * hidden
    # A stage that has other layers counts one that is being recomputed.
    again = layer if is_recomputed and not layout.stage_layers(layout.pipeline_model_parallel_size - 1) else 0
    return output + model.mtp_num_layers * (own + output) + again


def _logits_bytes(model: ModelConfig, training: TrainingConfig, layout: Layout, tokens: int) -> float:
    """Bytes of the logits of `tokens` on one device, and of their gradients, in bf16.

    The most memory is in use in the backward pass of the cross entropy or of the output layer. The latter also has the
    gradients of its input and of its weight (LinearWithGradAccumulationAndAsyncCommunication in
    megatron/core/tensor_parallel/layers.py).
    """
    assert model.padded_vocab_size
    table = model.padded_vocab_size / layout.tensor_model_parallel_size
    kept, more = _bytes_per_logit(training)
    gradients = 2 * model.hidden_size * (tokens + table)
    outputs = 1 + (model.mtp_num_layers or 0)
    return outputs * kept * tokens * table + max(
        more * tokens * table, (2 - kept) * tokens * table + gradients
    )


def _bytes_per_logit(training: TrainingConfig) -> tuple[int, int]:
    """Bytes that the cross entropy keeps for each logit of a bf16 model, and those that its backward pass adds.

    - Transformer Engine's replaces the logits by their gradient (its common/triton/cross_entropy.py).
    - Megatron-Core's keeps the softmax in fp32. The fused one copies it before it rounds the gradient to bf16, because
      torch.compile does not add to the softmax in place (megatron/core/fusions/fused_cross_entropy.py).
    - In fp16 and fp32, Megatron-Core's is not fused. In fp32, whose estimate is twice that of bf16, it replaces the
      logits.
    """
    if training.precision == "fp32":
        return 2, 0
    is_bf16 = training.precision == "bf16"
    default = "te" if is_bf16 and training.transformer_impl != "torch" else "native"
    chosen = training.cross_entropy_fusion_impl or default
    if chosen == "te" and not training.deterministic_mode:
        return 2, 0
    return (4, 6) if is_bf16 and not training.deterministic_mode else (4, 2)


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
        # the embedding's copy for the MTP layers, which is also the output layer if they are tied
        shared += table if last > 0 and model.untie_embeddings_and_output_weights else 0
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


def _mask_bytes(model: ModelConfig, training: TrainingConfig, layout: Layout) -> int:
    """The mask that all layers of torch's kernels share: 2 bytes per query and key (trainer/model/layers.py).

    Transformer Engine's kernels know windows and context parallelism without a mask.
    """
    window = model.window_size
    has_mask = layout.context_parallel_size > 1 or (window is not None and window < model.seq_length)
    if training.transformer_impl != "torch" or not has_mask:
        return 0
    return 2 * model.seq_length * model.seq_length // layout.context_parallel_size


def _fully_recomputed_bytes(
    training: TrainingConfig, chunk_layers: int, in_flight: float, per_layer: float, layer_input: float
) -> float:
    """Activation bytes for one token with full recomputation.

    These are the inputs of the recomputed layers, all activations of the other layers, and those of the group being
    recomputed. Recomputed layers form groups of recompute_num_layers with one stored input each (uniform), or are the
    first recompute_num_layers of every chunk with one stored input per layer (block).
    """
    num_layers = training.recompute_num_layers or 1
    if training.recompute_method == "uniform":
        return in_flight / num_layers * layer_input + num_layers * per_layer
    recomputed = min(1.0, num_layers / max(1, chunk_layers)) * in_flight
    return recomputed * layer_input + (in_flight - recomputed + 1) * per_layer
