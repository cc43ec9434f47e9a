"""The common state of checkpoints, which Megatron-LM's pretrain_gpt.py and the trainer read from each other.

Its training code is not installed, so what it reads and writes is written down here, with the places it is from.
tests/trainer/test_exchange.py trains from such checkpoints.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from tests.trainer.megatron_lm_state import ARGS, EXACT, SAVED_AT, SCHEDULE, common_state
from tests.trainer.runs import gpt_config
from trainer.checkpoint import megatron_lm
from trainer.contract import config as configuration
from trainer.contract.config import ModelConfig, OptimizerConfig, ParallelismConfig, TrainerConfig
from trainer.contract.config.resolve import resolve
from trainer.contract.errors import TrainerError
from trainer.contract.resuming import hyperparameters
from trainer.contract.resuming.change import Change
from trainer.contract.rules.engine import contradictions
from trainer.optimizer.schedule import Schedule

COMPARED = ("num_layers", "hidden_size", "num_attention_heads", "add_position_embedding")
COMPARED_WITH_VOCAB_FILE = ("max_position_embeddings", "make_vocab_size_divisible_by", "tokenizer_type")
"""Read without a default by `check_checkpoint_args`: megatron/training/checkpointing.py, lines 102-136 of 0.16.1 and
143-181 of 0.19.0."""

TAKEN_OVER = (
    *(
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "seq_length",
        "num_attention_heads",
        "num_query_groups",
    ),
    *("group_query_attention", "kv_channels", "max_position_embeddings", "position_embedding_type"),
    *("add_position_embedding", "use_rotary_position_embeddings", "rotary_base", "rotary_percent"),
    *("rotary_interleaved", "add_bias_linear", "add_qkv_bias", "squared_relu", "swiglu"),
    *("untie_embeddings_and_output_weights", "normalization", "apply_query_key_layer_scaling"),
    *("attention_dropout", "hidden_dropout", "padded_vocab_size", "ckpt_format"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"),
)
"""With --use-checkpoint-args, by `load_args_from_checkpoint`: lines 1391-1465 of 0.16.1, 1884-1983 of 0.19.0. What the
checkpoint lacks has the flag's value, which would be silently another model."""

COUNTED = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")
"""`load_checkpoint`: lines 1746-1756 of 0.16.1."""


def config_of(corpus: str = "/corpus", **training: Any) -> TrainerConfig:
    plain = gpt_config(corpus, Path("/run"), EXACT)
    plain["training"] |= training
    return resolve(configuration.from_dict(TrainerConfig, plain, "test"))


def changes_of(there: Mapping[str, Mapping[str, Any]], config: TrainerConfig) -> tuple[Change, ...]:
    return hyperparameters.check_changes(hyperparameters.completed(there, config), config)


def test_a_checkpoint_has_every_argument_that_megatron_lm_reads() -> None:
    config = config_of(micro_batch_size=1)
    args = vars(megatron_lm.common_state(config, 5, 20)["args"])
    assert {*COMPARED, *COMPARED_WITH_VOCAB_FILE, *TAKEN_OVER, *COUNTED} <= args.keys()
    assert {name: args[name] for name in COMPARED} == {
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "add_position_embedding": True,
    }
    assert (args["consumed_train_samples"], args["no_save_rng"]) == (20, True)
    shared = args.keys() & ARGS.keys() - {"consumed_train_samples"}
    assert {name: args[name] for name in shared} == {name: ARGS[name] for name in shared}


def test_the_arguments_are_values_that_torch_reads_back_without_pickled_code(tmp_path: Path) -> None:
    common = megatron_lm.common_state(config_of(), 5, 20)
    torch.save(common, tmp_path / "common.pt")
    assert torch.load(tmp_path / "common.pt", weights_only=True) == common  # Core allows Namespace


def test_the_schedule_counts_samples() -> None:
    schedule = megatron_lm.common_state(config_of(), SAVED_AT, 12)["opt_param_scheduler"]
    assert schedule == SCHEDULE


def test_the_written_common_state_reads_back_unchanged() -> None:
    config = config_of()
    saved = {**common_state(), **megatron_lm.common_state(config, 5, 20)}
    saved["iteration"] = 5
    there = megatron_lm.resumed(saved, config.parallelism)
    assert (there.iteration, there.consumed_samples) == (5, 20)
    assert changes_of({"model": there.sections["model"]}, config) == ()


ROPE = {"position_embedding_type": "rope"}
MLA = ROPE | {"multi_latent_attention": True}
YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


