"""Replaces the nulls of a configuration with values that follow from the other keys.

hpcgen resolves a run file before planning; the trainer resolves any configuration it is given.
"""

from __future__ import annotations

import dataclasses
import math

from trainer.contract.attention import attention_of
from trainer.contract.config import (
    BlendConfig,
    CheckpointConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelismConfig,
    RopeScaling,
    TrainerConfig,
    TrainingConfig,
)
from trainer.contract.model.adapters import LINEARS, linears
from trainer.contract.model.batch_size import steps_within
from trainer.contract.model.experts import default_width, expert_tensor_parallel_size

WARMUP_TOKENS = 375_000_000
"""Warm-up of GPT-3: Brown et al., arXiv 2005.14165, appendix B."""

VOCAB_MULTIPLE = 128

YARN_BETA_FAST, YARN_BETA_SLOW = 32.0, 1.0
"""Bounds of YaRN's ramp for Llama: Peng et al., arXiv 2309.00071, section 3.2."""

SAVE_EVERY_MINUTES = 30.0
"""Default checkpoint interval, and so the maximum training time that a failure costs."""


def resolve(config: TrainerConfig) -> TrainerConfig:
    """Resolve all sections of a `config` that obeys the rules. A resolved one is returned unchanged."""
    model = resolve_model(config.model)
    return dataclasses.replace(
        config,
        model=model,
        parallelism=resolve_parallelism(config.parallelism, config.model),
        optimizer=resolve_optimizer(config.optimizer, config.training, seq_length=config.model.seq_length),
        data=resolve_data(config.data, model),
        lora=resolve_lora(config.lora, model),
        checkpoint=resolve_checkpoint(config.checkpoint),
    )


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

    Source: megatron/core/datasets/gpt_dataset.py, MockGPTLowLevelDataset, with `trainer.data.gpt.Vocabulary`.
    """
    if not (data.mock and data.needs_eod and data.eod_id is None and model.padded_vocab_size):
        return data
    return dataclasses.replace(data, eod_id=model.padded_vocab_size - 1)


def resolve_lora(lora: LoraConfig, model: ModelConfig) -> LoraConfig:
    """`lora` with the scale, and the kinds of linear layers of the resolved `model`, if there are adapters."""
    if lora.rank is None:
        return lora
    kinds = {linear.kind for linear in linears(model)}
    return dataclasses.replace(
        lora,
        alpha=float(lora.rank) if lora.alpha is None else lora.alpha,
        target_modules=lora.target_modules or tuple(kind for kind in LINEARS if kind in kinds),
    )


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
