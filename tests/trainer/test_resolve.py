"""Values that replace nulls."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from trainer.contract import config as configuration
from trainer.contract.config import (
    CheckpointConfig,
    ConfigError,
    ModelConfig,
    OptimizerConfig,
    ParallelismConfig,
    RopeScaling,
    TrainerConfig,
    TrainingConfig,
)
from trainer.contract.config.resolve import (
    pad_vocab_size,
    resolve,
    resolve_checkpoint,
    resolve_model,
    resolve_optimizer,
    resolve_parallelism,
)
from trainer.contract.model.batch_size import Batches
from trainer.contract.rules.engine import require

FULL = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
SHAPE = {"num_layers": 2, "hidden_size": 1024, "num_attention_heads": 16, "seq_length": 512}


def test_activation_and_biases_follow_from_the_mlp_and_the_other_biases():
    def resolved(**model: Any) -> ModelConfig:
        return resolve_model(ModelConfig(**SHAPE, **model))

    assert (resolved().activation_func, resolved().add_qkv_bias) == ("gelu_tanh", True)
    assert resolved(activation_func="gelu").activation_func == "gelu"
    assert resolved(swiglu=True).activation_func is None
    assert resolved(add_bias_linear=False).add_qkv_bias is False
    assert resolved(add_bias_linear=False, add_qkv_bias=True).add_qkv_bias is True


def test_a_resolved_scaling_is_resolved_to_itself():
    scaling = RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=8192)
    model = resolve_model(ModelConfig(**SHAPE, position_embedding_type="rope", rope_scaling=scaling))
    assert model.rope_scaling == dataclasses.replace(scaling, beta_fast=32.0, beta_slow=1.0, truncate=True)
    assert resolve_model(model) == model


def test_sizes_follow_from_the_shape():
    model = resolve_model(ModelConfig(**SHAPE, vocab_size=50257))
    assert model.ffn_hidden_size == 4096
    assert model.num_query_groups == 16
    assert model.kv_channels == 64
    assert model.max_position_embeddings == 512
    assert model.init_method_std == math.sqrt(2 / 5120)
    assert model.padded_vocab_size == 50304


def test_given_values_are_kept():
    given = {
        "ffn_hidden_size": 3000,
        "num_query_groups": 4,
        "kv_channels": 80,
        "max_position_embeddings": 1024,
        "init_method_std": 0.02,
        "padded_vocab_size": 50432,
        "activation_func": "gelu",
        "add_qkv_bias": True,
    }
    model = ModelConfig(**SHAPE, **given, vocab_size=50257)
    assert resolve_model(model) == model


def test_without_a_vocabulary_the_padded_size_stays_null():
    assert resolve_model(ModelConfig(**SHAPE)).padded_vocab_size is None


@pytest.mark.parametrize(
    ("vocab_size", "rows"), [(1, 128), (128, 128), (129, 256), (50257, 50304), (128256, 128256)]
)
def test_padding_goes_to_the_next_multiple_of_128(vocab_size, rows):
    assert pad_vocab_size(vocab_size) == rows


def test_a_virtual_pipeline_of_one_becomes_null():
    model = ModelConfig(**SHAPE)
    alone = ParallelismConfig(virtual_pipeline_model_parallel_size=1)
    assert resolve_parallelism(alone, model) == ParallelismConfig()
    interleaved = ParallelismConfig(virtual_pipeline_model_parallel_size=2)
    assert resolve_parallelism(interleaved, model) is interleaved


def test_experts_are_as_wide_as_the_mlp_and_divided_as_it_is() -> None:
    model = resolve_model(ModelConfig(**SHAPE, num_moe_experts=8))
    assert model.moe_ffn_hidden_size == 4096
    assert resolve_model(model) == model
    axes = resolve_parallelism(ParallelismConfig(tensor_model_parallel_size=2), model)
    assert axes.expert_tensor_parallel_size == 2
    assert resolve_parallelism(axes, model) is axes
    dense = resolve_model(ModelConfig(**SHAPE))
    assert dense.moe_ffn_hidden_size is None
    assert resolve_parallelism(ParallelismConfig(), dense) == ParallelismConfig()


def resolved(train_iters: int = 100_000, **optimizer: float) -> OptimizerConfig:
    training = TrainingConfig(micro_batch_size=1, global_batch_size=256, train_iters=train_iters)
    return resolve_optimizer(OptimizerConfig(lr=2e-4, **optimizer), training, seq_length=2048)


def test_the_schedule_in_steps():
    optimizer = resolved()
    assert optimizer.min_lr == 2e-5
    assert optimizer.lr_decay_iters == 100_000
    assert optimizer.lr_warmup_iters == 375_000_000 // (256 * 2048) == 715


def test_a_short_run_warms_up_for_a_tenth_of_itself():
    assert resolved(train_iters=1000).lr_warmup_iters == 100
    assert resolved(train_iters=1000, lr_decay_iters=4000).lr_warmup_iters == 100


def test_a_growing_batch_warms_up_over_as_many_tokens():
    training = TrainingConfig(
        micro_batch_size=1, global_batch_size=256, train_iters=100_000, rampup_batch_size=(32, 32, 1_000_000)
    )
    steps = resolve_optimizer(OptimizerConfig(lr=2e-4), training, seq_length=2048).lr_warmup_iters
    samples = sum(batch.size for batch in Batches(dataclasses.replace(training, train_iters=steps)))
    assert 0 <= 375_000_000 - samples * 2048 < 256 * 2048


def test_the_tail_of_wsd_is_a_tenth_of_the_decay():
    assert resolved(train_iters=1000, lr_decay_style="WSD").lr_wsd_decay_iters == 100
    assert resolved(train_iters=1000).lr_wsd_decay_iters is None


def test_checkpoints_are_saved_by_the_clock_by_default():
    assert resolve_checkpoint(CheckpointConfig()).save_interval_minutes == 30
    for given in (CheckpointConfig(save_interval=5), CheckpointConfig(save_interval_minutes=5.0)):
        assert resolve_checkpoint(given) is given


@pytest.mark.parametrize(
    ("parallelism", "training", "message"),
    [
        ({}, {"rampup_batch_size": [2, 2]}, r"rampup_batch_size = \[2, 2\] must be three numbers"),
        (
            {},
            {"micro_batch_size": 2, "rampup_batch_size": [1, 1, 9]},
            r"rampup_batch_size .* not multiples of micro_batch_size x DP = 2 x 1 = 2 \(1 / 2\)",
        ),
        (
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
            {"rampup_batch_size": [2, 1, 9]},
            r"rampup_batch_size .* not multiples of micro_batch_size x DP x PP = 1 x 1 x 2 = 2 \(1 / 2\)",
        ),
    ],
)
def test_every_batch_of_a_ramp_up_must_fit(
    parallelism: dict[str, int], training: dict[str, Any], message: str, config: dict[str, Any]
):
    """A batch size that does not fit would otherwise end the run days after the start."""
    document = config | {"parallelism": parallelism, "training": config["training"] | training}
    document["world_size"] = parallelism.get("pipeline_model_parallel_size", 1)
    with pytest.raises(ConfigError, match=message):
        require(configuration.from_dict(TrainerConfig, document, "test"))


def test_mtp_layers_without_the_parts_of_the_user_are_refused(config: dict[str, Any]) -> None:
    document = config | {"world_size": 3}
    document["model"] = config["model"] | {
        "layer_spec": "my.layers:spec",
        "mtp_num_layers": 1,
        "position_embedding_type": "rope",
        "untie_embeddings_and_output_weights": True,
    }
    for layout in ("Et*3|tm|L", "Et*4|m|L"):
        document["parallelism"] = {
            "pipeline_model_parallel_size": 3,
            "pipeline_model_parallel_layout": layout,
        }
        parsed = configuration.from_dict(TrainerConfig, document, "test")
        if layout == "Et*3|tm|L":
            require(parsed)
            continue
        with pytest.raises(
            ConfigError, match=r"layer_spec = \"my.layers:spec\" would not change the MTP layers"
        ):
            require(parsed)


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("training", {"precision": "fp16"}, 'precision = "fp16"'),
        ("training", {"transformer_impl": "torch"}, 'transformer_impl = "torch"'),
        ("model", {"hidden_dropout": 0.1}, "hidden_dropout = 0.1"),
        ("training", FULL, "does not support training.recompute_granularity = full"),
        ("training", {"rampup_batch_size": [2, 2, 8]}, "rampup_batch_size changes it"),
    ],
)
def test_settings_that_do_not_work_with_cuda_graphs_are_refused(
    section: str, values: dict[str, Any], message: str, config: dict[str, Any]
):
    document = config | {"parallelism": {"pipeline_model_parallel_size": 2}}
    document["training"] = config["training"] | {"cuda_graph_impl": "transformer_engine", "precision": "bf16"}
    document[section] = document[section] | values
    parsed = configuration.from_dict(TrainerConfig, document | {"world_size": 2, "device": "cuda"}, "test")
    with pytest.raises(ConfigError, match=message) as error:
        require(parsed)
    assert "training.cuda_graph_impl" in str(error.value)


def test_a_fraction_becomes_steps_of_the_decay():
    optimizer = resolved(lr_warmup_fraction=0.01, lr_decay_iters=50_000)
    assert (optimizer.lr_warmup_iters, optimizer.lr_warmup_fraction) == (500, None)


def test_steps_win_over_a_fraction():
    assert resolved(lr_warmup_iters=7, lr_warmup_fraction=0.25).lr_warmup_iters == 7


def test_zero_is_not_null():
    optimizer = resolved(min_lr=0.0, lr_warmup_iters=0)
    assert (optimizer.min_lr, optimizer.lr_warmup_iters) == (0.0, 0)


def test_a_resolved_configuration_stays_unchanged(config: dict[str, Any]):
    once = resolve(configuration.from_dict(TrainerConfig, config, "test"))
    assert once.model.padded_vocab_size == 1024
    assert once.optimizer.lr_decay_iters == 6
    assert resolve(once) == once


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("model", {"vocab_size": None}, "vocab_size = null must be set"),
        ("model", {"padded_vocab_size": 999}, "999 is less than model.vocab_size = 1000"),
        (
            "model",
            {"swiglu": True, "activation_func": "gelu"},
            'activation_func = "gelu" has no effect.*Set swiglu to',
        ),
        ("model", {"add_qkv_bias": False}, "add_qkv_bias = false contradicts add_bias_linear = true"),
        ("model", {"rope_scaling": {"rope_type": "linear", "factor": 2}}, "requires position_embedding_type"),
        (
            "model",
            {
                "position_embedding_type": "rope",
                "rope_scaling": {"rope_type": "linear", "factor": 2, "beta_fast": 32},
            },
            "rope_scaling.beta_fast = 32(.0)? is not used by rope_type = linear",
        ),
        (
            "model",
            {"position_embedding_type": "rope", "rope_scaling": {"rope_type": "yarn", "factor": 2}},
            "rope_scaling has no original_max_position_embeddings, which rope_type = yarn requires",
        ),
        (
            "optimizer",
            {"lr_warmup_iters": 6},
            "lr_warmup_iters = 6 must be less than training.train_iters = 6",
        ),
        (
            "optimizer",
            {"lr_warmup_iters": 3, "lr_decay_iters": 3},
            "lr_warmup_iters = 3 must be less than .*decay_iters = 3",
        ),
        ("optimizer", {"min_lr": 1.0}, r"optimizer.min_lr = 1.0 is greater than optimizer.lr = 0.01"),
        ("optimizer", {"lr_warmup_init": 1.0}, r"optimizer.lr_warmup_init = 1.0 is greater"),
        ("optimizer", {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 6}, r"= 6 is more than the 5 steps"),
    ],
)
def test_configurations_that_contradict_themselves(
    section: str, values: dict[str, Any], message: str, config: dict[str, Any]
):
    document = config | {section: config[section] | values}
    with pytest.raises(ConfigError, match=message):
        require(configuration.from_dict(TrainerConfig, document, "test"))