@pytest.mark.parametrize(
    ("model", "args"),
    [
        ({"activation_func": "gelu_tanh"}, {"bias_gelu_fusion": True, "squared_relu": False}),
        ({"activation_func": "gelu"}, {"bias_gelu_fusion": False, "squared_relu": False}),
        ({"activation_func": "gelu", "add_bias_linear": False}, {"add_bias_linear": False}),
        ({"activation_func": "squared_relu"}, {"bias_gelu_fusion": False, "squared_relu": True}),
        ({"swiglu": True, "add_bias_linear": False, "add_qkv_bias": True}, {"add_qkv_bias": True}),
        ({"qk_layernorm": True}, {"qk_layernorm": True}),
        ({"window_size": 8}, {"window_size": (7, 0)}),
        ({"num_moe_experts": 8, "moe_aux_loss_coeff": 0.01}, {"num_experts": 8, "moe_layer_freq": 1}),
        (
            {"num_moe_experts": 8, "moe_layer_freq": [0, 1, 1, 1], "moe_ffn_hidden_size": 96},
            {"moe_layer_freq": [0, 1, 1, 1], "moe_ffn_hidden_size": 96},
        ),
        (ROPE | {"rope_scaling": LLAMA3}, {"use_rope_scaling": True}),
        (
            ROPE | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
            {"rotary_seq_len_interpolation_factor": 4.0},
        ),
        (ROPE | {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3}, {"mtp_num_layers": 2}),
        (MLA | {"q_lora_rank": 24}, {"rope_type": "rope", "v_head_dim": 128, "q_lora_rank": 24}),
        (MLA | {"rope_scaling": YARN}, {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.0}),
        (
            MLA | {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}},
            {"rotary_scaling_factor": 40.0, "mscale_all_dim": 0.7},
        ),
    ],
    ids=str,
)
def test_a_model_is_carried_in_their_arguments(model: dict[str, Any], args: dict[str, Any]) -> None:
    document = gpt_config("/corpus", Path("/run"))
    document["model"] |= model
    config = resolve(configuration.from_dict(TrainerConfig, document, "test"))
    common = megatron_lm.common_state(config, 5, 20)
    written = vars(common["args"])
    assert {name: written[name] for name in args} == args
    there = megatron_lm.resumed(common_state(**written), config.parallelism)
    assert changes_of({"model": there.sections["model"]}, config) == ()
    resolved = hyperparameters.sections(config)["model"]
    assert {name: there.sections["model"][name] for name in model} == {name: resolved[name] for name in model}


def test_each_key_of_a_model_is_an_argument_or_documented() -> None:
    """With a key that pretrain_gpt.py does not get, it would silently compute another model."""
    model = MLA | {"num_moe_experts": 8, "window_size": 8}
    document = gpt_config("/corpus", Path("/run"))
    document["model"] |= model
    config = resolve(configuration.from_dict(TrainerConfig, document, "test"))
    args = vars(megatron_lm.common_state(config, 5, 20)["args"])
    other_names = {"num_moe_experts": "num_experts", "activation_func": "squared_relu"}
    exchange = Path("docs/exchange.md").read_text(encoding="utf-8")
    for field in dataclasses.fields(ModelConfig):
        assert other_names.get(field.name, field.name) in args or re.search(rf"\b{field.name}\b", exchange)


