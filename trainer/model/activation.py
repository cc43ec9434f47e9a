"""Activation function of the MLP: the same function on every device, fused with the bias where Core can."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from megatron.core.activations import squared_relu

from trainer.contract.config import ModelConfig

Activation = Callable[[torch.Tensor], torch.Tensor]

FUNCTIONS: dict[str, Activation] = {
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
    "squared_relu": squared_relu,
}


def activation(model: ModelConfig, *, on_gpu: bool) -> tuple[Activation, bool]:
    """The values of Core's `activation_func` and `bias_activation_fusion` for the resolved `model`.

    Core's kernel for torch's gelu computes the tanh approximation (fused_bias_gelu.py), needs a bias, and does not
    weight the outputs of experts. All others are computed unfused. The kernel for SwiGLU has neither restriction.
    """
    if model.swiglu:
        return torch.nn.functional.silu, on_gpu
    assert model.activation_func
    has_kernel = on_gpu and model.add_bias_linear and model.num_moe_experts is None
    if model.activation_func == "gelu_tanh" and has_kernel:
        return torch.nn.functional.gelu, True
    return FUNCTIONS[model.activation_func], False
