"""Custom model: scaled embeddings and capped logits, as in Gemma 2 (arXiv 2408.00118, section 2).

    model: {model_provider: custom_model.py:CappedGPT}

Embeddings are multiplied by the root of the hidden size. A hyperbolic tangent limits logits to +-30.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

LOGIT_CAP = 30.0


class CappedGPT(GPTModel):
    """Megatron-Core's GPT with both changes. The first pipeline stage has the embedding, the last has the logits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.pre_process:
            self.embedding.register_forward_hook(self._scale)
        if self.post_process:
            self.output_layer.register_forward_hook(self._cap)

    def _scale(self, module: torch.nn.Module, inputs: Any, embeddings: torch.Tensor) -> torch.Tensor:
        return embeddings * math.sqrt(self.config.hidden_size)

    def _cap(self, module: torch.nn.Module, inputs: Any, output: tuple[torch.Tensor, Any]) -> Any:
        logits, bias = output  # [s, b, vocabulary / TP]: each rank caps its own shard
        return LOGIT_CAP * torch.tanh(logits / LOGIT_CAP), bias
