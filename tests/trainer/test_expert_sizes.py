"""Names and numbers of parameters of mixtures of experts, as the trainer builds them and as hpcgen plans them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.runs import GPT, LLAMA
from tests.trainer.single_rank import ON_CPU, resolved
from trainer.contract.config import TrainerConfig
from trainer.contract.model.model_size import active_parameter_count, parameter_count, parameter_names
from trainer.model import build
from trainer.model.parameter_names import global_names

pytestmark = pytest.mark.filterwarnings("ignore")  # Megatron-Core warns about its own defaults

BIASES = GPT | {"num_moe_experts": 4, "moe_router_topk": 1, "moe_router_pre_softmax": True}
DEEPSEEK = LLAMA | {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 48,
    "moe_shared_expert_intermediate_size": 32,
    "moe_layer_freq": [0, 1, 1, 1],
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "qk_layernorm": True,
}


@pytest.mark.parametrize(
    "model", [BIASES, DEEPSEEK, LLAMA | {"num_moe_experts": 2}], ids=["biases", "V3", "8x7B"]
)
def test_the_plan_knows_the_parameters_of_the_built_model(
    model: dict[str, Any], process_groups: Any, tmp_path: Path
) -> None:
    config = resolved(tmp_path, model)
    [chunk] = build.build_model(config, process_groups, ON_CPU)
    parameters: dict[str, torch.Tensor] = dict(global_names(chunk))
    assert sorted(parameters) == sorted(parameter_names(config.model))
    assert sum(map(torch.numel, parameters.values())) == parameter_count(config.model)
    idle = [name for name in parameters if ".local_experts." in name and not chosen(name, config)]
    unused = sum(parameters[name].numel() for name in idle)
    assert parameter_count(config.model) - unused == active_parameter_count(config.model)


def chosen(name: str, config: TrainerConfig) -> bool:
    """True for as many experts as a token has."""
    number = int(name.partition(".local_experts.")[2].partition(".")[0])
    return number < config.model.moe_router_topk
