"""How many floating-point operations a step of the model takes, by a named formula; standard library only."""

from __future__ import annotations

from trainer.config import TrainerConfig
from trainer.vocabulary import vocabulary_rows

FORMULA = (
    "megatron-lm: 3 x forward matrix products, causal attention halved, with logits, without recomputation"
)


def flops_per_iteration(config: TrainerConfig) -> float:
    """Model FLOPs of one optimizer step over all ranks (Megatron-LM's num_floating_point_operations).

    Per token and layer: 2 x in x out for each matrix, and 2 x 2 x s x width / 2 for scores and their
    product with the values, where s is the sequence length. The backward pass costs twice the forward pass.
    """
    model = config.model
    h, s = model.hidden_size, model.seq_length
    head = model.kv_channels or h // model.num_attention_heads
    query = head * model.num_attention_heads
    key_value = head * (model.num_query_groups or model.num_attention_heads)
    mlp_matrices = 3 if model.swiglu else 2
    attention = 2 * h * (query + 2 * key_value) + 2 * query * h + 2 * s * query
    mlp = mlp_matrices * 2 * h * (model.ffn_hidden_size or 4 * h)
    per_token = model.num_layers * (attention + mlp) + 2 * h * vocabulary_rows(model)
    return 3.0 * per_token * s * config.training.global_batch_size
