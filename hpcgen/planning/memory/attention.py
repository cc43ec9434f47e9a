"""Memory of the attention of a layer, with its norm and projections. Bytes per token on a device.

The activations that are kept are those of Korthikanti et al., "Reducing activation recomputation in large transformer
models", arXiv 2205.05198, section 4, with separate terms for grouped queries and latent attention. Attention is assumed
to be fused, so its score matrix is never stored.
"""

from __future__ import annotations

from hpcgen.planning.setup import Setup
from trainer.contract.attention import attention_of
from trainer.contract.attention.kind import Activation
from trainer.contract.record import record


@record
class Part:
    """Memory of a part of a layer: the attention or the MLP."""

    kept: float
    """Activations from the forward to the backward pass."""
    recomputed: float
    """Activations that selective recomputation computes again, just before the backward pass of this part."""
    working: float
    """Most that exists in addition while this part is computed, such as gradients."""


def attention_part(setup: Setup) -> Part:
    """The attention with the norm before it.

    Complete heads are kept before and after their norms and their rotation, and latents before and after their norms.
    """
    model, hidden, attention = setup.model, setup.sharded_hidden_bytes, attention_of(setup.model)
    heads_per_device = model.num_attention_heads / setup.layout.tensor_model_parallel_size
    queries, keys_values, output = _widths(setup)
    # Both projections from the hidden states to latents keep their input, so in FP8 it takes as much as in bf16.
    is_one_input = attention.has_complete_heads
    normalized_input = setup.sharded_operand_bytes if is_one_input else hidden
    # inputs of the norm and of the first projection, a one-byte mask for the residual dropout
    kept = hidden + normalized_input + (setup.sharded(model.hidden_size) if model.hidden_dropout else 0)
    # queries, keys, values and the output, and the logarithm of the sum of each row of scores in fp32
    kept += queries + keys_values + output + 4 * heads_per_device
    if model.qk_layernorm and attention.has_complete_heads:  # queries and keys before their norms
        kept += queries + keys_values / 2
    latents = setup.sharded(setup.value_bytes * attention.latent_width(model))
    normalized = latents if model.qk_layernorm else 0.0
    kept += latents + normalized
    sizes: dict[Activation, float] = {
        "queries": queries,
        "keys and values": keys_values,
        "normalized latents": normalized,
        "normalized input": normalized_input,
    }
    modules = filter(setup.recomputes, attention.recomputable)
    recomputed = sum(sizes[activation] for module in modules for activation in attention.recomputable[module])
    if setup.training.cuda_graph_impl != "none":
        # one mask byte per query and key (transformer_layer.py, get_layer_static_inputs)
        kept += model.seq_length
    exchanged = _exchanged_bytes(setup)
    if setup.recomputes("core_attn"):
        recomputed += exchanged
        if model.position_embedding_type == "rope" and attention.has_complete_heads:
            # Its values are a view of the projection's output, which has the queries and keys before their rotation.
            kept += queries + keys_values / 2
    return Part(kept + exchanged - recomputed, recomputed, hidden + _working_bytes(setup))


def _widths(setup: Setup) -> tuple[float, float, float]:
    """Bytes of queries, of keys with values, and of the output."""
    model, layout = setup.model, setup.layout
    assert model.kv_channels
    assert model.num_query_groups
    heads = setup.value_bytes * model.num_attention_heads / layout.tensor_model_parallel_size
    groups = setup.value_bytes * max(1, model.num_query_groups / layout.tensor_model_parallel_size)
    values = attention_of(model).value_width(model)
    return heads * model.kv_channels, groups * (model.kv_channels + values), heads * values


def _exchanged_bytes(setup: Setup) -> float:
    """Bytes that attention keeps because context-parallel ranks exchange them.

    These are keys and values of other ranks, if the trainer gathers them, or with a2a the output before its exchange
    (Transformer Engine's dot_product_attention/context_parallel.py saves out_part). After its exchange, the projection
    keeps it.

    Within documents, with several samples, the output is kept twice: packed by sample for the attention, and by
    position for other parts of the layer (trainer/model/packing.py).
    """
    _, keys_values, output = _widths(setup)
    size = (setup.layout.context_parallel_size - 1) * keys_values if setup.gathers_keys else 0
    if setup.separates_documents and setup.training.micro_batch_size > 1:
        size += output
    if setup.layout.context_parallel_size > 1 and "a2a" in setup.context_exchange:
        size += output
    return size


def _working_bytes(setup: Setup) -> float:
    """Tensors of the attention that exist only in its own forward or backward pass.

    The backward pass has the gradients of the output, queries, keys and values. Context parallelism adds (Transformer
    Engine's dot_product_attention/context_parallel.py):

    - p2p: the forward pass collects keys and values of all ranks, and an output for each. Those of the last rank are
      complete. On others, some are halves, since half of their queries do not see the keys of later ranks.
    - all_gather: the backward pass has gathered keys and values, their gradients, and these in the order of the ranks.
    - a2a: all tensors exist before and after their exchange.
    """
    queries, keys_values, output = _widths(setup)
    gradients = queries + keys_values + output
    size, exchange = setup.layout.context_parallel_size, setup.context_exchange
    if size == 1:
        return gradients
    if exchange == "a2a":
        return 2 * gradients
    if exchange == "all_gather":
        return queries + output + 3 * size * keys_values
    hierarchy = setup.parallelism.hierarchical_context_parallel_sizes
    steps = hierarchy[-1] if hierarchy else size
    return max(gradients + 4 * keys_values, (steps - 1) * keys_values + steps * output)
