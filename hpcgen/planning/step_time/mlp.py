"""Time of the MLP or the experts of a layer, with their norm and residual."""

from __future__ import annotations

from hpcgen.planning.step_time.attention import residual
from hpcgen.planning.step_time.host import AFTER_ROUTING
from hpcgen.planning.step_time.linear import cast, linear
from hpcgen.planning.step_time.work import Device, Part, Passes, Seconds, added


def mlp_parts(device: Device) -> list[Part]:
    """A dense MLP."""
    model, ranks = device.setup.model, device.setup.layout.tensor_model_parallel_size
    assert model.ffn_hidden_size
    return [
        Part(_norm(device), "mlp"),
        Part(_mlp(device, model.ffn_hidden_size / ranks), "mlp"),
        Part(residual(device)),
    ]


def expert_parts(device: Device) -> list[Part]:
    """A router, the experts that it chooses, and shared experts."""
    model, ranks = device.setup.model, device.setup.layout.tensor_model_parallel_size
    shared = model.moe_shared_expert_intermediate_size
    return [
        Part(_norm(device), "layernorm"),
        Part(_router(device), "moe"),
        Part(_permutation(device), "moe"),
        Part(_dispatch(device), "moe"),
        Part(_experts(device), "moe"),
        Part(_weighted_activation(device), "moe_act"),
        Part(_mlp(device, shared / ranks) if shared else Passes(), "moe"),
        Part(residual(device)),
    ]


def _norm(device: Device) -> Passes:
    return device.norm(device.sharded_tokens, device.setup.model.hidden_size)


def _mlp(device: Device, width: float) -> Passes:
    """Two linear layers with an activation function of `width` values between them."""
    model = device.setup.model
    gates = 2 if model.swiglu else 1
    has_bias = model.add_bias_linear
    return added(
        (
            linear(device, gates * width, model.hidden_size, "outputs", has_bias=has_bias),
            device.memory_bound("swiglu" if model.swiglu else "gelu", device.setup.tokens, width),
            linear(device, model.hidden_size, width, "inputs", has_bias=has_bias),
        )
    )


def _router(device: Device) -> Passes:
    """The scores of the experts, with their product, and the choice."""
    model, values = device.setup.model, device.sharded_tokens * device.setup.model.hidden_size
    assert model.num_moe_experts
    return device.moving("router", 2 * values, 4 * values, model.hidden_size, model.num_moe_experts)


def _copies(device: Device) -> float:
    """Copies of tokens that the experts of the busiest device receive."""
    return device.imbalance * device.setup.tokens * device.setup.received_copies


def _permutation(device: Device) -> Passes:
    """Sorts tokens by expert, and adds up the outputs of the experts of each token.

    With several ranks, the copies that arrive from each rank are sorted again, and so are the outputs that return
    (megatron/core/transformer/moe/token_dispatcher.py).
    """
    hidden, experts = device.setup.model.hidden_size, device.setup.model.num_moe_experts
    assert experts
    copies = _copies(device) / device.setup.layout.expert_tensor_parallel_size
    size = 2 * (device.sharded_tokens + copies) * hidden
    parts = device.moving("permute", size, size, hidden, experts)
    parts += device.moving("unpermute", size, size, hidden, experts)
    if device.groups.expert.size > 1 and device.setup.local_experts > 1:
        parts += device.memory_bound("copy", 2 * _copies(device), hidden)
    return parts


def _experts(device: Device) -> Passes:
    """Two products for each expert of a device."""
    setup, model = device.setup, device.setup.model
    assert model.moe_ffn_hidden_size
    width = model.moe_ffn_hidden_size / setup.layout.expert_tensor_parallel_size
    number, copies = device.setup.local_experts, _copies(device)
    together = number if setup.groups_experts else 1
    total = Passes()
    for outputs, inputs in (
        (width * (2 if model.swiglu else 1), model.hidden_size),
        (model.hidden_size, width),
    ):
        products = device.products(copies / number, outputs, inputs, device.precision, together)
        backward = products.data_gradient + products.weight_gradient
        total += Passes.computing(products.forward, backward).times(number / together)
        if device.precision == "fp8":
            total += cast(device, copies * inputs, copies * outputs)
    return total


def _weighted_activation(device: Device) -> Passes:
    """The activation function of the experts, whose output is weighted by the router."""
    model = device.setup.model
    assert model.moe_ffn_hidden_size
    width = model.moe_ffn_hidden_size / device.setup.layout.expert_tensor_parallel_size
    return device.memory_bound("weighted_swiglu" if model.swiglu else "gelu", _copies(device), width)


def _dispatch(device: Device) -> Passes:
    """Tokens go to the ranks of their experts, and the outputs return. The backward pass does the same.

    The dispatcher alltoall sends each copy to the rank of its expert, and with expert tensor parallelism gathers the
    copies there. The dispatcher allgather gathers all tokens on all ranks, and reduces the outputs.
    """
    setup, links, groups = device.setup, device.links, device.groups
    hidden = setup.value_bytes * setup.model.hidden_size
    received = _copies(device) * hidden
    each_way = links.all_gather(received, groups.expert_tensor)
    if setup.parallelism.moe_token_dispatcher_type == "alltoall":
        sent = received / setup.layout.expert_tensor_parallel_size
        each_way += links.all_to_all(sent, groups.expert)
    else:
        tokens = device.sharded_tokens * groups.expert.size * groups.expert_tensor.size
        each_way = links.all_gather(tokens * hidden, groups.expert)
    waits = Seconds(expert_parallel=2 * each_way)
    if setup.model.moe_pad_expert_input_to_capacity:  # the host knows the shapes
        return Passes(waits, waits)
    return Passes(waits + Seconds(host=AFTER_ROUTING.value), waits)
