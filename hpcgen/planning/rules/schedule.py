"""Rules about the learning rate over the run."""

from __future__ import annotations

from collections.abc import Iterator

from hpcgen.planning.rules.facts import Facts, Rule, Violation
from trainer.resolve import default_min_lr


def min_lr_is_not_above_lr(facts: Facts) -> Iterator[Violation]:
    """min_lr <= lr (megatron/core/optimizer_param_scheduler.py, OptimizerParamScheduler)."""
    optimizer = facts.optimizer
    if optimizer.min_lr is not None and optimizer.min_lr > optimizer.lr:
        yield Violation(
            path="optimizer.min_lr",
            reason=f"is greater than optimizer.lr = {optimizer.lr:g}",
            candidates=[default_min_lr(optimizer.lr)],
        )


def warmup_is_given_once(facts: Facts) -> Iterator[Violation]:
    """lr_warmup_iters or lr_warmup_fraction, not both (megatron/training/arguments.py, validate_args)."""
    optimizer = facts.optimizer
    if optimizer.lr_warmup_iters is not None and optimizer.lr_warmup_fraction is not None:
        yield Violation(
            path="optimizer.lr_warmup_iters",
            reason=f"and lr_warmup_fraction = {optimizer.lr_warmup_fraction:g} both set the warm-up",
            candidates=[None],
        )


def warmup_ends_before_decay(facts: Facts) -> Iterator[Violation]:
    """lr_warmup_iters < lr_decay_iters.

    Source: megatron/core/optimizer_param_scheduler.py, OptimizerParamScheduler.
    """
    warmup, decay = facts.resolved_optimizer.lr_warmup_iters, facts.resolved_optimizer.lr_decay_iters
    assert warmup is not None
    assert decay is not None
    if warmup >= decay:
        meaning = f"(null means {warmup}) " if facts.optimizer.lr_warmup_iters is None else ""
        key = "training.train_iters" if facts.optimizer.lr_decay_iters is None else "optimizer.lr_decay_iters"
        yield Violation(
            path="optimizer.lr_warmup_iters",
            reason=f"{meaning}is not less than {key} = {decay}, where the decay ends",
            candidates=[decay // 10, None],
        )


RULES: tuple[Rule, ...] = (min_lr_is_not_above_lr, warmup_is_given_once, warmup_ends_before_decay)
