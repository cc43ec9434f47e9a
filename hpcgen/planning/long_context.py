"""Terms of the memory estimate for attention between context-parallel ranks and within documents."""

from __future__ import annotations

from trainer.contract.config import ModelConfig, ParallelismConfig, TrainingConfig
from trainer.contract.latent_attention import value_width


def gathered_bytes(
    model: ModelConfig,
    parallelism: ParallelismConfig,
    training: TrainingConfig,
    *,
    layers: float,
    separates_documents: bool,
) -> float:
    """Bytes of the keys and values of other context-parallel ranks on one device, for the `layers` in flight.

    Transformer Engine's all_gather keeps them for one layer at a time, and its other exchanges keep none. Attention
    within documents (trainer/model/packing.py) keeps those of all layers, unless core_attn is recomputed.
    """
    size = parallelism.context_parallel_size
    default = "p2p" if model.window_size is None else "all_gather"
    gathers = separates_documents or (parallelism.cp_comm_type or default) == "all_gather"
    if size == 1 or not gathers:
        return 0.0
    assert model.kv_channels
    assert model.num_query_groups
    tokens = training.micro_batch_size * model.seq_length * (1 - 1 / size)
    groups = max(1, model.num_query_groups / parallelism.tensor_model_parallel_size)
    stored = layers if separates_documents and not _recomputes_attention(training) else 1
    return stored * tokens * 2 * (model.kv_channels + value_width(model)) * groups


def packed_bytes(
    model: ModelConfig,
    parallelism: ParallelismConfig,
    training: TrainingConfig,
    *,
    layers: float,
    separates_documents: bool,
) -> float:
    """Bytes of the outputs of attention within documents on one device, for the `layers` in flight.

    Packed documents are sample by sample, and other activations position by position. So with several samples, the
    packed output is kept in addition to that in the order of other activations (trainer/model/packing.py).
    """
    if not separates_documents or training.micro_batch_size == 1:
        return 0.0
    tokens = training.micro_batch_size * model.seq_length // parallelism.context_parallel_size
    output = 2 * value_width(model) * model.num_attention_heads / parallelism.tensor_model_parallel_size
    return (1 if _recomputes_attention(training) else layers) * tokens * output


def _recomputes_attention(training: TrainingConfig) -> bool:
    modules = training.recompute_modules or ("core_attn",)
    return training.recompute_granularity == "full" or (
        training.recompute_granularity == "selective" and "core_attn" in modules
    )
