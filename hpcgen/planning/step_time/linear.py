"""Time of a linear layer: its three products, casts to FP8, and the exchange with tensor-parallel ranks."""

from __future__ import annotations

from typing import Literal

from hpcgen.planning.step_time.kernels import Precision
from hpcgen.planning.step_time.work import Device, Passes, Products, Seconds

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
    part = Passes.computing(products.forward, products.data_gradient + products.weight_gradient)
    if precision == "fp8":
        part += _casts(device, outputs, inputs, divided)
    elif has_bias:  # the cast of a gradient to FP8 also adds up that of the bias
        part += device.memory_bound("bias", tokens, outputs)
    if divided == "none" or device.groups.tensor.size == 1:
        return part
    width = inputs if divided == "outputs" else outputs
    if not device.setup.parallelism.sequence_parallel:
        return part + _reduced(device, divided, width, products)
    if device.setup.parallelism.tp_comm_overlap and precision == device.precision:
        piece = device.products(tokens / device.groups.tensor.size, outputs, inputs, precision)
        return part + _exchanged(device, divided, width, precision, products, piece)
    return part + _exchanged(device, divided, width, precision, products, None)


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
    is_tensorwise = device.setup.training.fp8_recipe == "tensorwise"
    agreed = device.links.all_reduce(4, device.groups.tensor) if is_tensorwise else 0.0
    if divided == "outputs":
        part, gathered = cast(device, sharded * inputs, tokens * outputs) + _waits(agreed, 0.0), inputs
    else:
        part, gathered = cast(device, tokens * inputs, sharded * outputs) + _waits(0.0, agreed), outputs
    transposed = device.kernels.memory("transpose", "forward", 2 * tokens * gathered)
    return part + Passes.computing(0.0, transposed)


def _reduced(device: Device, divided: Divided, width: float, products: Products) -> Passes:
    """Sums of tensors of `width` values per token over the ranks, without sequence parallelism."""
    size = device.setup.tokens * width * device.setup.value_bytes
    reduced = device.links.all_reduce(size, device.groups.tensor)
    if divided == "inputs":
        return _waits(reduced, 0.0)
    return _waits(0.0, device.links.added(reduced, products.weight_gradient))


def _exchanged(
    device: Device,
    divided: Divided,
    width: float,
    precision: Precision,
    products: Products,
    piece: Products | None,
) -> Passes:
    """Transfers of sequence parallelism, of tensors of `width` values per token: what they add to the products.

    Those of the backward pass start before a product that does not need them, if there is one. Others take turns with
    the pieces of their product, if it is divided into pieces (tp_comm_overlap). Sources:
    megatron/core/tensor_parallel/layers.py; Transformer Engine's pytorch/module/linear.py.
    """
    links, group = device.links, device.groups.tensor
    values = device.setup.tokens * width
    sums = values * device.setup.value_bytes
    gathered = links.all_gather(values if precision == "fp8" else sums, group)
    scattered = links.reduce_scatter(sums, group)
    pieces = piece or products

    def waits(transfer: float, product: float, of_piece: float) -> float:
        if piece is None:
            return transfer
        return max(0.0, _taking_turns(transfer, group.size * of_piece, group.size) - product)

    if divided == "outputs":
        hidden = links.added(gathered, products.data_gradient)
        hidden += links.added(scattered, products.weight_gradient)
        return _waits(waits(gathered, products.forward, pieces.forward), hidden)
    return _waits(
        waits(scattered, products.forward, pieces.forward),
        waits(gathered, products.data_gradient, pieces.data_gradient),
    )


def _taking_turns(transfer: float, product: float, number: int) -> float:
    """Time of a transfer and a product that are divided into pieces, of which each needs one of the other."""
    return max(transfer, product) + min(transfer, product) / number


def _waits(forward: float, backward: float) -> Passes:
    return Passes(Seconds(tensor_parallel=forward), Seconds(tensor_parallel=backward))
