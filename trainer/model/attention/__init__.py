"""Modules and arguments of Megatron-Core for each kind of attention (`trainer.contract.attention`)."""

from __future__ import annotations

from trainer.contract.attention import attention_of
from trainer.contract.attention.kind import Attention
from trainer.contract.attention.latent import LATENT
from trainer.contract.attention.usual import USUAL
from trainer.contract.config import ModelConfig
from trainer.model.attention.latent import LatentParts
from trainer.model.attention.parts import Parts
from trainer.model.attention.usual import UsualParts

PARTS: dict[Attention, Parts] = {LATENT: LatentParts(), USUAL: UsualParts()}
"""Parts of each kind."""


def parts_of(model: ModelConfig) -> Parts:
    """Parts of the attention of `model`."""
    return PARTS[attention_of(model)]
