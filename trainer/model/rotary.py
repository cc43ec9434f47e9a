"""Rotary frequencies with the scaling of model.rope_scaling, equal to the frequencies of Hugging Face transformers.

Megatron-Core's rotary embedding has Llama 3.1's scaling with fixed constants, and no YaRN for GPTModel's rope. Here the
frequencies are computed from the run's configuration; the kinds of attention put them in place of Core's
(`trainer.model.attention`).
"""

from __future__ import annotations

import math

import torch

from trainer.contract.attention import attention_of
from trainer.contract.config import ModelConfig, RopeScaling


def inverse_frequencies(model: ModelConfig) -> torch.Tensor:
    """Angle per position of each pair of channels, in fp32. `model` is resolved."""
    width, scaling = attention_of(model).rotated_width(model), model.rope_scaling
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    plain = 1.0 / model.rotary_base**exponents
    if scaling is None:
        return plain
    if scaling.rope_type == "linear":
        return plain / scaling.factor
    kept = _kept_by_llama3(plain, scaling) if scaling.rope_type == "llama3" else _kept_by_yarn(model, scaling)
    return plain * kept + plain / scaling.factor * (1 - kept)


def attention_factor(scaling: RopeScaling) -> float:
    """Factor of the rotated queries and keys with YaRN, 0.1 log(factor) + 1 by default.

    Source: Peng et al., "YaRN: Efficient context window extension of large language models", arXiv 2309.00071, equation
    15. DeepSeek-V2 (arXiv 2405.04434) weights the logarithm with mscale and mscale_all_dim; as in transformers, these
    apply only if both are given and not zero.
    """
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    growth = 0.1 * math.log(scaling.factor)
    if scaling.mscale and scaling.mscale_all_dim:
        return (growth * scaling.mscale + 1) / (growth * scaling.mscale_all_dim + 1)
    return growth + 1


def _kept_by_llama3(plain: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Share of each frequency that Llama 3.1 does not scale: a ramp over the periods in the original length.

    Source: apply_scaling in models/llama3/reference_impl/model.py of meta-llama/llama-models; "The Llama 3 herd of
    models", arXiv 2407.21783.
    """
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    assert low is not None
    assert high is not None
    assert scaling.original_max_position_embeddings
    periods = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    return ((periods - low) / (high - low)).clamp(0, 1)


def _kept_by_yarn(model: ModelConfig, scaling: RopeScaling) -> torch.Tensor:
    """Share of each frequency that YaRN does not scale: a ramp over the channels.

    It ends at the channels with beta_fast and beta_slow periods in the original length (arXiv 2309.00071, section 3.2).
    """
    width = attention_of(model).rotated_width(model)
    assert scaling.beta_fast is not None
    assert scaling.beta_slow is not None
    assert scaling.original_max_position_embeddings

    def channel_pair(periods: float) -> float:
        ratio = scaling.original_max_position_embeddings / (periods * 2 * math.pi)  # type: ignore[operator]
        return width * math.log(ratio) / (2 * math.log(model.rotary_base))

    first, last = channel_pair(scaling.beta_fast), channel_pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    if first == last:
        last += 0.001  # as in transformers, for a step in place of a division by zero
    pairs = torch.arange(width // 2, dtype=torch.float32)
    return 1 - ((pairs - first) / (last - first)).clamp(0, 1)
