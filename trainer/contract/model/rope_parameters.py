"""Rotary position embeddings in Hugging Face's config.json and in Megatron-LM, and as keys of ModelConfig."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from trainer.contract.config import ConfigError, ModelConfig, RopeScaling, from_dict, to_dict, typed_value
from trainer.contract.families import config_json
from trainer.contract.families.config_json import contradiction
from trainer.contract.problem import Problem

KEYS = ("rotary_base", "rope_scaling")
"""Keys of ModelConfig that `to_config` writes."""

DEFAULTS = {
    "rope_parameters": None,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "partial_rotary_factor": None,
    "original_max_position_embeddings": None,
}
"""Keys of config.json, with transformers' defaults."""

TYPES: dict[str, Any] = {
    "rope_type": str,
    "type": str,
    "rope_theta": config_json.TYPES["rope_theta"],
    "partial_rotary_factor": config_json.TYPES["partial_rotary_factor"],
}
"""Types of the parameters that every type of scaling has."""

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
    """The keys of config.json. transformers 5 reads `rope_parameters`, and transformers 4 reads the other two."""
    scaling = model.rope_scaling and to_dict(model.rope_scaling)
    given = {name: value for name, value in (scaling or {}).items() if value is not None}
    theta = float(model.rotary_base)
    return {
        "rope_parameters": {"rope_type": "default", **given, "rope_theta": theta},
        "rope_theta": theta,
        "rope_scaling": given or None,
    }


def older_transformers_problem(model: ModelConfig) -> Problem | None:
    """How transformers before 4.56 computes the exported `model` differently; None if it does not.

    With YaRN, it uses max_position_embeddings / original_max_position_embeddings in place of the factor
    (huggingface/transformers, issue 38224).
    """
    scaling = model.yarn
    if scaling is None:
        return None
    original, length = scaling.original_max_position_embeddings, model.max_position_embeddings
    assert original
    assert length
    if length == scaling.factor * original:
        return None
    return Problem(
        "model.rope_scaling.factor",
        "computes other logits: its factor of YaRN is max_position_embeddings / "
        f"original_max_position_embeddings = {length} / {original} = {length / original:g}, but this model's is "
        f"{scaling.factor:g}. For these versions, set max_position_embeddings = {round(scaling.factor * original)} in "
        "config.json",
        subject="transformers before 4.56",
    )


def from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of ModelConfig, from a complete config.json without contradictions.

    Training sequences have the length before the rotary embedding was scaled.
    """
    _, given = _given(config)
    scaling = _scaling(given, config)
    length = config["max_position_embeddings"]
    return {
        "position_embedding_type": "rope",
        "rotary_base": int(_theta(given, config)),
        "rope_scaling": scaling,
        "seq_length": (scaling or {}).get("original_max_position_embeddings", length),
    }


def contradictions(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Yields what ModelConfig cannot express, from a complete config.json."""
    key, given = _given(config)
    try:
        for name in given.keys() & TYPES.keys():
            typed_value(TYPES[name], given[name], name, key)
        if any(isinstance(value, Mapping) for value in given.values()):
            reason = "is not supported; it must hold one set of parameters"
            raise ConfigError(contradiction({key: given}, reason))
        scaling = _scaling(given, config)
        if scaling is not None and scaling["rope_type"] in SCALING:
            _check_scaling(key, scaling)
    except ConfigError as error:
        yield from error.mistakes
        return
    if scaling is not None and (kind := scaling["rope_type"]) not in SCALING:
        yield contradiction(
            {"rope_type": kind}, f"is not supported; only {', '.join(('default', *SCALING))} are"
        )
    if (theta := _theta(given, config)) != int(theta):
        yield contradiction({"rope_theta": theta}, "is not an integer")
    if (rotary := {**config, **given}["partial_rotary_factor"]) not in (None, 1.0):
        yield contradiction({"partial_rotary_factor": rotary}, "is not supported; only 1.0 is")


def _given(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The key with the parameters, and the parameters. `rope_scaling` overrides `rope_parameters`, as in transformers
    (modeling_rope_utils.py, convert_rope_params_to_dict)."""
    key = "rope_scaling" if config["rope_scaling"] else "rope_parameters"
    return key, config[key] or {}


def _theta(given: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    theta: float = given.get("rope_theta", config["rope_theta"])
    return theta


def _scaling(given: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return None
    scaling = {name: value for name, value in given.items() if name not in TYPES and value is not None}
    if kind == "linear":
        scaling.pop("original_max_position_embeddings", None)  # has no effect
    elif "original_max_position_embeddings" not in given:
        # transformers' default; its own key at the top level is Phi-3's.
        length = config["original_max_position_embeddings"] or config["max_position_embeddings"]
        scaling["original_max_position_embeddings"] = length
    return {"rope_type": kind, **scaling}


def _check_scaling(key: str, scaling: dict[str, Any]) -> None:
    """Check the keys and types of a supported type of scaling.

    Raises:
        ConfigError: one is unknown or invalid.
    """
    kind = scaling["rope_type"]
    if unknown := sorted(scaling.keys() - {"rope_type", *SCALING[kind]}):
        found = contradiction(
            {unknown[0]: scaling[unknown[0]]}, f"is not supported with rope_type = {kind!r}"
        )
        raise ConfigError(dataclasses.replace(found, where=key))
    from_dict(RopeScaling, scaling, key)
