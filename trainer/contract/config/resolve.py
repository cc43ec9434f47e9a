"""Replaces the nulls of a configuration with values that follow from the other keys.

hpcgen resolves a run file before planning; the trainer resolves any configuration it is given.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import operator
from collections.abc import Iterator

from trainer.contract.attention import attention_of, attention_problems
from trainer.contract.config import (
    BlendConfig,
    CheckpointConfig,
    ConfigError,
    ModelConfig,
    OptimizerConfig,
    ParallelismConfig,
    RopeScaling,
    TrainerConfig,
    TrainingConfig,
)
from trainer.contract.config.unused_keys import Mistake
from trainer.contract.model.batch_size import steps_within
from trainer.contract.model.experts import default_width, expert_checks, expert_tensor_parallel_size
from trainer.contract.wording import counted

WARMUP_TOKENS = 375_000_000
"""Warm-up of GPT-3: Brown et al., arXiv 2005.14165, appendix B."""

VOCAB_MULTIPLE = 128

YARN_BETA_FAST, YARN_BETA_SLOW = 32.0, 1.0
"""Bounds of YaRN's ramp for Llama: Peng et al., arXiv 2309.00071, section 3.2."""

SAVE_EVERY_MINUTES = 30.0
"""Default checkpoint interval, and so the maximum training time that a failure costs."""


def resolve(config: TrainerConfig) -> TrainerConfig:
    """Resolve model, parallelism, optimizer and checkpoint. A resolved `config` is returned unchanged.

    Raises:
        ConfigError: a null cannot be replaced, or a given value contradicts a resolved one.
    """
    model = resolve_model(config.model)
    resolved = dataclasses.replace(
        config,
        model=model,
        parallelism=resolve_parallelism(config.parallelism, config.model),
        optimizer=resolve_optimizer(config.optimizer, config.training, seq_length=config.model.seq_length),
        data=resolve_data(config.data, model),
        checkpoint=resolve_checkpoint(config.checkpoint),
    )
    for key, reason, advice in model_problems(config.model):
        raise ConfigError(
            f"model.{key}{shown_value(config.model, key)} {reason}. {advice[0].upper()}{advice[1:]}"
        )
    _check_vocabulary(resolved.model)
    _check_end_of_document(resolved)
    _check_schedule(resolved.optimizer)
    return resolved


def shown_value(model: ModelConfig, key: str) -> str:
    """The value of a key for a message: " = VALUE". Empty for a section."""
    value = operator.attrgetter(key)(model)
    return "" if dataclasses.is_dataclass(value) else f" = {json.dumps(value)}"


def resolve_model(model: ModelConfig) -> ModelConfig:
    """`model` without nulls, except where null means none and where `vocab_size` is null."""
    model = attention_of(model).resolve(model)
    ffn_hidden_size = model.ffn_hidden_size or 4 * model.hidden_size
    return dataclasses.replace(
        model,
        ffn_hidden_size=ffn_hidden_size,
        num_query_groups=model.num_query_groups or model.num_attention_heads,
        max_position_embeddings=model.max_position_embeddings or model.seq_length,
        init_method_std=model.init_method_std or default_init_method_std(model.hidden_size),
        padded_vocab_size=model.padded_vocab_size or (model.vocab_size and pad_vocab_size(model.vocab_size)),
        activation_func=model.activation_func or (None if model.swiglu else "gelu_tanh"),
        rope_scaling=model.rope_scaling and resolve_rope_scaling(model.rope_scaling),
        moe_ffn_hidden_size=default_width(model, ffn_hidden_size),
        moe_layer_freq=None if all(model.moe_layer_freq or ()) else model.moe_layer_freq,
    )


def resolve_rope_scaling(scaling: RopeScaling) -> RopeScaling:
    """`scaling` with YaRN's defaults."""
    if scaling.rope_type != "yarn":
        return scaling
    return dataclasses.replace(
        scaling,
        beta_fast=scaling.beta_fast or YARN_BETA_FAST,
        beta_slow=scaling.beta_slow or YARN_BETA_SLOW,
        truncate=True if scaling.truncate is None else scaling.truncate,
    )


def model_problems(model: ModelConfig) -> Iterator[Mistake]:
    """Keys that contradict another key of the section `model`."""
    return itertools.chain.from_iterable(model_checks(model))


