"""The rules of LoRA adapters from both sides."""

from __future__ import annotations

import pytest

from tests.planning.cases import MLA, MTP, broken, errors
from trainer.contract.rules import lora

LORA = {"lora__rank": 16, "checkpoint__load": "/base", "checkpoint__finetune": True}
"""Adapters that break no rule."""
MOE = LORA | {
    "model__num_moe_experts": 8,
    "model__moe_aux_loss_coeff": 0.01,
    "model__add_bias_linear": False,
    "parallelism__moe_grouped_gemm": False,
}
TP2 = {"parallelism__tensor_model_parallel_size": 2, "parallelism__sequence_parallel": True}
TARGETS = "lora__target_modules"
ATTENTION = ("linear_qkv", "linear_proj")

REFUSED = {
    "a scale without adapters": ({"lora__alpha": 8.0}, "lora.alpha", lora.keys_of_adapters_need_rank),
    "adapters of random weights": ({"lora__rank": 16}, "checkpoint.load", lora.adapters_need_model),
    "adapters of layers of a user": (
        LORA | {"model__layer_spec": "layers.py:spec"},
        "model.layer_spec",
        lora.adapters_need_layers_of_core,
    ),
    "adapters and MTP": (LORA | MTP, "model.mtp_num_layers", lora.adapters_need_layers_of_core),
    "adapters and frozen parameters": (
        LORA | {"training__freeze": ("embedding.*",)},
        "training.freeze",
        lora.adapters_freeze_the_rest,
    ),
    "a target that does not exist": (
        LORA | {TARGETS: ("linear_q",)},
        "lora.target_modules[0]",
        lora.targets_are_linear_layers,
    ),
    "targets of PEFT": (
        LORA | {TARGETS: ("q_proj", "v_proj", "linear_fc2")},
        "lora.target_modules",
        lora.targets_are_linear_layers,
    ),
    "a target of PEFT that this model lacks": (
        LORA | MLA | {TARGETS: ("q_proj",)},
        "lora.target_modules[0]",
        lora.targets_are_linear_layers,
    ),
    "a target that this model lacks": (
        LORA | MLA | {TARGETS: ("linear_proj", "linear_qkv")},
        "lora.target_modules[1]",
        lora.targets_are_linear_layers,
    ),
    "a layer that does not exist": (
        LORA | {TARGETS: ("decoder.layers.12.*",)},
        "lora.target_modules[0]",
        lora.targets_are_linear_layers,
    ),
    "no targets": (LORA | {TARGETS: ()}, "lora.target_modules", lora.targets_are_linear_layers),
    "a rank of the complete matrix": (LORA | {"lora__rank": 1024}, "lora.rank", lora.rank_is_low),
    "adapters and FP8": (
        LORA | {"training__fp8": "hybrid"},
        "training.fp8",
        lora.adapters_need_plain_kernels,
    ),
    "adapters in graphs": (
        LORA | {"training__cuda_graph_impl": "transformer_engine"},
        "training.cuda_graph_impl",
        lora.adapters_need_plain_kernels,
    ),
    "adapters and overlap": (
        LORA | TP2 | {"parallelism__tp_comm_overlap": True},
        "parallelism.tp_comm_overlap",
        lora.adapters_need_plain_kernels,
    ),
    "adapters of grouped experts": (
        MOE | {"parallelism__moe_grouped_gemm": None},
        "parallelism.moe_grouped_gemm",
        lora.adapters_of_experts_are_complete,
    ),
    "adapters of divided experts": (
        MOE | TP2,
        "parallelism.expert_tensor_parallel_size",
        lora.adapters_of_experts_are_complete,
    ),
}


@pytest.mark.parametrize(("changes", "path", "rule"), REFUSED.values(), ids=REFUSED)
def test_a_broken_rule_is_one_problem(changes, path, rule):
    assert broken(**changes) == [(path, rule)]


ACCEPTED = {
    "adapters": LORA,
    "adapters of latent attention": LORA | MLA,
    "adapters of some layers": LORA | {TARGETS: ("linear_fc1", "decoder.layers.1?.*"), "lora__rank": 64},
    "adapters of experts": MOE,
    "experts divided as a whole": MOE | TP2 | {"parallelism__expert_tensor_parallel_size": 1},
    "adapters next to grouped experts": MOE | {"parallelism__moe_grouped_gemm": True, TARGETS: ATTENTION},
    "experts of torch": MOE | {"training__transformer_impl": "torch", "parallelism__moe_grouped_gemm": None},
}


@pytest.mark.parametrize("changes", ACCEPTED.values(), ids=ACCEPTED)
def test_valid_values_pass(changes):
    assert errors(**changes) == []
