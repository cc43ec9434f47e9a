"""Rules for checkpoints: which ones are kept, and which hyperparameters may change on resume."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.contract.problem import Problem
from trainer.contract.rules.facts import Facts, Rule, multiples, unread


def kept_checkpoints_are_written(facts: Facts) -> Iterator[Problem]:
    """keep_every % save_interval == 0 (megatron/training/arguments.py, validate_args, for save_retain_interval)."""
    keep, interval = facts.checkpoint.keep_every, facts.checkpoint.save_interval
    if keep is None:
        return
    if interval is None:
        yield Problem(
            path="checkpoint.keep_every",
            reason="keeps only multiples of this step, but without checkpoint.save_interval any step may be saved",
            candidates=[None],
            hint="set checkpoint.save_interval to a divisor of it",
            about=("checkpoint.save_interval",),
        )
    elif keep % interval:
        yield Problem(
            path="checkpoint.keep_every",
            reason=f"is not a multiple of checkpoint.save_interval = {interval} ({keep} / {interval})",
            candidates=multiples(interval, near=keep),
            offers=2,
            about=("checkpoint.save_interval",),
        )


def finetuning_needs_weights(facts: Facts) -> Iterator[Problem]:
    """finetune needs load (hpcgen's rule: the run would silently start from random weights)."""
    if facts.checkpoint.load is None:
        reason = "loads weights from checkpoint.load, which is null"
        advice = "set checkpoint.load to a directory of checkpoints"
        yield from unread(facts, ["checkpoint.finetune"], reason, advice, about=("checkpoint.load",))


def changed_names_hyperparameters(facts: Facts) -> Iterator[Problem]:
    """changed lists hyperparameters by name (trainer/contract/resuming/hyperparameters.py)."""
    if not facts.checkpoint.changed:
        return
    from trainer.contract.resuming.hyperparameters import name_problems

    yield from name_problems(facts.checkpoint.changed)


RULES: tuple[Rule, ...] = (
    kept_checkpoints_are_written,
    finetuning_needs_weights,
    changed_names_hyperparameters,
)