def model_checks(model: ModelConfig) -> Iterator[Iterator[Mistake]]:
    """The checks of `model_problems`. They are independent of each other."""
    yield _activation_problems(model)
    yield from expert_checks(model)
    yield attention_problems(model)
    if model.mtp_num_layers is not None:
        yield _multi_token_problems(model)
    if model.rope_scaling is not None:
        yield _requires_rope("rope_scaling", model)
        yield _rope_scaling_problems(model.rope_scaling)


def _activation_problems(model: ModelConfig) -> Iterator[Mistake]:
    if model.swiglu and model.activation_func is not None:
        reason = "has no effect, because swiglu = true uses SiLU"
        yield "activation_func", reason, "set swiglu to false or remove it"


def _multi_token_problems(model: ModelConfig) -> Iterator[Mistake]:
    """megatron/training/arguments.py, validate_args. The stages would not add up gradients of learned positions."""
    if model.model_provider is not None:
        reason = "requires Megatron-Core's GPTModel, but model.model_provider is set"
        yield "mtp_num_layers", reason, "remove one of them"
    yield from _requires_rope("mtp_num_layers", model)


def _requires_rope(key: str, model: ModelConfig) -> Iterator[Mistake]:
    if model.position_embedding_type != "rope":
        reason = f"requires position_embedding_type = rope, but it is {model.position_embedding_type}"
        yield key, reason, f"set position_embedding_type to rope or remove {key}"


