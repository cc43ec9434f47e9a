"""A config.json of transformers becomes a model, or is refused if the trainer lacks something in it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.trainer.huggingface.models import CASES, DEEPSEEK_EXPERTS, YARN
from trainer.contract.config import ConfigError, ModelConfig
from trainer.contract.families.huggingface import FAMILIES, family_for, model_of
from trainer.contract.record import config_section


def read(case: str, changes: dict[str, Any]) -> ModelConfig:
    """The model of a config.json, which is one of CASES with `changes`."""
    family, config = CASES[case]
    return model_of({"model_type": family, **config, **changes})[1]


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("llama2", {"quantization_config": {"quant_method": "fp8"}}, "only weights that are not quantized"),
        ("llama2", {"architectures": ["LlamaForSequenceClassification"]}, "architectures = ['LlamaForSeq"),
        ("llama2", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; only 'silu' is"),
        ("llama2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
        ("llama2", {"rope_theta": 10000.5}, "rope_theta = 10000.5 is not an integer"),
        ("llama2", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic' is not"),
        (
            "llama2",
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            "it must hold one set of parameters",
        ),
        ("llama-with-biases", {"mlp_bias": False}, "attention_bias = True and mlp_bias = False differ"),
        (
            "qwen2-window",
            {"max_window_layers": 2},
            "sliding_window = 16 applies to a part of the layers",
        ),
        ("qwen3-moe", {"use_sliding_window": True}, "use_sliding_window = True is not supported"),
        ("deepseek", {"rope_interleave": False}, "rope_interleave = False is not supported"),
        ("deepseek-experts", {"norm_topk_prob": False}, "norm_topk_prob = False is not supported"),
        ("deepseek-experts", {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported"),
        ("deepseek-experts", {"n_group": 2, "topk_group": 2}, "topk_group = 2 (it needs 1)"),
        ("deepseek-yarn", {"rope_parameters": YARN | {"mscale": 1.0}}, "requires mscale and mscale_all_dim"),
    ],
)
def test_a_model_that_the_trainer_would_compute_differently_is_refused(
    case: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        read(case, changes)


@config_section
class LaterModelConfig(ModelConfig):
    """The model section of a later version, with a key that no family carries."""

    logit_softcap: float | None = None


@pytest.mark.parametrize("case", CASES)
def test_a_key_that_no_family_carries_is_refused_unless_it_is_unset(case: str) -> None:
    family, config = CASES[case]
    section = vars(model_of({"model_type": family, **config})[1])
    assert family_for(LaterModelConfig(**section), family).name == family
    with pytest.raises(ConfigError, match=r"model\.logit_softcap = 30\.0"):
        family_for(LaterModelConfig(**section, logit_softcap=30.0), family)


@pytest.mark.parametrize(("is_tied", "head"), [(False, "lm_head"), (True, "model.embed_tokens")])
def test_the_copies_of_deepseeks_mtp_layers_are_those_of_the_output(is_tied: bool, head: str) -> None:
    model = read("deepseek", {"num_nextn_predict_layers": 1, "tie_word_embeddings": is_tied})
    copies = FAMILIES["deepseek_v3"].copies(model)
    assert copies["model.layers.4.shared_head.head.weight"] == f"{head}.weight"
    assert ("lm_head.weight" in copies) == is_tied


@pytest.mark.parametrize(
    ("case", "changes", "expected"),
    [
        ("qwen3-moe", {"decoder_sparse_step": 2}, {"moe_layer_freq": (0, 1, 0, 1)}),
        ("qwen3-moe", {"decoder_sparse_step": 2, "mlp_only_layers": [3]}, {"moe_layer_freq": (0, 1, 0, 0)}),
        ("qwen3-moe", {"norm_topk_prob": False}, {"moe_router_pre_softmax": True, "moe_layer_freq": None}),
        ("deepseek-experts", {"first_k_dense_replace": 3}, {"moe_layer_freq": (0, 0, 0, 1)}),
        ("deepseek", DEEPSEEK_EXPERTS | {"first_k_dense_replace": 4}, {"num_moe_experts": None}),
        ("deepseek", {"num_nextn_predict_layers": 2}, {"mtp_num_layers": 2}),
        ("qwen2-window", {"use_sliding_window": False}, {"window_size": None}),
        ("qwen2-window", {"max_window_layers": 4}, {"window_size": None}),
        ("llama2", {"rope_theta": 500000.0}, {"rotary_base": 500000, "rope_scaling": None}),
        ("llama3.2", {}, {"seq_length": 32, "max_position_embeddings": 128}),
    ],
)
def test_a_config_is_read_as_transformers_reads_it(
    case: str, changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    model = read(case, changes)
    assert {name: getattr(model, name) for name in expected} == expected


@pytest.mark.parametrize("scaling", [{"rope_type": "linear", "factor": 2.0}, {}])
def test_rope_scaling_overrides_rope_parameters_as_in_transformers(
    scaling: dict[str, Any], tmp_path: Path
) -> None:
    family, config = CASES["llama3.2"]
    config = {"model_type": family, **config, "rope_scaling": scaling, "rope_theta": 5e5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path).rope_parameters
    ours = model_of(config)[1]
    assert ours.rope_scaling is not None
    assert ours.rope_scaling.rope_type == theirs["rope_type"]
    assert ours.rotary_base == theirs["rope_theta"]
