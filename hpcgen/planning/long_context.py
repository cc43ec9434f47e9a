"""Terms of the memory estimate for long sequences: selective recomputation, and gathered keys and values.

Savings by recomputing parts of experts or of latent attention are left out, so the estimate is an upper bound there.
"""

from __future__ import annotations

from trainer.contract.config import ModelConfig, ParallelismConfig, TrainingConfig


def not_stored_bytes(model: ModelConfig, parallelism: ParallelismConfig, training: TrainingConfig) -> float:
    """Activation bytes of a layer, for one token on one device in bf16, that selective recomputation does not store.

    A recomputed MLP keeps only its input. With Transformer Engine this is the input of its norm, which is kept anyway.
    The estimate assumes fused attention, whose recomputation stores nothing less.
    """
    if training.recompute_granularity != "selective" or "mlp" not in (training.recompute_modules or ()):
        return 0.0
    assert model.ffn_hidden_size
    tensor_parallel = parallelism.tensor_model_parallel_size
    fc1_size = model.ffn_hidden_size * (2 if model.swiglu else 1)
    inside = 2 * (fc1_size + model.ffn_hidden_size) / tensor_parallel
    normalized = 0 if training.transformer_impl == "torch" else 2 * model.hidden_size
    return inside + (normalized / tensor_parallel if parallelism.sequence_parallel else normalized)


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
    modules = training.recompute_modules or ("core_attn",)
    recomputes = training.recompute_granularity == "full" or (
        training.recompute_granularity == "selective" and "core_attn" in modules
    )
    stored = layers if separates_documents and not recomputes else 1
    return stored * tokens * 2 * 2 * model.kv_channels * groups
