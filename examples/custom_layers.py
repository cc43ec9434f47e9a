"""Custom transformer layers: attention and MLP in parallel, as in GPT-NeoX (arXiv 2204.06745, section 2.1).

    model: {layer_spec: custom_layers.py:parallel_layers}

Both branches of a layer read the layer's input, so neither waits for the result of the other:
y = x + attention(norm1(x)) + mlp(norm2(x)).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer


class ParallelLayer(TransformerLayer):
    """Megatron-Core's layer with its parts connected differently. Checkpoints and all layouts work as before."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        rotary_pos_emb: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """[s, b, h] -> [s, b, h]. The second value is for cross-attention, which a GPT does not have."""
        # With Transformer Engine, the norms are fused into the matrix products, and these two do nothing.
        attention = self.self_attention(
            self.input_layernorm(hidden_states), attention_mask, rotary_pos_emb=rotary_pos_emb
        )
        mlp = self.mlp(self.pre_mlp_layernorm(hidden_states))
        output = self._add(self.self_attn_bda, attention, hidden_states)
        return self._add(self.mlp_bda, mlp, output), None

    def _add(self, bias_dropout_add: Any, branch: Any, residual: torch.Tensor) -> torch.Tensor:
        fused = self.config.bias_dropout_fusion
        return bias_dropout_add(self.training, fused)(branch, residual, self.config.hidden_dropout)


def parallel_layers(
    core: TransformerConfig, vp_stage: int | None, usual: TransformerBlockSubmodules
) -> TransformerBlockSubmodules:
    """Return the default layers of this rank's chunk, each as a ParallelLayer."""
    layers = [dataclasses.replace(layer, module=ParallelLayer) for layer in usual.layer_specs]
    return dataclasses.replace(usual, layer_specs=layers)
