"""Floating-point operations of a training step, by a documented formula."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.contract.attention import attention_of
from trainer.contract.attention.visibility import visible_pairs
from trainer.contract.config import LoraConfig, ModelConfig, TrainerConfig
from trainer.contract.model.adapters import WITHOUT_ADAPTERS, active_parameter_counts
from trainer.contract.model.experts import moe_layer_pattern
from trainer.contract.model.frozen import Frozen, frozen, layers_without_gradients

FORMULA = (
    "megatron-lm: 3 x forward matrix products, causal attention halved, only keys in the window and the document, with "
    "logits, MTP layers and only the chosen experts, without routers, recomputation and what frozen "
    "weights save"
)


def flops_per_iteration(config: TrainerConfig) -> float:
    """Model FLOPs of one step over all ranks, with global_batch_size samples. `config` is resolved."""
    return flops_per_sample(config) * config.training.global_batch_size


def flops_per_sample(config: TrainerConfig) -> float:
    """Model FLOPs of training on one sequence, as if it were one document. `config` is resolved."""
    return sample_flops(config.model, config.training.freeze, config.lora)


def sample_flops(
    model: ModelConfig, freeze: tuple[str, ...] = (), lora: LoraConfig = WITHOUT_ADAPTERS
) -> float:
    """Model FLOPs of training the resolved `model` on one sequence, as if it were one document."""
    return flops(model, model.seq_length, visible_pairs(model, [model.seq_length]), freeze, lora)


def flops(
    model: ModelConfig,
    tokens: int,
    pairs: float,
    freeze: tuple[str, ...] = (),
    lora: LoraConfig = WITHOUT_ADAPTERS,
) -> float:
    """Model FLOPs of training the resolved `model` on `tokens` with `pairs` of a query and a visible key. `freeze` are
    the patterns of training.freeze. With `lora`, all weights of the model are frozen, and adapters are trained.

    Source: Megatron-LM, megatron/training/training.py, num_floating_point_operations.

    Per layer: 2 x in x out for each matrix and token, and 2 x 2 x width for each pair, for its score and its product
    with the value. The backward pass costs twice the forward pass. Of the experts, those that a token chooses count, as
    if none were dropped. An MTP layer is a layer like the last one, with a projection of hidden states and embeddings
    to the hidden size, and logits of its own.
    """
    h, mtp_layers = model.hidden_size, model.mtp_num_layers or 0
    assert model.padded_vocab_size
    attention = attention_of(model)
    matrices = 3 if model.swiglu else 2
    products = sum(projection.weights for projection in attention.projections(model))
    pattern = moe_layer_pattern(model)
    layers = (*pattern, *pattern[-1:] * mtp_layers)
    mlps = sum(_mlp_width(model, has_experts) for has_experts in layers)
    logits = (1 + mtp_layers) * h * model.padded_vocab_size
    per_token: float = len(layers) * products + matrices * h * mlps + mtp_layers * 2 * h * h + logits
    adapters = active_parameter_counts(lora, model) if lora.rank is not None else []
    per_token += sum(adapters)
    complete = 3.0 * 2 * (per_token * tokens + len(layers) * attention.score_width(model) * pairs)
    if adapters:
        return complete - _saved(model, tokens, pairs, frozen(model, ("*",)), list(map(bool, adapters)))
    if not freeze:
        return complete
    kept = frozen(model, freeze)
    return complete - _saved(model, tokens, pairs, kept, kept.has_trained)


def _saved(model: ModelConfig, tokens: int, pairs: float, kept: Frozen, has_trained: Sequence[bool]) -> float:
    """FLOPs of the backward pass that frozen weights save: their gradients, and all of the layers before the first one
    with something to train. In that layer, all gradients of inputs count.
    """
    logits = 1 + (model.mtp_num_layers or 0)
    head = kept.output if model.untie_embeddings_and_output_weights else kept.embedding
    saved = 2.0 * tokens * (sum(kept.matrices) + logits * head)
    scores = 2 * attention_of(model).score_width(model) * pairs
    before = kept.matrices[: layers_without_gradients(model, kept, has_trained)]
    return saved + sum(2.0 * (matrices * tokens + scores) for matrices in before)


def _mlp_width(model: ModelConfig, has_experts: bool) -> int:
    """Width of the MLPs of a layer that process a token."""
    assert model.ffn_hidden_size
    if not has_experts:
        return model.ffn_hidden_size
    experts = model.moe_router_topk * (model.moe_ffn_hidden_size or 0)
    return experts + (model.moe_shared_expert_intermediate_size or 0)
