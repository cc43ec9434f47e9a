"""Values that a run file may leave null, filled in from the others. Refusing values is left to the rules."""

from __future__ import annotations

import dataclasses
import math

from trainer.config import ModelConfig, OptimizerConfig, ParallelismConfig, TrainingConfig
from trainer.vocabulary import pad_vocab_size

WARMUP_TOKENS = 375_000_000
"""GPT-3's warm-up: Brown et al., arXiv 2005.14165, appendix B."""


def resolve_model(model: ModelConfig) -> ModelConfig:
    """`model` with its nulls filled in; `padded_vocab_size` stays null without any vocabulary size."""
    return dataclasses.replace(
        model,
        ffn_hidden_size=model.ffn_hidden_size or 4 * model.hidden_size,
        num_query_groups=model.num_query_groups or model.num_attention_heads,
        kv_channels=model.kv_channels or max(1, model.hidden_size // model.num_attention_heads),
        max_position_embeddings=model.max_position_embeddings or model.seq_length,
        init_method_std=model.init_method_std or default_init_method_std(model.hidden_size),
        padded_vocab_size=model.padded_vocab_size or (model.vocab_size and pad_vocab_size(model.vocab_size)),
    )


def resolve_parallelism(parallelism: ParallelismConfig) -> ParallelismConfig:
    """`parallelism` without a virtual pipeline of one chunk, which is none: Core would interleave it."""
    if parallelism.virtual_pipeline_model_parallel_size != 1:
        return parallelism
    return dataclasses.replace(parallelism, virtual_pipeline_model_parallel_size=None)


def resolve_optimizer(
    optimizer: OptimizerConfig, training: TrainingConfig, *, seq_length: int
) -> OptimizerConfig:
    """`optimizer` with the schedule in steps: min_lr, lr_decay_iters and lr_warmup_iters are numbers."""
    lr_decay_iters = optimizer.lr_decay_iters or training.train_iters
    lr_warmup_iters = optimizer.lr_warmup_iters
    if lr_warmup_iters is None:
        if optimizer.lr_warmup_fraction is not None:
            lr_warmup_iters = int(optimizer.lr_warmup_fraction * lr_decay_iters)
        else:
            tokens_per_iter = training.global_batch_size * seq_length
            lr_warmup_iters = min(WARMUP_TOKENS // tokens_per_iter, lr_decay_iters // 10)
    return dataclasses.replace(
        optimizer,
        min_lr=default_min_lr(optimizer.lr) if optimizer.min_lr is None else optimizer.min_lr,
        lr_decay_iters=lr_decay_iters,
        lr_warmup_iters=lr_warmup_iters,
        lr_warmup_fraction=None,
    )


def default_init_method_std(hidden_size: int) -> float:
    """sqrt(2 / (5 x hidden_size)), Nguyen and Salazar, arXiv 1910.05895."""
    return math.sqrt(2 / (5 * hidden_size))


def default_min_lr(lr: float) -> float:
    """A tenth of the peak, to six digits, so that 2e-4 gives 2e-5 and not 2.0000000000000003e-05."""
    return float(f"{lr / 10:.6g}")
