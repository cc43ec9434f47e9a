"""Memory of the MLP or the experts of a layer, with their norm. Bytes per token on a device.

See `attention` for the paper. Experts are assumed to have equal loads.
"""

from __future__ import annotations

from hpcgen.planning.memory.attention import Part
from hpcgen.planning.setup import Setup

ROUTER_BYTES = 12
"""Logits, scores and weights of each expert in fp32."""

ROW_MAP_BYTES = 8
"""Two int32 numbers for each expert: Transformer Engine's map of the copies of a token (its triton/permutation.py)."""


def mlp_part(setup: Setup, *, has_experts: bool) -> Part:
    """The MLP or the experts, with the norm before them."""
    model, hidden = setup.model, setup.sharded_hidden_bytes
    # inputs of the norm and of the MLP, a one-byte mask for the residual dropout
    outside = hidden + (setup.sharded(model.hidden_size) if model.hidden_dropout else 0)
    outside += hidden if has_experts else setup.sharded_operand_bytes
    inside = _experts_bytes(setup) if has_experts else sum(dense_kept_bytes(setup))
    recomputed = _recomputed_bytes(setup, inside, has_experts=has_experts)
    working = _experts_working_bytes(setup) if has_experts else _dense_working_bytes(setup)
    return Part(outside + inside - recomputed, recomputed, working)


def _recomputed_bytes(setup: Setup, inside: float, *, has_experts: bool) -> float:
    """Bytes that selective recomputation frees.

    Sources: transformer_layer.py, moe/moe_layer.py and moe/experts.py in megatron/core/transformer.
    """
    hidden, size = setup.sharded_hidden_bytes, 0.0
    if has_experts:
        if setup.recomputes("moe"):  # it keeps its input
            size += inside
        elif setup.recomputes("moe_act"):
            size += setup.received_copies * _activated_bytes(setup)
        if setup.recomputes("layernorm"):  # the output of a norm that is not computed inside a projection
            size += hidden
    elif setup.recomputes("mlp"):
        # Transformer Engine's MLP keeps the input of its norm, which the layer keeps anyway.
        size += inside + (setup.sharded_operand_bytes if setup.uses_engine else 0)
    return size


def _widths(setup: Setup, width: float) -> tuple[float, float]:
    """Bytes before and after the activation function of an MLP."""
    return setup.value_bytes * width * (2 if setup.model.swiglu else 1), setup.value_bytes * width


def _dense_widths(setup: Setup) -> tuple[float, float]:
    assert setup.model.ffn_hidden_size
    return _widths(setup, setup.model.ffn_hidden_size / setup.layout.tensor_model_parallel_size)


def dense_kept_bytes(setup: Setup) -> tuple[float, float]:
    """Activations that an MLP keeps: the inputs of its activation function and of its second product."""
    before, after = _dense_widths(setup)
    return before, after * setup.operand_bytes / setup.value_bytes


def expert_widths(setup: Setup) -> tuple[float, float]:
    """Bytes of a copy of a token before and after the activation function of an expert."""
    assert setup.model.moe_ffn_hidden_size
    return _widths(setup, setup.model.moe_ffn_hidden_size / setup.layout.expert_tensor_parallel_size)


def _activated_bytes(setup: Setup) -> float:
    """Bytes that experts keep after their activation function: its output weighted by the router.

    The kernel for SwiGLU weights it. After other functions, the output is also kept without the weight
    (bias_act_func in megatron/core/transformer/moe/experts.py).
    """
    _, after = expert_widths(setup)
    return after if setup.model.swiglu else 2 * after


def _dense_working_bytes(setup: Setup) -> float:
    """Gradients of an MLP, less the activations that its backward pass has released: the most of three moments.

    The gradient of the output exists in all of them, because it is also that of the residual.
    """
    before, after = _dense_widths(setup)
    _, released = dense_kept_bytes(setup)
    second_product = setup.gathered_hidden_bytes + after + _weight_gradient_bytes(setup, after)
    activation_function = before  # its input is still kept, but not its output, whose gradient it has
    first_product = (
        setup.gathered_hidden_bytes + setup.hidden_bytes - released + _weight_gradient_bytes(setup, before)
    )
    return setup.sharded_hidden_bytes + max(second_product, activation_function, first_product)


def _weight_gradient_bytes(setup: Setup, width: float) -> float:
    """The gradient of a weight between a hidden state and `width` bytes, until it is added to the fp32 buffer.

    A product that adds the gradient itself returns a tensor of the same size instead. Transformer Engine keeps these
    (`kernels`).
    """
    if not setup.trains_weights or (setup.uses_engine and setup.accumulates_in_products):
        return 0.0
    return width * setup.model.hidden_size / setup.tokens


def _experts_bytes(setup: Setup) -> float:
    """Activations of the router, and of the routed and the shared experts."""
    model = setup.model
    assert model.num_moe_experts
    row_map = ROW_MAP_BYTES if setup.uses_engine else 0
    outside = float((ROUTER_BYTES + row_map) * model.num_moe_experts)
    if model.moe_shared_expert_intermediate_size is not None:
        outside += sum(_widths(setup, model.moe_shared_expert_intermediate_size))
    before, _ = expert_widths(setup)
    routed = setup.received_copies * (setup.hidden_bytes + before + _activated_bytes(setup))
    return outside / setup.layout.tensor_model_parallel_size + routed


def _experts_working_bytes(setup: Setup) -> float:
    """Tensors of experts that exist only in their own forward or backward pass: the most of three moments.

    At the end of the forward pass, megatron/core/transformer/moe/moe_layer.py still refers to the copies of tokens as
    sent and as received. The outputs of the experts exist in the order of the experts, and in that of the ranks. Expert
    tensor parallelism adds the copies before it gathers them, and the outputs after it scatters them: each has the size
    of the copies that were sent. In the backward pass, the gradients of the MLP follow.
    """
    received, tensor_ranks = setup.received_copies, setup.layout.expert_tensor_parallel_size
    before, after = (received * width for width in expert_widths(setup))
    sent = 0.0
    if tensor_ranks > 1:
        sent = 3 * received / tensor_ranks
    elif setup.layout.expert_model_parallel_size > 1:
        sent = received
    forward = (3 * received + sent) * setup.hidden_bytes
    into, out_of = (_weight_gradient_bytes(setup, width) for width in expert_widths(setup))
    second_product = received * setup.hidden_bytes + after + out_of
    first_product = received * setup.hidden_bytes - after + into
    return max(forward, setup.sharded_hidden_bytes + max(second_product, before, first_product))
