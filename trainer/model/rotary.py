"""Rotary frequencies with the scaling of model.rope_scaling, equal to those of Hugging Face transformers.

Megatron-Core's rotary embedding has Llama 3.1's scaling with fixed constants, and no YaRN for GPTModel's rope. Here the
frequencies are computed from the run's configuration and replace those of Core's module.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention

from trainer.contract.config import ModelConfig, RopeScaling
from trainer.contract.errors import TrainerError


def scale_frequencies(chunk: GPTModel, model: ModelConfig) -> None:
    """Replace the frequencies of `chunk` by those of model.rope_scaling.

    Raises:
        TrainerError: the chunk is a custom model without Core's rotary embedding.
    """
    if model.rope_scaling is None:
        return
    if model.multi_latent_attention:
        _scale_latent_attention(chunk, model)
        return
    rotary = getattr(chunk, "rotary_pos_emb", None)
    if not isinstance(getattr(rotary, "inv_freq", None), torch.Tensor):
        raise TrainerError(
            f"model.rope_scaling sets the frequencies of rotary_pos_emb.inv_freq, which {type(chunk).__name__} "
            f"(model.model_provider = {model.model_provider}) does not have. Remove rope_scaling, and scale the "
            "frequencies in the model"
        )
    rotary.inv_freq = inverse_frequencies(model).to(rotary.inv_freq.device)


def _scale_latent_attention(chunk: GPTModel, model: ModelConfig) -> None:
    """Replace the frequencies in each layer, except those of YaRN, which Core's latent attention computes itself."""
    assert model.rope_scaling
    if model.rope_scaling.rope_type == "yarn":
        return
    for layer in chunk.modules():
        if isinstance(layer, MultiLatentAttention):
            layer.rotary_pos_emb.inv_freq = inverse_frequencies(model).to(
                layer.rotary_pos_emb.inv_freq.device
            )


def latent_attention(model: ModelConfig) -> dict[str, Any]:
    """Arguments of Core's MLATransformerConfig for the rotary embedding.

    Core's YaRN multiplies the rotated part of queries and keys by the quotient of transformers' `attention_factor`, and
    the scores by the square of 0.1 mscale_all_dim log(factor) + 1, as DeepseekV3 in transformers. Without mscale,
    transformers uses 1 in the numerator and leaves out the denominator.
    """
    scaling = model.rope_scaling
    arguments: dict[str, Any] = {"rotary_base": model.rotary_base, "rotary_scaling_factor": 1.0}
    if scaling is None or scaling.rope_type != "yarn":
        return arguments | {"rope_type": "rope"}
    return arguments | {
        "rope_type": "yarn",
        "rotary_scaling_factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_max_position_embeddings,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "mscale": scaling.mscale or 1.0,
        "mscale_all_dim": scaling.mscale_all_dim or 0.0,
    }


def softmax_scale(model: ModelConfig) -> float | None:
    """Factor of the attention scores; None for Core's default, 1 / sqrt(kv_channels).

    YaRN multiplies the rotated queries and keys by `attention_factor`, and so their products by its square. Latent
    attention only rotates a part of them, and scales it itself.
    """
    assert model.kv_channels
    is_yarn = model.rope_scaling is not None and model.rope_scaling.rope_type == "yarn"
    if not is_yarn or model.multi_latent_attention:
        return None
    assert model.rope_scaling
    return attention_factor(model.rope_scaling) ** 2 / math.sqrt(model.kv_channels)


def inverse_frequencies(model: ModelConfig) -> torch.Tensor:
    """Angle per position of each pair of channels, in fp32. `model` is resolved."""
    width, scaling = _rotated_width(model), model.rope_scaling
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    plain = 1.0 / model.rotary_base**exponents
    if scaling is None:
        return plain
    if scaling.rope_type == "linear":
        return plain / scaling.factor
    kept = _kept_by_llama3(plain, scaling) if scaling.rope_type == "llama3" else _kept_by_yarn(model, scaling)
    return plain * kept + plain / scaling.factor * (1 - kept)


def _rotated_width(model: ModelConfig) -> int:
    """Number of channels of a head that are rotated."""
    width = model.qk_pos_emb_head_dim if model.multi_latent_attention else model.kv_channels
    assert width
    return width


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
    width = _rotated_width(model)
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
