"""The rotary embedding of latent attention as arguments of Megatron-Core and Megatron-LM, and back.

Both have the same names: MLATransformerConfig in megatron/core/transformer/transformer_config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.contract.config import ModelConfig

MEGATRON_YARN: Mapping[str, Any] = {
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
"""Defaults of MLATransformerConfig, for which Megatron-LM 0.16 has no options."""

MSCALE, MSCALE_ALL_DIM = 1.0, 0.0
"""Values that mean the same as transformers' YaRN without mscale and mscale_all_dim."""


def rotary_arguments(model: ModelConfig) -> dict[str, Any]:
    """The arguments for a resolved `model`, without rotary_base.

    Core's YaRN multiplies the rotated part of queries and keys by the quotient of transformers' `attention_factor`, and
    the scores by the square of 0.1 mscale_all_dim log(factor) + 1, as DeepseekV3 in transformers. Without mscale,
    transformers uses 1 in the numerator and leaves out the denominator.
    """
    scaling = model.yarn
    if scaling is None:
        return {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": scaling.factor,
        **{name: getattr(scaling, name) for name in MEGATRON_YARN},
        "mscale": scaling.mscale or MSCALE,
        "mscale_all_dim": scaling.mscale_all_dim or MSCALE_ALL_DIM,
    }


def yarn_section(
    factor: float, mscale: float = MSCALE, mscale_all_dim: float = MSCALE_ALL_DIM, **bounds: Any
) -> dict[str, Any]:
    """The section `model.rope_scaling` for arguments with YaRN. Of MEGATRON_YARN, `bounds` may have other values."""
    is_default = (mscale, mscale_all_dim) == (MSCALE, MSCALE_ALL_DIM)
    return {
        "rope_type": "yarn",
        **MEGATRON_YARN,
        **bounds,
        "factor": factor,
        **({} if is_default else {"mscale": mscale, "mscale_all_dim": mscale_all_dim}),
    }
