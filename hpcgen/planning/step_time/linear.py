"""Time of a linear layer: its three products, casts to FP8, and the exchange with tensor-parallel ranks."""

from __future__ import annotations

from typing import Literal

from hpcgen.planning.step_time.kernels import Precision
from hpcgen.planning.step_time.work import Device, Passes, Seconds

Divided = Literal["outputs", "inputs", "none"]
"""The side of the weight that tensor parallelism divides."""


def linear(
    device: Device,
    outputs: float,
    inputs: float,
    divided: Divided = "none",
    *,
    has_bias: bool = False,
    precision: Precision | None = None,
) -> Passes:
    """A linear layer whose weight is `outputs` x `inputs` on a rank. Default of the precision: that of the layers.

    A replicated weight is applied to the tokens between the layers.
    """
    precision = precision or device.precision
    tokens = device.sharded_tokens if divided == "none" else device.setup.tokens
    products = device.products(tokens, outputs, inputs, precision)
    part = Passes.computing(products[0], products[1] + products[2])
    if precision == "fp8":
        part += _casts(device, outputs, inputs, divided)
    elif has_bias:  # the cast of a gradient to FP8 also adds up that of the bias
        part += device.memory_bound("bias", tokens * outputs)
    width = inputs if divided == "outputs" else outputs
    if divided == "none" or device.groups.tensor.size == 1:
        return part
    return part + _exchange(device, divided, width, products, precision)


CASTS = {"tensorwise": ("cast_current", 6), "delayed": ("cast_delayed", 4)}
"""Kernels that cast a tensor to FP8, and bytes that they move per value.

They read the tensor and write it with its transpose. Current scaling first reads it for its maximum.
"""


def cast(device: Device, values: float, gradients: float) -> Passes:
    """Casts of the input of a product, and of the gradient of its output. Those of weights are in `optimizer`."""
    kernel, size = CASTS[device.setup.training.fp8_recipe]
    return Passes.computing(
        device.kernels.memory(kernel, "forward", size * values),
        device.kernels.memory(kernel, "forward", size * gradients),
    )


def _casts(device: Device, outputs: float, inputs: float, divided: Divided) -> Passes:
    """Casts of the input and of the gradient of the output. Of these, sequence parallelism gathers one.

    It is cast before. The ranks then agree on its maximum, and the gradient of the weight needs its transpose, which
    cannot be gathered (Transformer Engine's pytorch/distributed.py, _all_gather_fp8).
    """
    tokens, sharded = device.setup.tokens, device.sharded_tokens
    if divided == "none":
        return cast(device, sharded * inputs, sharded * outputs)
    if sharded == tokens:
        return cast(device, tokens * inputs, tokens * outputs)
    is_column = divided == "outputs"
    transposed = tokens * (inputs if is_column else outputs)
    part = cast(
        device, *((sharded * inputs, tokens * outputs) if is_column else (tokens * inputs, sharded * outputs))
    )
    part += Passes.computing(0.0, device.kernels.memory("transpose", "forward", 2 * transposed))
    if device.setup.training.fp8_recipe != "tensorwise":
        return part
    agreed = device.links.all_reduce(4, device.groups.tensor)
    return part + (_waits(agreed, 0.0) if is_column else _waits(0.0, agreed))


def _exchange(
    device: Device, divided: Divided, width: float, products: tuple[float, float, float], precision: Precision
) -> Passes:
    """Transfers of tensors of `width` values per token: what they add to the products.

    Sources: megatron/core/tensor_parallel/layers.py; Transformer Engine's pytorch/module/linear.py. Both start a
    transfer of the backward pass before a product that does not need it.
    """
    setup, links, group = device.setup, device.links, device.groups.tensor
    forward, data, weight = products
    values = setup.tokens * width
    sums = values * setup.value_bytes
    if not setup.parallelism.sequence_parallel:
        reduced = links.all_reduce(sums, group)
        if divided == "inputs":
            return _waits(reduced, 0.0)
        return _waits(0.0, links.added(reduced, weight))
    gathered = links.all_gather(values if precision == "fp8" else sums, group)
    scattered = links.reduce_scatter(sums, group)
    in_pieces = setup.parallelism.tp_comm_overlap and precision == device.precision
    if divided == "outputs":
        hidden = links.added(gathered, data) + links.added(scattered, weight)
        return _waits(_in_pieces(gathered, forward, group.size) if in_pieces else gathered, hidden)
    if in_pieces:
        return _waits(_in_pieces(scattered, forward, group.size), _in_pieces(gathered, data, group.size))
    return _waits(scattered, gathered)


def _in_pieces(transfer: float, product: float, pieces: int) -> float:
    """Time that a transfer adds to the product that needs it, if both are divided into pieces that take turns."""
    return max(transfer, product) + min(transfer, product) / pieces - product


def _waits(forward: float, backward: float) -> Passes:
    return Passes(Seconds(tensor_parallel=forward), Seconds(tensor_parallel=backward))