@pytest.mark.parametrize(
    "unread",
    [
        {"moe_router_pre_softmax": True, "moe_router_score_function": "sigmoid"},
        {"moe_router_num_groups": 4},
        {"moe_router_bias_update_rate": 0.1},
        {"moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "none"},
        {"moe_expert_capacity_factor": -1.0, "moe_token_drop_policy": "position"},
    ],
    ids=str,
)
def test_arguments_that_megatron_core_does_not_read_are_not_part_of_the_model(unread: dict[str, Any]) -> None:
    """The trainer would refuse such keys."""
    section = megatron_lm.resumed(common_state(num_experts=8, **unread), ParallelismConfig()).sections[
        "model"
    ]
    model = configuration.from_dict(ModelConfig, section, "test")
    assert model.num_moe_experts == 8
    assert contradictions(model) == []


@pytest.mark.parametrize(
    ("args", "section"),
    [
        ({"num_query_groups": 1, "group_query_attention": False}, {"num_query_groups": 4}),
        ({"num_query_groups": 2, "group_query_attention": True}, {"num_query_groups": 2}),
        (MLA | {"kv_channels": 16}, {"kv_channels": None}),
        (MLA | {"rope_type": "rope", "rotary_scaling_factor": 40.0}, {"rope_scaling": None}),
        ({"kv_lora_rank": 32, "v_head_dim": 128}, {"kv_lora_rank": None, "v_head_dim": None}),
    ],
    ids=str,
)
def test_arguments_mean_what_they_mean_in_megatron_lm(args: dict[str, Any], section: dict[str, Any]) -> None:
    """Megatron-LM sets the width of heads and the number of groups for attention that does not use them."""
    found = megatron_lm.resumed(common_state(**args), ParallelismConfig()).sections["model"]
    assert {name: found.get(name) for name in section} == section


def test_yarn_is_written_as_megatron_core_names_it() -> None:
    """With --use-checkpoint-args, pretrain_gpt.py then does not compute rope without scaling."""
    document = gpt_config("/corpus", Path("/run"))
    document["model"] |= ROPE | {"rope_scaling": YARN}
    config = resolve(configuration.from_dict(TrainerConfig, document, "test"))
    args = vars(megatron_lm.common_state(config, 5, 20)["args"])
    assert (args["position_embedding_type"], args["use_rotary_position_embeddings"]) == ("yarn", False)


@pytest.mark.parametrize(
    ("every", "layers"), [(1, None), (2, [1, 0, 1, 0]), (3, [1, 0, 0, 1]), ([0, 1, 1, 1], [0, 1, 1, 1])]
)
def test_a_frequency_of_moe_layers_counts_from_the_first_layer(every: Any, layers: list[int] | None) -> None:
    """Source: Megatron-Core, get_gpt_decoder_layer_specs in gpt_layer_specs.py."""
    common = common_state(num_experts=8, moe_layer_freq=every)
    assert megatron_lm.resumed(common, ParallelismConfig()).sections["model"]["moe_layer_freq"] == layers


def test_hyperparameters_of_megatron_lm_are_compared_like_the_trainers() -> None:
    config = config_of()
    there = megatron_lm.resumed(common_state(), config.parallelism)
    assert changes_of(there.sections, config) == ()

    other = megatron_lm.resumed(
        common_state("/elsewhere", seed=7, adam_beta2=0.999, split="969, 30, 1"), config.parallelism
    )
    with pytest.raises(TrainerError) as refused:
        changes_of(other.sections, config)
    for line in (
        "training.seed: 7 -> 1234",
        "optimizer.adam_beta2: 0.999 -> 0.95",
        "data.split: 969,30,1 -> 8,1,1",
        'data.datasets: [{"prefix": "/elsewhere", "weight": null}]',
    ):
        assert line in str(refused.value)


def test_a_blend_of_megatron_lm_is_read() -> None:
    common = common_state(data_path=["0.7", "/a", "0.3", "/b"])
    assert megatron_lm.resumed(common, ParallelismConfig()).sections["data"]["datasets"] == [
        {"prefix": "/a", "weight": 0.7},
        {"prefix": "/b", "weight": 0.3},
    ]
    common = common_state(data_path=["/a", "/b"])
    assert megatron_lm.resumed(common, ParallelismConfig()).sections["data"]["datasets"] == [
        {"prefix": "/a", "weight": None},
        {"prefix": "/b", "weight": None},
    ]


@pytest.mark.parametrize(
    ("args", "changes", "message"),
    [
        ({"is_hybrid_model": True}, {}, "does not support: is_hybrid_model = True"),
        ({"num_experts": 8, "moe_latent_size": 32}, {}, "does not support: moe_latent_size = 32"),
        (
            {"num_experts": 8, "moe_router_topk_limited_devices": 2},
            {},
            "does not support: moe_router_topk_limited_devices = 2",
        ),
        (
            {"num_experts": 8, "moe_router_load_balancing_type": "sinkhorn"},
            {},
            "moe_router_load_balancing_type = 'sinkhorn'",
        ),
        ({"mtp_use_repeated_layer": True, "no_rope_freq": 4}, {}, "= 4, mtp_use_repeated_layer = True"),
        (
            {"multi_latent_attention": True, "qk_layernorm": True, "q_lora_rank": None},
            {},
            "qk_layernorm without q_lora_rank (megatron-core 0.16",
        ),
        (
            {"multi_latent_attention": True, "rope_type": "rope", "mscale_all_dim": 1.0}
            | {"rotary_scaling_factor": 40.0},
            {},
            "mscale_all_dim with rope_type = 'rope'",
        ),
        ({"window_size": (3, 0), "window_attn_skip_freq": 4}, {}, "window_attn_skip_freq = 4"),
        ({"window_size": (3, -1)}, {}, "window_size = (3, -1) (supported is (N, 0)"),
        (
            {"use_rope_scaling": True, "rope_scaling_factor": 32.0},
            {},
            "rope_scaling_factor = 32.0 (pretrain_",
        ),
        ({"position_embedding_type": "yarn"}, {}, "position_embedding_type = 'yarn'"),
        ({"openai_gelu": True}, {}, "openai_gelu without bias_gelu_fusion"),
        ({"sft": True}, {}, "sft = True"),
        ({"use_distributed_optimizer": False}, {}, "--use-distributed-optimizer"),
        ({}, {"optimizer": None}, "without the optimizer state"),
        ({}, {"content_metadata": None}, "does not say how its optimizer state is sharded"),
        (
            {"tensor_model_parallel_size": 2},
            {"content_metadata": {"distrib_optim_sharding_type": "dp_reshardable"}},
            "--dist-ckpt-optim-fully-reshardable",
        ),
        (
            {"num_experts": 8, "expert_model_parallel_size": 2, "tensor_model_parallel_size": 4},
            {"content_metadata": {"distrib_optim_sharding_type": "dp_reshardable"}},
            "expert_model_parallel_size: 2, expert_tensor_parallel_size: 4",
        ),
    ],
)
def test_unsupported_checkpoints_of_megatron_lm_are_refused_by_name(
    args: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(TrainerError, match=re.escape(message)):
        megatron_lm.resumed(common_state(**args) | changes, ParallelismConfig())


def test_loading_only_weights_needs_neither_optimizer_nor_arguments() -> None:
    common = common_state(use_distributed_optimizer=False, sft=True) | {"optimizer": None}
    there = megatron_lm.resumed(common, ParallelismConfig(), weights_only=True)
    assert there.sections.keys() == {"model"}
    assert megatron_lm.resumed({}, ParallelismConfig(), weights_only=True).sections == {}
    with pytest.raises(TrainerError, match="is_hybrid_model"):
        megatron_lm.resumed(common_state(is_hybrid_model=True), ParallelismConfig(), weights_only=True)
    with pytest.raises(TrainerError, match="finetune"):
        megatron_lm.resumed({"iteration": 3}, ParallelismConfig())


class OneGroup:
    """The part of an optimizer that schedules use."""

    def __init__(self) -> None:
        self.param_groups = [{"wd_mult": 1.0, "lr_mult": 1.0}]


@pytest.mark.process
def test_after_a_ramp_up_the_rates_are_those_of_megatron_lm() -> None:
    """Megatron-LM's schedule follows samples, the trainer's iterations: 8 steps of a smaller batch have 20 samples."""
    theirs = OptimizerParamScheduler(
        OneGroup(),
        init_lr=0.0,
        max_lr=1e-2,
        min_lr=1e-3,
        lr_warmup_steps=8,
        lr_decay_steps=60,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=60,
        wd_incr_style="constant",
    )
    theirs.step(20)
    common = common_state(consumed_train_samples=20, rampup_batch_size=["2", "2", "18"])
    common |= {"iteration": 8, "opt_param_scheduler": theirs.state_dict()}
    there = megatron_lm.resumed(common, ParallelismConfig())
    optimizer = there.sections["optimizer"]
    assert (there.iteration, there.consumed_samples) == (8, 20)
    assert (optimizer["lr_warmup_iters"], optimizer["lr_decay_iters"]) == (5, 18)
    assert there.sections["training"]["rampup_batch_size"] == [2, 2, 18]

    ours = Schedule(OptimizerConfig(**optimizer), OneGroup(), train_iters=18)  # type: ignore[arg-type]
    ours.step(there.iteration)
    for _ in range(10):
        assert ours.rate() == pytest.approx(theirs.get_lr({}), rel=1e-12)
        ours.step(1)
        theirs.step(4)


def test_a_custom_schedule_is_stored_by_its_import_path(corpus: str) -> None:
    plain = gpt_config(corpus, Path("/run"))
    plain["optimizer"]["lr_schedule"] = "rates.py:decay"
    config = resolve(configuration.from_dict(TrainerConfig, plain, "test"))
    assert (
        megatron_lm.common_state(config, 5, 20)["opt_param_scheduler"]["lr_decay_style"] == "rates.py:decay"
    )


@pytest.mark.parametrize(
    ("args", "is_separated"),
    [
        ({"transformer_impl": "transformer_engine", "reset_attention_mask": True}, False),
        (
            {"transformer_impl": "local", "masked_softmax_fusion": True, "reset_attention_mask": True},
            False,
        ),
        (
            {"transformer_impl": "local", "masked_softmax_fusion": False, "reset_attention_mask": True},
            True,
        ),
        (
            {
                "transformer_impl": "transformer_engine",
                "reset_attention_mask": False,
                "dataloader_inter_document_masking": True,
            },
            True,
        ),
    ],
)
def test_documents_are_separated_if_the_attention_of_megatron_lm_did_so(
    args: dict[str, Any], is_separated: bool
) -> None:
    data = megatron_lm.resumed(common_state(**args), ParallelismConfig()).sections["data"]
    assert data["reset_attention_mask"] is is_separated
