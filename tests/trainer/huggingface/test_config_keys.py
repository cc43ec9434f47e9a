"""Every key of config.json, left out and with every type of JSON: read as transformers reads it, or refused by name."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hpcgen.config.from_huggingface import sections
from hpcgen.errors import HpcgenError
from tests.selection import select
from tests.trainer.huggingface.models import LLAMA3, YARN
from trainer.contract.config import ConfigError
from trainer.contract.errors import TrainerError
from trainer.contract.families.huggingface import FAMILIES, config_of, model_of
from trainer.contract.wording import shown
from trainer.huggingface.reading import HuggingFaceDirectory

SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}
DOCUMENTS: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 300, "n_positions": 128, "n_embd": 48, "n_layer": 4, "n_head": 4},
    "llama": SHAPE,
    "mistral": SHAPE | {"num_attention_heads": 8} | {"sliding_window": 16},
    "qwen2": SHAPE | {"num_attention_heads": 32} | WINDOW,
    "qwen3": SHAPE | {"num_attention_heads": 32} | WINDOW,
    "mixtral": SHAPE | {"num_attention_heads": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": SHAPE | {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 40},
    "deepseek_v3": SHAPE
    | {"num_attention_heads": 128, "num_key_value_heads": 128, "first_k_dense_replace": 1}
    | {"n_routed_experts": 16, "moe_intermediate_size": 40, "num_hidden_layers": 5}
    | {"n_group": 8, "topk_group": 4, "num_experts_per_tok": 8},
}
"""A config.json of each family, in which any key can be left out."""

LEFT_OUT = object()
VALUES = [
    *(
        LEFT_OUT,
        None,
        True,
        False,
        0,
        1,
        3,
        -1,
        2**70,
        1.0,
        1.5,
        1e-3,
        -0.5,
        math.inf,
        math.nan,
        "",
        "x",
        "1",
    ),
    *([], [1], ["x"], [None], [[]], {}, {"a": 1}, {"rope_type": "linear", "factor": 2}),
    *(["full_attention"] * 4, ["sliding_attention"] * 4, ["full_attention", "sliding_attention"] * 2),
]

ROPE_PLACES = {"llama": "rope_scaling", "deepseek_v3": "rope_parameters"}
"""Families whose scaling of the rotary embedding is varied too, with the key that has it."""

NOT_READ = {"per_layer_config", "scoring_func", "topk_method", "moe_layer_freq"}
"""Keys that transformers ignores, or in which nothing but null is supported."""


def variants(family: str) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """A key, its value, and the document with it, for all keys that define the model."""
    known = FAMILIES[family]
    for key in (*known.defaults, *known.fixed, *known.aliases):
        for value in VALUES:
            document = {"model_type": family, **DOCUMENTS[family]}
            document.pop(known.aliases.get(key, key), None)
            yield key, value, document if value is LEFT_OUT else {**document, key: value}
    if family not in ROPE_PLACES:
        return
    for scaling in (LLAMA3, YARN, {"type": "linear", "factor": 2.0, "rope_theta": 1e6}):
        for key in ("rope_type", "type", "partial_rotary_factor", "mscale", *scaling):
            for value in VALUES:
                given = {name: each for name, each in scaling.items() if name != key}
                given |= {} if value is LEFT_OUT else {key: value}
                yield key, value, {"model_type": family, **DOCUMENTS[family], ROPE_PLACES[family]: given}


def as_transformers_reads(document: Mapping[str, Any]) -> dict[str, Any] | None:
    """What defines the model, in one form for all spellings. None if transformers refuses the document."""
    document = copy.deepcopy(dict(document))
    family = document["model_type"]
    for key, value in document.items():
        if isinstance(FAMILIES[family].defaults.get(key), float) and type(value) is int:
            document[key] = float(value)  # transformers 5 insists on the type
    try:
        config = CONFIG_MAPPING[family].from_dict(document)
    except Exception:  # each of its checks has another type
        return None
    read = {
        key: getattr(config, key)
        for key in (*FAMILIES[family].defaults, *FAMILIES[family].fixed)
        if hasattr(config, key) and not key.startswith("rope_") and key not in NOT_READ
    }
    layers = range(config.num_hidden_layers)
    if family == "gpt2":
        read["n_inner"] = config.n_inner or 4 * config.n_embd
        if config.activation_function in ("gelu_fast", "gelu_pytorch_tanh"):
            read["activation_function"] = "gelu_new"
        return read
    read["head_dim"] = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    read["rope"] = as_rope_reads(config.rope_parameters)
    read.pop("original_max_position_embeddings", None)
    if getattr(config, "partial_rotary_factor", None) in (None, 1.0):
        read.pop("partial_rotary_factor", None)
    if "layer_types" in FAMILIES[family].defaults:
        for key in ("layer_types", "max_window_layers", "use_sliding_window", "sliding_window"):
            read.pop(key)
        read["windows"] = [
            config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types
        ]
    if family == "qwen3_moe":
        dense, step = read.pop("mlp_only_layers"), read.pop("decoder_sparse_step")
        read["moe"] = [layer not in dense and step > 0 and (layer + 1) % step == 0 for layer in layers]
    if family == "deepseek_v3":
        read["head_dim"] = config.head_dim or config.qk_rope_head_dim
        read["dense"] = min(read.pop("first_k_dense_replace") or 0, config.num_hidden_layers)
        if read["dense"] == config.num_hidden_layers:
            for key in ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "topk_group"):
                read.pop(key)
            for key in ("n_shared_experts", "routed_scaling_factor", "n_group"):
                read.pop(key)
        elif config.n_group == 1:
            read.pop("topk_group")
    return read


def as_rope_reads(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters with YaRN's defaults, without those that have no effect."""
    given = {name: value for name, value in parameters.items() if value is not None and name != "type"}
    given = {name: value for name, value in given.items() if name != "partial_rotary_factor" or value != 1}
    if given["rope_type"] in ("default", "linear"):
        given.pop("original_max_position_embeddings", None)
    if given["rope_type"] == "default":
        given = {name: given[name] for name in ("rope_type", "rope_theta")}
    if given["rope_type"] == "yarn":
        given = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, **given}
    return given


