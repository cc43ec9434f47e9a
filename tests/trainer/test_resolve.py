"""Values that replace nulls."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.runs import gpt_config
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
from trainer.contract.rules import batch, cuda_graphs, engine, model, multi_token, schedule
from trainer.contract.rules.engine import TRAINING, facts_of, require
from trainer.contract.rules.facts import Rule

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


GRAPHS = {"cuda_graph_impl": "transformer_engine", "precision": "bf16"}
TWO_STAGES = {"device": "cuda", "world_size": 2, "parallelism": {"pipeline_model_parallel_size": 2}}
MTP = {
    "layer_spec": "my.layers:spec",
    "mtp_num_layers": 1,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
}


def stages(layout: str) -> dict[str, Any]:
    return {"pipeline_model_parallel_size": 3, "pipeline_model_parallel_layout": layout}


REFUSED = {
    "no size of the vocabulary": (
        {"model": {"vocab_size": None}},
        "model.vocab_size",
        engine.vocabulary_is_known,
    ),
    "padding cuts tokens off": (
        {"model": {"padded_vocab_size": 999}},
        "model.padded_vocab_size",
        model.padded_vocabulary_covers_vocabulary,
    ),
    "an activation beside swiglu": (
        {"model": {"swiglu": True, "activation_func": "gelu"}},
        "model.activation_func",
        model.activation_is_used,
    ),
    "biases without that of QKV": (
        {"model": {"add_qkv_bias": False}},
        "model.add_qkv_bias",
        model.keys_fit_attention,
    ),
    "scaled rope without rope": (
        {"model": {"rope_scaling": {"rope_type": "linear", "factor": 2}}},
        "model.rope_scaling",
        model.scaling_needs_rope,
    ),
    "linear with a key of another type": (
        {
            "model": {
                "position_embedding_type": "rope",
                "rope_scaling": {"rope_type": "linear", "factor": 2, "beta_fast": 32},
            }
        },
        "model.rope_scaling.beta_fast",
        model.scaling_has_its_keys,
    ),
    "yarn without the length of the first training": (
        {
            "model": {
                "position_embedding_type": "rope",
                "rope_scaling": {"rope_type": "yarn", "factor": 2},
            }
        },
        "model.rope_scaling",
        model.scaling_has_its_keys,
    ),
    "MTP without a layer of the user before it": (
        {"world_size": 3, "model": MTP, "parallelism": stages("Et*4|m|L")},
        "model.layer_spec",
        multi_token.mtp_is_after_a_layer_of_the_user,
    ),
    "a ramp-up of two numbers": (
        {"training": {"rampup_batch_size": [2, 2]}},
        "training.rampup_batch_size",
        batch.rampup_reaches_batch,
    ),
    "a ramp-up through parts of microbatches": (
        {"training": {"micro_batch_size": 2, "rampup_batch_size": [1, 1, 9]}},
        "training.rampup_batch_size",
        batch.rampup_is_multiple_of_microbatches,
    ),
    "a ramp-up that leaves the pipeline unfilled": (
        {
            "world_size": 2,
            "parallelism": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
            "training": {"micro_batch_size": 1, "rampup_batch_size": [2, 1, 9]},
        },
        "training.rampup_batch_size",
        batch.rampup_is_multiple_of_microbatches,
    ),
    "graphs of fp16": (
        TWO_STAGES | {"training": GRAPHS | {"precision": "fp16"}},
        "training.precision",
        cuda_graphs.cuda_graphs_need_bf16,
    ),
    "graphs of torch's layers": (
        TWO_STAGES | {"training": GRAPHS | {"transformer_impl": "torch"}},
        "training.transformer_impl",
        cuda_graphs.cuda_graphs_need_transformer_engine,
    ),
    "graphs with dropout": (
        TWO_STAGES | {"training": GRAPHS, "model": {"hidden_dropout": 0.1}},
        "model.hidden_dropout",
        cuda_graphs.cuda_graphs_need_no_dropout,
    ),
    "graphs of recomputed layers": (
        TWO_STAGES | {"training": GRAPHS | FULL},
        "training.cuda_graph_impl",
        cuda_graphs.cuda_graphs_need_no_full_recompute,
    ),
    "graphs of a pipeline with a ramp-up": (
        TWO_STAGES | {"training": GRAPHS | {"rampup_batch_size": [2, 2, 8]}},
        "training.cuda_graph_impl",
        cuda_graphs.cuda_graphs_in_pipelines_need_constant_batch,
    ),
    "warm-up as long as the run": (
        {"optimizer": {"lr_warmup_iters": 6}},
        "optimizer.lr_warmup_iters",
        schedule.warmup_ends_before_decay,
    ),
    "warm-up as long as the decay": (
        {"optimizer": {"lr_warmup_iters": 3, "lr_decay_iters": 3}},
        "optimizer.lr_warmup_iters",
        schedule.warmup_ends_before_decay,
    ),
    "min_lr above lr": ({"optimizer": {"min_lr": 1.0}}, "optimizer.min_lr", schedule.min_lr_is_not_above_lr),
    "a warm-up from above": (
        {"optimizer": {"lr_warmup_init": 1.0}},
        "optimizer.lr_warmup_init",
        schedule.warmup_starts_below_lr,
    ),
    "WSD's tail within the warm-up": (
        {"optimizer": {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 6}},
        "optimizer.lr_wsd_decay_iters",
        schedule.wsd_decay_follows_warmup,
    ),
}
"""Changes of a configuration of the trainer, the path of the mistake, and the rule that reports it."""


def changed(directory: Path, **changes: Any) -> TrainerConfig:
    """Six steps of a tiny GPT with changed values, or keys of sections."""
    document = gpt_config("corpus", directory)
    for name, value in changes.items():
        document[name] = document[name] | value if isinstance(value, dict) else value
    return configuration.from_dict(TrainerConfig, document, "test")


def refused(directory: Path, **changes: Any) -> list[str]:
    """The trainer's message about a configuration that breaks a rule."""
    with pytest.raises(ConfigError) as error:
        require(changed(directory, **changes))
    return [str(error.value)]


@pytest.mark.parametrize(("changes", "path", "rule"), REFUSED.values(), ids=REFUSED)
def test_a_configuration_that_breaks_a_rule_is_refused(
    changes: dict[str, Any], path: str, rule: Rule, tmp_path: Path
) -> None:
    """A batch size that does not fit, for example, would otherwise end the run days after the start."""
    [message] = refused(tmp_path, **changes)
    assert message.startswith(path)
    facts = facts_of(changed(tmp_path, **changes))
    assert next((found.path, rule) for rule in TRAINING for found in rule(facts)) == (path, rule)


def test_mtp_layers_with_the_parts_of_the_user_pass(tmp_path: Path) -> None:
    require(changed(tmp_path, world_size=3, model=MTP, parallelism=stages("Et*3|tm|L")))
