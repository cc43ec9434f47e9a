"""Converts tensors between Megatron-Core's and Hugging Face's forms. Both directions are exact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from trainer.contract.config import ModelConfig
from trainer.contract.families.model_family import Weight
from trainer.lora.parts import join, split


def to_huggingface(weight: Weight, tensor: torch.Tensor, model: ModelConfig) -> dict[str, torch.Tensor]:
    """The tensors in which Hugging Face stores `tensor`, by name. Names still contain {n}."""
    match weight.form:
        case "vocabulary":
            parts = [tensor[: model.vocab_size]]
        case "transposed":
            parts = [tensor.t()]
        case "gate_up":
            parts = list(tensor.chunk(2))
        case "qkv":
            parts = list(split("linear_qkv", tensor, model).values())
        case "qkv_conv1d":
            joined = torch.cat(list(split("linear_qkv", tensor, model).values()))
            parts = [joined.t() if joined.dim() == 2 else joined]
        case _:
            parts = [tensor]
    return dict(zip(weight.names, parts, strict=True))


def to_core(weight: Weight, parts: Sequence[torch.Tensor], model: ModelConfig) -> torch.Tensor:
    """Convert Hugging Face's tensors, in the order of `weight.names`, to the tensor of Megatron-Core."""
    match weight.form:
        case "fp32":
            return parts[0].float()
        case "vocabulary":
            return _pad(parts[0], weight.shape[0])
        case "transposed":
            return parts[0].t().contiguous()
        case "gate_up":
            return torch.cat(list(parts))
        case "qkv":
            return _join_qkv(parts, model)
        case "qkv_conv1d":
            joined = parts[0].t() if parts[0].dim() == 2 else parts[0]
            return _join_qkv(joined.chunk(3), model)
        case _:
            return parts[0]


def expected_shapes(weight: Weight, model: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Shapes of the tensors in which Hugging Face stores `weight`, by name."""
    parts = to_huggingface(weight, torch.empty(weight.shape, device="meta"), model)
    return {name: tuple(part.shape) for name, part in parts.items()}


def _join_qkv(parts: Sequence[torch.Tensor], model: ModelConfig) -> torch.Tensor:
    return join("linear_qkv", dict(zip("qkv", parts, strict=True)), model)


def _pad(table: torch.Tensor, rows: int) -> torch.Tensor:
    """`table` with its mean row repeated up to `rows`.

    The loss of training includes the padding rows. With the mean row it differs from the loss without them by at most
    log(rows / vocab_size), since a mean of exponentials is at least the exponential of the mean. Zeros would dominate
    the softmax of a model whose logits are all negative, as GPT-2's are.
    """
    missing = rows - table.shape[0]
    if missing == 0:
        return table
    mean = table.float().mean(dim=0, keepdim=True).to(table.dtype)
    return torch.cat([table, mean.expand(missing, -1)])
