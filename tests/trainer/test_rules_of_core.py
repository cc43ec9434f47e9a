"""The rules on random runs with every kind of layer and layout, compared with Megatron-Core's configuration and groups.

tests/trainer/test_expert_rules_of_core.py does the same for experts and their routing.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from megatron.core import utils
from megatron.core.models.common.embeddings import rope_utils
from packaging.version import Version

from tests.planning.cases import valid_facts
from tests.trainer.core_groups import core_groups
from trainer.contract.config import TrainerConfig
from trainer.contract.config.resolve import resolve
from trainer.contract.rules.engine import ERRORS
from trainer.contract.rules.facts import Facts
from trainer.model.core_config import transformer_config
from trainer.model.kernels import Kernels

pytestmark = pytest.mark.filterwarnings("ignore")  # Megatron-Core warns about its own defaults

RANKS = 16
ENGINE = Kernels("2.8", "Transformer Engine", "te", None, on_gpu=True, grouped_gemm=True)
TINY = {
    "model__num_layers": 8,
    "model__hidden_size": 64,
    "model__num_attention_heads": 8,
    "model__seq_length": 64,
    "model__position_embedding_type": "rope",
    "model__add_bias_linear": False,
    "model__untie_embeddings_and_output_weights": True,
    "model__moe_aux_loss_coeff": 0.0,
    "training__micro_batch_size": 1,
    "training__global_batch_size": 32,
}
SIZES = {
    "model__num_layers": [4, 6, 7, 8, 10, 12],
    "model__num_attention_heads": [2, 4, 8, 12],
    "model__num_query_groups": [1, 2, 3, 4, 8],
    "model__kv_channels": [16, 24],
    "model__window_size": [16, 64],
    "model__qk_layernorm": [True],
    "model__add_bias_linear": [True],
    "model__untie_embeddings_and_output_weights": [False],
    "parallelism__tensor_model_parallel_size": [2, 3, 4],
    "parallelism__pipeline_model_parallel_size": [2, 3, 4],
    "parallelism__num_distributed_optimizer_instances": [2, 3, 4],
    "parallelism__overlap_grad_reduce": [True],
    "parallelism__overlap_param_gather": [True],
    "training__global_batch_size": [16, 24, 32, 64],
    "training__fp8": ["hybrid"],
    "data__reset_attention_mask": [True],
}
"""Values that any run may have."""

KINDS: list[dict[str, list[Any]]] = [
    {
        "parallelism__pipeline_model_parallel_size": [2, 2, 3, 4],
        "parallelism__virtual_pipeline_model_parallel_size": [None, None, 2, 3],
        "parallelism__num_layers_in_first_pipeline_stage": [None, None, 1, 2, 3],
        "parallelism__num_layers_in_last_pipeline_stage": [None, None, 1, 2, 3],
        "parallelism__account_for_embedding_in_pipeline_split": [False, False, True],
        "parallelism__account_for_loss_in_pipeline_split": [False, False, True],
        "model__mtp_num_layers": [None, None, 1, 2],
    },
    {
        "parallelism__pipeline_model_parallel_size": [2, 3, 4],
        "parallelism__pipeline_model_parallel_layout": [
            *(
                "Ettt|tttttL",
                "Ett|tt|tt|ttL",
                "E|t*4|t*4|L",
                "Et*4|t*4mL",
                "Et*4|t*3|t|mmL",
                "Et*4|t*4m|L",
                "Et*4|t*3|tmm|L",
                "Et*4|t|t|t|tm|L",
                "Et*2|t*2m|t*2|t*2L",
            ),
        ],
        "parallelism__virtual_pipeline_model_parallel_size": [None, None, 2],
        "model__mtp_num_layers": [None, None, 1, 2],
    },
    {
        "parallelism__context_parallel_size": [2, 4, 8],
        "parallelism__cp_comm_type": [None, "p2p", "all_gather", "a2a", "a2a+p2p", "a2a+p2p"],
        "parallelism__hierarchical_context_parallel_sizes": [None, (1, 2), (2, 1), (2, 2), (4, 1), (4, 2)],
    },
    {
        "model__num_moe_experts": [4, 6, 8],
        "model__moe_shared_expert_intermediate_size": [None, 64],
        "parallelism__expert_model_parallel_size": [1, 2, 3, 4, 8],
        "parallelism__expert_tensor_parallel_size": [None, None, 1, 2, 4],
        "parallelism__num_distributed_optimizer_instances": [1, 1, 2, 4],
    },
    {
        "model__multi_latent_attention": [True],
        "model__q_lora_rank": [None, 16],
        "model__kv_lora_rank": [None, 32],
        "model__qk_pos_emb_head_dim": [None, 7, 8],
        "model__v_head_dim": [None, 24],
        "parallelism__tensor_model_parallel_size": [1, 2],
    },
    {
        "model__num_moe_experts": [None, 8],
        "model__multi_latent_attention": [False, True],
        "training__recompute_granularity": ["selective", "full"],
        "training__recompute_method": [None, "uniform", "block"],
        "training__recompute_num_layers": [None, 1, 2, 3],
        "training__recompute_modules": [
            *(
                None,
                None,
                ("core_attn",),
                ("mlp",),
                ("moe",),
                ("moe_act", "layernorm"),
                ("mla_up_proj", "moe"),
            ),
        ],
        "model__mtp_num_layers": [None, None, 1],
    },
]
"""Values of which each run draws one group, so that they meet."""


def random_run(source: random.Random) -> Facts:
    changes: dict[str, Any] = {
        key: source.choice(values) for key, values in SIZES.items() if source.random() < 0.05
    }
    changes |= {key: source.choice(values) for key, values in source.choice(KINDS).items()}
    tensor = changes.get("parallelism__tensor_model_parallel_size", 1)
    changes["parallelism__sequence_parallel"] = (tensor > 1) == (source.random() < 0.95)
    return valid_facts(**{**TINY, **changes})


def accepts(facts: Facts) -> bool:
    return not any(violation for rule in ERRORS for violation in rule(facts))


def refusal(facts: Facts) -> str:
    """Core's message if it refuses the run; empty if it accepts it."""
    config = TrainerConfig(
        name="random",
        run_dir="/none",
        device="cuda",
        world_size=RANKS,
        model=facts.model,
        parallelism=facts.parallelism,
        training=facts.training,
        optimizer=facts.optimizer,
        data=facts.data,
    )
    try:
        with core_groups(facts.parallelism, RANKS):
            transformer_config(resolve(config), ENGINE)
    except Exception as error:  # Core raises many types
        return repr(error) or "no message"
    return ""


@pytest.mark.parametrize("number", [250, pytest.param(750, marks=pytest.mark.slow)])
def test_core_builds_what_the_rules_accept(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Core refuses many of these runs, so a missing rule would show."""
    monkeypatch.setattr(utils, "get_te_version", lambda: Version("2.8.0"))
    for name in ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd"):  # Transformer Engine's
        monkeypatch.setattr(rope_utils, name, lambda *_: None)
    source = random.Random(17)
    runs = [random_run(source) for _ in range(number)]
    accepted = [facts for facts in runs if accepts(facts)]
    assert [why for facts in accepted if (why := refusal(facts))] == []
    assert len(accepted) > number / 10
    others = [facts for facts in runs if not accepts(facts)]
    assert sum(bool(refusal(facts)) for facts in others[:100]) > 25
