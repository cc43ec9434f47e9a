"""Rules about checkpoints: which are kept, and what may differ when a run goes on from one."""

from __future__ import annotations

from collections.abc import Iterator

from hpcgen.planning.rules.facts import Facts, Rule, Violation, multiples, unread
from trainer.contract.hyperparameters import name_problem


def kept_checkpoints_are_written(facts: Facts) -> Iterator[Violation]:
    """keep_every % save_interval == 0 (megatron/training/arguments.py, validate_args, on its retain interval)."""
    keep, interval = facts.checkpoint.keep_every, facts.checkpoint.save_interval
    if keep is None:
        return
    if interval is None:
        yield Violation(
            path="checkpoint.keep_every",
            reason="keeps multiples of so many steps, and saves by the clock come at any step",
            candidates=[None],
            advice="a checkpoint.save_interval that divides it",
        )
    elif keep % interval:
        yield Violation(
            path="checkpoint.keep_every",
            reason=f"is not a multiple of checkpoint.save_interval = {interval} ({keep} / {interval})",
            candidates=multiples(interval, near=keep),
            offers=2,
        )


def finetuning_needs_weights(facts: Facts) -> Iterator[Violation]:
    """finetune needs load (ours: it would start from random weights, unnoticed)."""
    if facts.checkpoint.load is None:
        reason = "takes the weights of checkpoint.load, which is null"
        advice = "name a directory of checkpoints as checkpoint.load"
        yield from unread(facts, ["checkpoint.finetune"], reason, advice)


def changed_names_hyperparameters(facts: Facts) -> Iterator[Violation]:
    """changed lists hyperparameters by name (trainer/contract/hyperparameters.py)."""
    for index, name in enumerate(facts.checkpoint.changed):
        if problem := name_problem(name):
            reason, hint = problem
            yield Violation(path=f"checkpoint.changed[{index}]", reason=reason, advice=hint)


RULES: tuple[Rule, ...] = (
    kept_checkpoints_are_written,
    finetuning_needs_weights,
    changed_names_hyperparameters,
)