ROPE_SCALING_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": ((), ()),
    "llama3": (("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": (
        ("original_max_position_embeddings",),
        ("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"),
    ),
}
"""Keys of each rope_type besides factor: required and optional. Source: transformers' modeling_rope_utils.py."""


def _rope_scaling_problems(scaling: RopeScaling) -> Iterator[Mistake]:
    kind = scaling.rope_type
    required, optional = ROPE_SCALING_KEYS[kind]
    if missing := [key for key in required if getattr(scaling, key) is None]:
        reason = f"has no {', '.join(missing)}, which rope_type = {kind} requires"
        extends = missing == ["original_max_position_embeddings"]
        own = "set it to the seq_length of the first training, or " if extends else ""
        yield "rope_scaling", reason, f"{own}take the value from the model's config.json"
    for field in dataclasses.fields(scaling):
        is_used = field.name in ("rope_type", "factor", *required, *optional)
        if not is_used and getattr(scaling, field.name) is not None:
            yield f"rope_scaling.{field.name}", f"is not used by rope_type = {kind}", "remove it"
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if low is not None and high is not None and low >= high:
        reason = f"must be greater than low_freq_factor = {low:g}"
        yield (
            "rope_scaling.high_freq_factor",
            reason,
            f"use more than {low:g}",
        )
    slow, fast = scaling.beta_slow or YARN_BETA_SLOW, scaling.beta_fast or YARN_BETA_FAST
    if fast < slow:
        yield "rope_scaling.beta_fast", f"must be at least beta_slow = {slow:g}", f"use {slow:g} or more"


def resolve_parallelism(parallelism: ParallelismConfig, model: ModelConfig) -> ParallelismConfig:
    """`parallelism` with the ETP of a `model` with experts, and without a virtual pipeline of one chunk, since Core
    would interleave it."""
    resolved = parallelism
    if parallelism.virtual_pipeline_model_parallel_size == 1:
        resolved = dataclasses.replace(resolved, virtual_pipeline_model_parallel_size=None)
    if model.num_moe_experts is not None and parallelism.expert_tensor_parallel_size is None:
        size = expert_tensor_parallel_size(parallelism)
        resolved = dataclasses.replace(resolved, expert_tensor_parallel_size=size)
    return resolved


def resolve_optimizer(
    optimizer: OptimizerConfig, training: TrainingConfig, *, seq_length: int
) -> OptimizerConfig:
    """`optimizer` with min_lr, lr_decay_iters and lr_warmup_iters as numbers, and lr_wsd_decay_iters for WSD."""
    lr_decay_iters = optimizer.lr_decay_iters or training.train_iters
    lr_warmup_iters = optimizer.lr_warmup_iters
    if lr_warmup_iters is None:
        if optimizer.lr_warmup_fraction is not None:
            lr_warmup_iters = int(optimizer.lr_warmup_fraction * lr_decay_iters)
        else:
            limit = training.train_iters // 10
            lr_warmup_iters = steps_within(training, WARMUP_TOKENS // seq_length, limit)
    lr_wsd_decay_iters = optimizer.lr_wsd_decay_iters
    if optimizer.lr_decay_style == "WSD":
        lr_wsd_decay_iters = lr_wsd_decay_iters or max(1, lr_decay_iters // 10)
    return dataclasses.replace(
        optimizer,
        min_lr=default_min_lr(optimizer.lr) if optimizer.min_lr is None else optimizer.min_lr,
        lr_decay_iters=lr_decay_iters,
        lr_warmup_iters=lr_warmup_iters,
        lr_warmup_fraction=None,
        lr_wsd_decay_iters=lr_wsd_decay_iters,
    )


def resolve_data(data: BlendConfig, model: ModelConfig) -> BlendConfig:
    """`data` with the end-of-document token of mock samples, which is the last row of the resolved `model`'s embedding.

    Source: megatron/core/datasets/gpt_dataset.py, MockGPTLowLevelDataset, with `trainer.data.datasets.Vocabulary`.
    """
    if not (data.mock and data.needs_eod and data.eod_id is None and model.padded_vocab_size):
        return data
    return dataclasses.replace(data, eod_id=model.padded_vocab_size - 1)


def resolve_checkpoint(checkpoint: CheckpointConfig) -> CheckpointConfig:
    """`checkpoint` with an interval: SAVE_EVERY_MINUTES if neither steps nor minutes are given."""
    if checkpoint.save_interval is not None or checkpoint.save_interval_minutes is not None:
        return checkpoint
    return dataclasses.replace(checkpoint, save_interval_minutes=SAVE_EVERY_MINUTES)


def default_init_method_std(hidden_size: int) -> float:
    """sqrt(2 / (5 x hidden_size)). Source: Nguyen and Salazar, arXiv 1910.05895."""
    return math.sqrt(2 / (5 * hidden_size))


def default_min_lr(lr: float) -> float:
    """A tenth of the peak, rounded to six digits: 2e-4 becomes 2e-5, not 2.0000000000000003e-05."""
    return float(f"{lr / 10:.6g}")


def pad_vocab_size(vocab_size: int) -> int:
    """The next multiple of 128, independent of the layout, so that every layout has the same loss.

    Megatron-LM pads to a multiple of 128 x TP, so its model depends on the layout. Padded columns are not masked:
    50432 rows instead of 50304 raise the first loss by ln(50432 / 50304) = 0.0025.
    """
    return -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def _check_vocabulary(model: ModelConfig) -> None:
    if model.padded_vocab_size is None:
        raise ConfigError("model.vocab_size is null. Set it; the trainer does not read a tokenizer")
    if model.vocab_size is not None and model.padded_vocab_size < model.vocab_size:
        raise ConfigError(
            f"model.padded_vocab_size = {model.padded_vocab_size} is below "
            f"model.vocab_size = {model.vocab_size}"
        )


def _check_end_of_document(config: TrainerConfig) -> None:
    data, rows = config.data, config.model.padded_vocab_size
    if data.needs_eod and data.eod_id is None:
        raise ConfigError(
            "data.eod_id is null, but reset_attention_mask, reset_position_ids and eod_mask_loss need the ID of the "
            "end-of-document token. Set it; the trainer does not read a tokenizer"
        )
    if data.eod_id is not None and rows is not None and data.eod_id >= rows:
        raise ConfigError(
            f"data.eod_id = {data.eod_id} is not below model.padded_vocab_size = {rows}. Set it to the ID of the "
            "end-of-document token"
        )


def _check_schedule(optimizer: OptimizerConfig) -> None:
    """Check the conditions that Core only asserts, with a message that says what to do."""
    steps, end, least = optimizer.lr_warmup_iters, optimizer.lr_decay_iters, optimizer.min_lr
    assert steps is not None
    assert end is not None
    assert least is not None
    if steps >= end:
        raise ConfigError(
            f"optimizer: the warm-up of {counted(steps, 'step')} does not end before the decay ends at step {end}. "
            "Set a smaller optimizer.lr_warmup_iters"
        )
    for name, rate in (("min_lr", least), ("lr_warmup_init", optimizer.lr_warmup_init)):
        if rate > optimizer.lr:
            raise ConfigError(f"optimizer.{name} = {rate:g} is greater than optimizer.lr = {optimizer.lr:g}")
    if optimizer.lr_decay_style == "WSD" and (optimizer.lr_wsd_decay_iters or 0) > end - steps:
        raise ConfigError(
            f"optimizer.lr_wsd_decay_iters = {optimizer.lr_wsd_decay_iters} is more than the "
            f"{counted(end - steps, 'step')} between the warm-up and lr_decay_iters"
        )
