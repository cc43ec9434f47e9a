"""Rules about where samples come from: exactly one way, and weights that can be read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from hpcgen.planning.rules.facts import Facts, Rule, Violation

SPLIT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*", re.ASCII)


def data_comes_one_way(facts: Facts) -> Iterator[Violation]:
    """datasets, or train (with valid and test), or mock (megatron/training/arguments.py, validate_args)."""
    data = facts.data
    given = [key for key in ("datasets", "train", "mock") if getattr(data, key)]
    if len(given) > 1:
        yield Violation(
            path=f"data.{given[-1]}",
            reason=f"and data.{' and data.'.join(given[:-1])} are both given; samples come from one of them",
            advice=f"keep one of {', '.join(given)}",
        )
    elif not given and not data.valid and not data.test:
        yield Violation(
            path="data",
            reason="names no samples",
            advice="give data.datasets, or data.train (with valid and test), or data.mock: true",
        )


def held_out_blends_need_train(facts: Facts) -> Iterator[Violation]:
    """valid and test need train beside them (megatron/training/arguments.py, validate_args)."""
    data = facts.data
    for key in ("valid", "test"):
        if getattr(data, key) and not data.train:
            yield Violation(
                path=f"data.{key}",
                reason="names a blend for one split, and data.train is empty",
                advice=f"give data.train, or leave data.{key} out and let data.split cut data.datasets",
            )


def weights_are_given_for_all_or_none(facts: Facts) -> Iterator[Violation]:
    """Null in all the datasets of a blend weighs by tokens; beside given weights it has no meaning (ours)."""
    for key in ("datasets", "train", "valid", "test"):
        blend = getattr(facts.data, key)
        missing = [index for index, dataset in enumerate(blend) if dataset.weight is None]
        if missing and len(missing) < len(blend):
            yield Violation(
                path=f"data.{key}[{missing[0]}].weight",
                reason=f"is missing, and other datasets of data.{key} have a weight",
                advice="give every dataset a weight, or none to weigh by tokens",
            )


def split_can_be_read(facts: Facts) -> Iterator[Violation]:
    """Three weights, the first above 0 (ours).

    Core's parse_and_normalize_split (megatron/core/datasets/blended_megatron_dataset_config.py) picks digits
    and dots out of any text: -1 would count as 1.
    """
    if not facts.data.datasets:
        return
    weights = split_weights(facts.data.split)
    if weights is None or weights[0] == 0:
        yield Violation(
            path="data.split",
            reason="is not three weights, for train, valid and test, with train's above 0",
            candidates=["99990,8,2"],
        )


def split_weights(split: str) -> tuple[float, float, float] | None:
    """The weights of train, valid and test; None if `split` is something else."""
    matches = [SPLIT.fullmatch(part) for part in split.split(",")]
    weights = [float(match[1]) for match in matches if match]
    if len(matches) != 3 or len(weights) != 3 or not math.isfinite(sum(weights)):
        return None
    return weights[0], weights[1], weights[2]


def evaluation_has_samples(facts: Facts) -> Iterator[Violation]:
    """With eval_iters > 0 the split leaves documents for validation (ours: Core would count epochs for ever).

    A blend per split may leave valid out; then nothing is evaluated.
    """
    weights = split_weights(facts.data.split)
    if facts.data.datasets and facts.training.eval_iters and weights and weights[0] and not weights[1]:
        yield Violation(
            path="training.eval_iters",
            depends_on=("data",),
            reason=f"has nothing to read: data.split = {facts.data.split} leaves no validation documents",
            candidates=[0],
            advice="a data.split that gives valid a weight, as 99990,8,2",
        )


RULES: tuple[Rule, ...] = (
    data_comes_one_way,
    held_out_blends_need_train,
    weights_are_given_for_all_or_none,
    split_can_be_read,
    evaluation_has_samples,
)
