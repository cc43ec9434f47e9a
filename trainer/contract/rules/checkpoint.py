"""Rules for checkpoints: which ones are kept, and which hyperparameters may change on resume."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.contract.config import EarlyStopping
from trainer.contract.problem import Problem, Setting
from trainer.contract.rules.data import split_weights
from trainer.contract.rules.facts import Facts, Rule, multiples, unread
from trainer.contract.wording import one_of


def kept_checkpoints_are_written(facts: Facts) -> Iterator[Problem]:
    """keep_every % save_interval == 0 (megatron/training/arguments.py, validate_args, for save_retain_interval)."""
    if facts.checkpoint.keep_every is not None:
        yield from multiples_are_saved(
            facts, "checkpoint.keep_every", facts.checkpoint.keep_every, "keeps only"
        )


def multiples_are_saved(facts: Facts, path: str, every: int, verb: str) -> Iterator[Problem]:
    """Yields the problem of a key at `path` that selects checkpoints, if no step that `every` divides must be saved."""
    interval = facts.checkpoint.save_interval
    if interval is None:
        yield Problem(
            path=path,
            reason=f"{verb} multiples of this step, but without checkpoint.save_interval any step may be saved",
            candidates=[None],
            hint="set checkpoint.save_interval to a divisor of it",
            about=("checkpoint.save_interval",),
        )
    elif every % interval:
        yield Problem(
            path=path,
            reason=f"is not a multiple of checkpoint.save_interval = {interval} ({every} / {interval})",
            candidates=multiples(interval, near=every),
            offers=2,
            about=("checkpoint.save_interval",),
        )


def finetuning_needs_weights(facts: Facts) -> Iterator[Problem]:
    """finetune needs load (hpcgen's rule: the run would silently start from random weights)."""
    if facts.checkpoint.load is None:
        reason = "loads weights from checkpoint.load, which is null"
        advice = "set checkpoint.load to a directory of checkpoints"
        yield from unread(facts, ["checkpoint.finetune"], reason, advice, about=("checkpoint.load",))


def new_tokens_need_weights(facts: Facts) -> Iterator[Problem]:
    """resize_vocabulary needs finetune (hpcgen's rule: the optimizer has no state for new rows), and no adapters, whose
    checkpoints do not have the new rows."""
    if facts.checkpoint.resize_vocabulary and facts.lora.rank is not None:
        yield Problem(
            "checkpoint.resize_vocabulary",
            "is not supported with lora.rank, which keeps the embedding of the base model",
            candidates=[False],
            about=("lora.rank",),
        )
    elif not facts.checkpoint.finetune:
        reason = "adds rows to the weights of checkpoint.load, but checkpoint.finetune = false also loads the optimizer"
        yield from unread(
            facts,
            ["checkpoint.resize_vocabulary"],
            reason,
            settings=(Setting("checkpoint.finetune", True),),
            about=("checkpoint.finetune", "checkpoint.load"),
        )


def changed_names_hyperparameters(facts: Facts) -> Iterator[Problem]:
    """changed lists hyperparameters by name (trainer/contract/resuming/hyperparameters.py)."""
    if not facts.checkpoint.changed:
        return
    from trainer.contract.resuming.hyperparameters import name_problems  # few runs name changes

    yield from name_problems(facts.checkpoint.changed)


def evaluations_can_end_the_run(facts: Facts) -> Iterator[Problem]:
    """early_stopping and keep_best need evaluations of what they watch (hpcgen's rule: they would have no effect)."""
    training, data = facts.training, facts.data
    watch = training.early_stopping
    if watch is None and not facts.checkpoint.keep_best:
        return
    path = "checkpoint.keep_best" if watch is None else "training.early_stopping"
    if training.eval_interval is None or not training.eval_iters:
        yield Problem(
            path=path,
            reason="needs evaluations while the run trains",
            hint="set training.eval_interval, and training.eval_iters above 0",
            about=("training.eval_interval", "training.eval_iters"),
        )
        return
    weights = split_weights(data.split)
    # Whether a function of the user has validation samples is only known when it is called.
    has_valid = bool(data.mock or data.dataset or data.valid or (data.datasets and weights and weights[1]))
    splits = [*(["valid"] if has_valid else []), *(each.split for each in data.validation)]
    monitor = (watch or EarlyStopping()).monitor
    split, _, column = monitor.rpartition("/")
    if split not in splits or not column:
        known = [f"{split}/loss" for split in splits]
        yield Problem(
            path=path,
            reason=f"watches {monitor}, which no evaluation has",
            hint=f"use {one_of(known)}" if known else "name pairs in data.valid or data.validation",
            about=("data.valid", "data.validation"),
        )


RULES: tuple[Rule, ...] = (
    kept_checkpoints_are_written,
    finetuning_needs_weights,
    new_tokens_need_weights,
    changed_names_hyperparameters,
    evaluations_can_end_the_run,
)

WARNINGS: tuple[Rule, ...] = ()

OF_MODEL: tuple[Rule, ...] = ()
