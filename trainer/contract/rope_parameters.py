"""Rotary position embeddings in Hugging Face's config.json and in Megatron-LM, and as keys of ModelConfig."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.contract.config import ConfigError, ModelConfig, RopeScaling, to_dict

THETA = 10000
"""transformers' default of rope_theta."""

SCALING = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"),
        *("attention_factor", "mscale", "mscale_all_dim"),
    ),
}
"""Keys of each supported type of scaling."""

USE_ROPE_SCALING = RopeScaling(
    rope_type="llama3",
    factor=8.0,
    original_max_position_embeddings=8192,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)
"""Scaling of Megatron-LM's --use-rope-scaling: constants of Megatron-Core's rotary_pos_embedding.py. pretrain_gpt.py
ignores --rope-scaling-factor."""


def to_config(model: ModelConfig) -> dict[str, Any]:
    """The keys of config.json. transformers 5 reads `rope_parameters`, transformers 4 the two others."""
    scaling = model.rope_scaling and to_dict(model.rope_scaling)
    given = {name: value for name, value in (scaling or {}).items() if value is not None}
    theta = float(model.rotary_base)
    return {
        "rope_parameters": {"rope_type": "default", **given, "rope_theta": theta},
        "rope_theta": theta,
        "rope_scaling": given or None,
    }


def older_transformers_problem(model: ModelConfig) -> str | None:
    """How transformers before 4.56 computes the exported `model` differently; None if it does not.

    With YaRN, it uses max_position_embeddings / original_max_position_embeddings in place of the factor
    (huggingface/transformers, issue 38224).
    """
    scaling = model.rope_scaling
    if scaling is None or scaling.rope_type != "yarn":
        return None
    original, length = scaling.original_max_position_embeddings, model.max_position_embeddings
    assert original
    assert length
    if length == scaling.factor * original:
        return None
    return (
        "transformers before 4.56 computes other logits: its factor of YaRN is max_position_embeddings / "
        f"original_max_position_embeddings = {length} / {original} = {length / original:g}, but this model's is "
        f"{scaling.factor:g}. For these versions, set max_position_embeddings = {round(scaling.factor * original)} in "
        "config.json"
    )


def from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys `rotary_base` and `rope_scaling` of ModelConfig.

    `rope_scaling` overrides `rope_parameters`, as in transformers
    (modeling_rope_utils.py, convert_rope_params_to_dict).

    Raises:
        ConfigError: a value that ModelConfig cannot express.
    """
    key = next((key for key in ("rope_scaling", "rope_parameters") if config.get(key)), None)
    rope = config[key] if key else {}
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        raise ConfigError(f"{key} = {rope!r} is not supported; it must hold one set of parameters")
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = rope.get("rope_theta", config.get("rope_theta", THETA))
    if not isinstance(theta, int | float) or theta != int(theta):
        raise ConfigError(f"rope_theta = {theta!r} is not an integer")
    rotary = {**config, **rope}.get("partial_rotary_factor", 1.0)
    if rotary not in (None, 1.0):
        raise ConfigError(f"partial_rotary_factor = {rotary!r} is not supported; only 1.0 is")
    return {"rotary_base": int(theta), "rope_scaling": _scaling(kind, rope, config)}


def _scaling(kind: Any, rope: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any] | None:
    if kind == "default":
        return None
    if kind not in SCALING:
        raise ConfigError(
            f"rope_type = {kind!r} is not supported; only {', '.join(('default', *SCALING))} are"
        )
    unread = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    given = {name: value for name, value in rope.items() if name not in unread and value is not None}
    # transformers' default; its own key at the top level is Phi-3's.
    length = config.get("original_max_position_embeddings") or config.get("max_position_embeddings")
    if kind != "linear":
        given.setdefault("original_max_position_embeddings", length)
    else:
        given.pop("original_max_position_embeddings", None)  # has no effect
    if unknown := sorted(given.keys() - set(SCALING[kind])):
        raise ConfigError(f"{unknown[0]} = {given[unknown[0]]!r} is not supported with rope_type = {kind!r}")
    return {"rope_type": kind, **given}
