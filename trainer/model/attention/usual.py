"""Usual attention: Megatron-Core's SelfAttention."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from trainer.contract.config import ModelConfig
from trainer.contract.errors import TrainerError
from trainer.model.attention.parts import Parts
from trainer.model.kernels import Kernels
from trainer.model.rotary import attention_factor, inverse_frequencies


class UsualParts(Parts):
    """Core's attention. Its rotary embedding belongs to the model, and all layers share it."""

    def core_arguments(self, model: ModelConfig, kernels: Kernels) -> dict[str, Any]:
        """The scale of the scores, and where rope is computed."""
        is_rotated = model.position_embedding_type == "rope"
        return {
            "softmax_scale": _softmax_scale(model),
            "apply_rope_fusion": kernels.transformer_engine is not None and is_rotated,
        }

    def use(self, layer: ModuleSpec, core: TransformerConfig, norm: type | None) -> None:
        """Replace the norms of queries and keys by torch's."""
        if norm is not None and core.qk_layernorm:
            attention = layer.submodules.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = norm

    def scale_frequencies(self, chunk: torch.nn.Module, model: ModelConfig) -> None:
        """Replace the frequencies of the model's rotary embedding."""
        rotary: Any = getattr(chunk, "rotary_pos_emb", None)
        if not isinstance(getattr(rotary, "inv_freq", None), torch.Tensor):
            raise TrainerError(
                f"model.rope_scaling sets the frequencies of rotary_pos_emb.inv_freq, which {type(chunk).__name__} "
                f"(model.model_provider = {model.model_provider}) does not have. Remove rope_scaling, and scale the "
                "frequencies in the model"
            )
        rotary.inv_freq = inverse_frequencies(model).to(rotary.inv_freq.device)

    def refuse_wrong_parts(self, name: str, module: torch.nn.Module) -> None:
        """Nothing. All of Core's modules are right."""


def _softmax_scale(model: ModelConfig) -> float | None:
    """Factor of the attention scores; None for Core's default, 1 / sqrt(kv_channels).

    YaRN multiplies the rotated queries and keys by `attention_factor`, and so their products by its square.
    """
    scaling = model.yarn
    if scaling is None:
        return None
    assert model.kv_channels
    return attention_factor(scaling) ** 2 / math.sqrt(model.kv_channels)
