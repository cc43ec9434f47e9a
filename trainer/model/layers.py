"""Parts of a transformer layer: Transformer Engine's, or torch's norms and attention.

Megatron-Core's own torch parts do not support sequence and context parallelism.
"""

from __future__ import annotations

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from trainer.contract.config import TrainerConfig
from trainer.contract.model.experts import moe_layer_pattern
from trainer.model import experts
from trainer.model.attention import parts_of
from trainer.model.attention.core import CoreAttention


def block_submodules(
    config: TrainerConfig, core: TransformerConfig, vp_stage: int | None, *, uses_engine: bool
) -> TransformerBlockSubmodules:
    """Parts of this chunk of the decoder: Transformer Engine's, or this module's, which use torch."""
    norm: type[torch.nn.Module] = _norm(core)
    if uses_engine:
        from megatron.core.extensions.transformer_engine import TENorm

        norm = TENorm
    num_layers = get_num_layers_to_build(core, vp_stage=vp_stage)
    first = get_transformer_layer_offset(core, vp_stage)
    kinds = moe_layer_pattern(config.model)[first : first + num_layers]
    layers = {kind: layer_spec(config, core, kind, uses_engine=uses_engine) for kind in sorted(set(kinds))}
    return TransformerBlockSubmodules(layer_specs=[layers[kind] for kind in kinds], layer_norm=norm)


def layer_spec(
    config: TrainerConfig, core: TransformerConfig, with_experts: bool, *, uses_engine: bool
) -> ModuleSpec:
    """Parts of a transformer layer: Transformer Engine's, or this module's, which use torch.

    If documents are separate, the attention takes their boundaries in place of a mask. This module's always does.
    """
    parts = parts_of(config.model)
    kind = {"num_experts": core.num_moe_experts if with_experts else None, **parts.spec_arguments}
    if uses_engine:
        layer = get_gpt_layer_with_transformer_engine_spec(
            moe_grouped_gemm=core.moe_grouped_gemm, qk_layernorm=core.qk_layernorm, **kind
        )
        if config.data.separates_documents:
            from trainer.model.packed_attention import PackedAttention  # imports Transformer Engine

            layer.submodules.self_attention.submodules.core_attention = PackedAttention
    else:
        layer = get_gpt_layer_local_spec(normalization=core.normalization, **kind)
        _use_torch(layer, core)
    parts.use(layer, core, None if uses_engine else _norm(core))
    if with_experts:
        experts.use_router(layer)
        if not uses_engine:
            experts.store_as_transformer_engine(layer)
    return layer


def _use_torch(layer: ModuleSpec, core: TransformerConfig) -> None:
    """Replace norms and attention of Core's local `layer`."""
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = _norm(core)
    layer.submodules.self_attention.submodules.core_attention = CoreAttention


class _Norm(torch.nn.Module):
    """Adapts torch's norms to Megatron-Core: its constructor, and the mark for gradients to be summed over ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps)
        # Each tensor-parallel rank normalizes part of the sequence, so finalize_model_grads must sum their gradients.
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize the last axis. Keeps no view of the QKV projection, as `CoreAttention`."""
        normalized: torch.Tensor = super().forward(x.contiguous())
        return normalized


class LayerNorm(_Norm, torch.nn.LayerNorm):
    """torch's LayerNorm as a part of Megatron-Core's layers."""


class RMSNorm(_Norm, torch.nn.RMSNorm):
    """torch's RMSNorm as a part of Megatron-Core's layers."""


def _norm(core: TransformerConfig) -> type[LayerNorm | RMSNorm]:
    return LayerNorm if core.normalization == "LayerNorm" else RMSNorm
