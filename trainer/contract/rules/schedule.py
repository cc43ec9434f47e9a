"""Rules for the learning-rate schedule."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.contract.config.resolve import default_min_lr
from trainer.contract.problem import Problem, Setting
from trainer.contract.rules.facts import Facts, Rule, unread
from trainer.contract.rules.model import import_path
from trainer.contract.wording import counted


def min_lr_is_not_above_lr(facts: Facts) -> Iterator[Problem]:
    """min_lr <= lr (megatron/core/optimizer_param_scheduler.py, OptimizerParamScheduler)."""
    optimizer = facts.optimizer
    if optimizer.min_lr is not None and optimizer.min_lr > optimizer.lr:
        yield Problem(
            path="optimizer.min_lr",
            reason=f"is greater than optimizer.lr = {optimizer.lr:g}",
            candidates=[default_min_lr(optimizer.lr)],
            about=("optimizer.lr",),
        )


def constant_rate_has_no_end(facts: Facts) -> Iterator[Problem]:
    """min_lr and lr_decay_iters need a rate that falls (megatron/core/optimizer_param_scheduler.py, get_lr).

    lr_warmup_fraction is a part of lr_decay_iters, and lr_schedule may read both. Those of a preset are no mistake.
    """
    optimizer = facts.optimizer
    if optimizer.lr_decay_style == "constant" and optimizer.lr_schedule is None:
        keys = ["optimizer.min_lr"]
        if optimizer.lr_warmup_fraction is None:
            keys.append("optimizer.lr_decay_iters")
        reason = "has no effect with optimizer.lr_decay_style = constant"
        given = [key for key in keys if key in facts.set_by_user]
        yield from unread(
            facts, given, reason, "use another lr_decay_style", about=("optimizer.lr_decay_style",)
        )


def warmup_is_given_once(facts: Facts) -> Iterator[Problem]:
    """lr_warmup_iters or lr_warmup_fraction, not both (megatron/training/arguments.py, validate_args)."""
    optimizer = facts.optimizer
    if optimizer.lr_warmup_iters is not None and optimizer.lr_warmup_fraction is not None:
        yield Problem(
            path="optimizer.lr_warmup_iters",
            reason=f"conflicts with lr_warmup_fraction = {optimizer.lr_warmup_fraction:g}; both set the warm-up",
            candidates=[None],
            about=("optimizer.lr_warmup_fraction",),
        )


def warmup_ends_before_decay(facts: Facts) -> Iterator[Problem]:
    """lr_warmup_iters < lr_decay_iters.

    Source: megatron/core/optimizer_param_scheduler.py, OptimizerParamScheduler.
    """
    warmup, decay = facts.resolved_optimizer.lr_warmup_iters, facts.resolved_optimizer.lr_decay_iters
    assert warmup is not None
    assert decay is not None
    if warmup >= decay:
        meaning = f"(default: {warmup}) " if facts.optimizer.lr_warmup_iters is None else ""
        key = "training.train_iters" if facts.optimizer.lr_decay_iters is None else "optimizer.lr_decay_iters"
        yield Problem(
            path="optimizer.lr_warmup_iters",
            reason=f"{meaning}must be less than {key} = {decay}, where the decay ends",
            candidates=[decay // 10, None],
            about=("training.train_iters", "optimizer.lr_decay_iters"),
        )


def warmup_starts_below_lr(facts: Facts) -> Iterator[Problem]:
    """lr_warmup_init <= lr (megatron/core/optimizer_param_scheduler.py, OptimizerParamScheduler)."""
    optimizer = facts.optimizer
    if optimizer.lr_warmup_init > optimizer.lr:
        yield Problem(
            path="optimizer.lr_warmup_init",
            reason=f"is greater than optimizer.lr = {optimizer.lr:g}",
            candidates=[0.0],
            about=("optimizer.lr",),
        )


def warmup_has_a_start(facts: Facts) -> Iterator[Problem]:
    """lr_warmup_init needs a warm-up (megatron/core/optimizer_param_scheduler.py, get_lr)."""
    if facts.resolved_optimizer.lr_warmup_iters == 0:
        reason = "has no effect without a warm-up: optimizer.lr_warmup_iters is 0"
        yield from unread(
            facts,
            ["optimizer.lr_warmup_init"],
            reason,
            "set lr_warmup_iters",
            about=("optimizer.lr_warmup_iters",),
        )


def wsd_details_need_wsd(facts: Facts) -> Iterator[Problem]:
    """lr_wsd_decay_iters and lr_wsd_decay_style need WSD (hpcgen's rule: unused keys are errors)."""
    style = facts.optimizer.lr_decay_style
    if style != "WSD":
        keys = ["optimizer.lr_wsd_decay_iters", "optimizer.lr_wsd_decay_style"]
        reason = f"is used only with lr_decay_style = WSD, not {style}"
        yield from unread(
            facts,
            keys,
            reason,
            about=("optimizer.lr_decay_style",),
            settings=(Setting("optimizer.lr_decay_style", "WSD"),),
        )


def wsd_decay_follows_warmup(facts: Facts) -> Iterator[Problem]:
    """lr_wsd_decay_iters <= lr_decay_iters - lr_warmup_iters (hpcgen's rule: the rate would jump after the warm-up)."""
    optimizer = facts.resolved_optimizer
    warmup, end, decay = optimizer.lr_warmup_iters, optimizer.lr_decay_iters, optimizer.lr_wsd_decay_iters
    assert warmup is not None
    assert end is not None
    if optimizer.lr_decay_style == "WSD" and decay is not None and warmup < end < warmup + decay:
        yield Problem(
            path="optimizer.lr_wsd_decay_iters",
            reason=f"is more than the {counted(end - warmup, 'step')} from the end of the warm-up "
            "to the end of the decay",
            candidates=[max(1, (end - warmup) // 10)],
        )


def schedule_is_an_import_path(facts: Facts) -> Iterator[Problem]:
    """lr_schedule is package.module:function or file.py:function (trainer/contract/code/imports.py)."""
    yield from import_path("optimizer.lr_schedule", facts.optimizer.lr_schedule)


RULES: tuple[Rule, ...] = (
    min_lr_is_not_above_lr,
    constant_rate_has_no_end,
    warmup_is_given_once,
    warmup_ends_before_decay,
    warmup_starts_below_lr,
    warmup_has_a_start,
    wsd_details_need_wsd,
    wsd_decay_follows_warmup,
    schedule_is_an_import_path,
)

WARNINGS: tuple[Rule, ...] = ()

OF_MODEL: tuple[Rule, ...] = ()