def problem_with(message: str, keys: Collection[str], value: Any) -> str:
    """What a refusal lacks: one line with the key and, if it is a single value, the value. Empty if it has all."""
    if value is LEFT_OUT and not {*LLAMA3, *YARN}.intersection(keys):
        return f"refused, although there is a default: {message}"
    spellings = {shown(value), str(value).lower()}
    if value is None:
        spellings |= {"missing", "has no"}
    if type(value) is int:
        spellings |= {shown(float(value)), f"{value:g}"}
    is_single = value is not LEFT_OUT and not isinstance(value, list | dict) and "mscale" not in keys
    has_value = not is_single or any(spelling in message for spelling in spellings)
    has_key = any(key in message for key in keys)
    return "" if has_key and has_value and "\n" not in message else f"the message does not name it: {message}"


def problem_of(key: str, value: Any, document: Mapping[str, Any]) -> str:
    """How a document is read wrongly. Empty if it is read as transformers reads it, or refused by name."""
    try:
        family, model = model_of(copy.deepcopy(document))
    except ConfigError as error:
        aliases = FAMILIES[document["model_type"]].aliases
        return problem_with(str(error), {key, aliases.get(key, key)}, value)
    if key == "num_key_value_heads" and value is None:  # transformers 4 reads it in every family
        document = {**document, key: document["num_attention_heads"]}
    expected = as_transformers_reads(document)
    found = as_transformers_reads(config_of(family, model, "float32"))
    return "" if found == expected else f"transformers reads {expected}, hpcgen {found}"


@pytest.mark.filterwarnings("ignore")
# the keys of the other families are those of llama, some with experts
@pytest.mark.parametrize("family", select(FAMILIES.keys(), ("gpt2", "llama", "qwen3_moe")))
def test_each_key_is_read_as_transformers_reads_it_or_refused_by_name(family: str) -> None:
    problems = {
        f"{key} = {'(left out)' if value is LEFT_OUT else repr(value)}": problem
        for key, value, document in variants(family)
        if (problem := problem_of(key, value, document))
    }
    assert problems == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_all_wrong_values_are_named_at_once(family: str) -> None:
    known = FAMILIES[family]
    keys = [key for key in (*known.defaults, *known.fixed) if key != "activation_function"]
    with pytest.raises(ConfigError) as error:
        model_of({"model_type": family, **dict.fromkeys(keys, "x")})
    assert all(
        f"{key} = 'x' " in str(error.value) for key in keys if key not in ("hidden_act", "scoring_func")
    )


def test_both_commands_name_the_file(tmp_path: Path) -> None:
    document = {"model_type": "llama", **SHAPE, "num_hidden_layers": None, "num_attention_heads": "4"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(document))
    reason = "num_hidden_layers = None must be of type int; num_attention_heads = '4' must be of type int"
    with pytest.raises(TrainerError) as error:
        HuggingFaceDirectory(tmp_path)
    assert str(error.value) == f"{path}: {reason}"
    with pytest.raises(HpcgenError) as refused:
        sections(tmp_path, "weights")
    assert str(refused.value) == f"{path}: {reason}"


@pytest.mark.parametrize(
    "document",
    [[], None, "a", 1, {}, {"model_type": None}, {"model_type": ["llama"]}, {"model_type": "x" * 10_000}]
    + [{"model_type": "llama", "architectures": value} for value in ("LlamaForCausalLM", 1, [1], {}, [[]])]
    + [{"model_type": "llama", "hidden_size": json.loads("[" * 900 + "]" * 900)}],
)
def test_what_is_not_a_config_is_refused(document: Any) -> None:
    with pytest.raises(ConfigError) as error:
        model_of(document)
    assert len(str(error.value)) < 1000
