"""Rules for the stages of the data (data.stages): they follow each other, and mix pairs that the run names."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from trainer.contract.problem import Problem
from trainer.contract.rules.facts import Facts, Rule
from trainer.contract.spelling import did_you_mean


def stages_have_pairs(facts: Facts) -> Iterator[Problem]:
    """stages mix the pairs of datasets or train (hpcgen's rule: other sources have no pairs)."""
    data = facts.data
    if data.stages and not (data.datasets or data.train):
        yield Problem(
            path="data.stages",
            reason="has no pairs to mix, since neither data.datasets nor data.train names any",
            hint="name the pairs of all stages in data.train, or in data.datasets with data.split",
            about=("data.datasets", "data.train"),
        )


def stages_follow_each_other(facts: Facts) -> Iterator[Problem]:
    """Every stage but the last has an until_iter, above that of the stage before (hpcgen's rule)."""
    stages = facts.data.stages
    for number, stage in enumerate(stages[:-1]):
        if stage.until_iter is None:
            yield Problem(
                path=f"data.stages[{number}].until_iter",
                reason="is missing, but another stage follows",
                hint="set the last iteration of the stage",
            )
    if stages and stages[-1].until_iter is not None:
        yield Problem(
            path=f"data.stages[{len(stages) - 1}].until_iter",
            reason="ends the last stage, after which nothing would be read",
            hint="remove it: the last stage lasts until training.train_iters",
        )
    for number, (before, after) in enumerate(itertools.pairwise(stages), 1):
        if before.until_iter and after.until_iter and after.until_iter <= before.until_iter:
            yield Problem(
                path=f"data.stages[{number}].until_iter",
                reason=f"is not above {before.until_iter:,}, the end of the stage before",
                hint="list the stages in their order",
            )


def stages_have_names(facts: Facts) -> Iterator[Problem]:
    """Names of stages are distinct and not empty (hpcgen's rule: metrics and reports show only names)."""
    names = [stage.name for stage in facts.data.stages]
    for number, name in enumerate(names):
        path = f"data.stages[{number}].name"
        if not name.strip() or not name.isprintable():
            yield Problem(path, "is not a name", hint="use a word, such as decay")
        elif name in names[:number]:
            yield Problem(path, "is also the name of another stage", hint="give each stage a name of its own")


def stages_mix_listed_pairs(facts: Facts) -> Iterator[Problem]:
    """Each pair of a stage is listed in datasets or train, and once in the stage (hpcgen's rule)."""
    data = facts.data
    key = "datasets" if data.datasets else "train"
    listed = [dataset.prefix for dataset in getattr(data, key)]
    if not data.stages or not listed:
        return
    for number, stage in enumerate(data.stages):
        path = f"data.stages[{number}].train"
        if not stage.train:
            yield Problem(path, "has no pairs", hint=f"list some of the pairs of data.{key}")
        seen: set[str] = set()
        for index, dataset in enumerate(stage.train):
            if dataset.prefix not in listed:
                known = did_you_mean(dataset.prefix, listed, most=1)
                yield Problem(
                    path=f"{path}[{index}].prefix",
                    reason=f"is not a pair of data.{key}, which names the pairs of all stages",
                    hint=known or f"add it to data.{key}",
                    about=(f"data.{key}",),
                )
            elif dataset.prefix in seen:
                yield Problem(
                    f"{path}[{index}].prefix", "is already in this stage", hint="remove one of the two"
                )
            seen.add(dataset.prefix)
        missing = [index for index, dataset in enumerate(stage.train) if dataset.weight is None]
        if missing and len(missing) < len(stage.train):
            yield Problem(
                path=f"{path}[{missing[0]}].weight",
                reason="is missing, but other pairs of the stage have a weight",
                hint="give all pairs a weight, or none to weight them by tokens",
            )
    used = {dataset.prefix for stage in data.stages for dataset in stage.train}
    for index, prefix in enumerate(listed):
        if prefix in listed[:index]:
            yield Problem(
                path=f"data.{key}[{index}].prefix",
                reason="is listed twice, so that the pairs of data.stages are not clear",
                hint="remove one of the two",
                about=("data.stages",),
            )
        elif key == "train" and prefix not in used:  # a pair of datasets is also read for validation
            yield Problem(
                path=f"data.train[{index}].prefix",
                reason="is in no stage, so that training would never read it",
                hint="add it to the pairs of a stage in data.stages, or remove it",
                about=("data.stages",),
            )


def weights_are_those_of_stages(facts: Facts) -> Iterator[Problem]:
    """With stages, the pairs of train have no weights of their own (hpcgen's rule: nothing would read them).

    The weights of data.datasets also apply to validation and test.
    """
    for index, dataset in enumerate(facts.data.train if facts.data.stages else ()):
        if dataset.weight is not None:
            yield Problem(
                path=f"data.train[{index}].weight",
                reason="has no effect with data.stages, whose pairs have weights of their own",
                hint="remove it",
                about=("data.stages",),
            )


def stages_are_reached(facts: Facts) -> Iterator[Problem]:
    """Every stage begins before train_iters (a warning, since a test may be shorter than the run)."""
    stages, last = facts.data.stages, facts.training.train_iters
    for number, stage in enumerate(stages[:-1]):
        if stage.until_iter is not None and stage.until_iter >= last:
            yield Problem(
                path=f"data.stages[{number}].until_iter",
                reason=f"is not below training.train_iters = {last}, so stage {stages[number + 1].name} is not reached",
                hint="set a larger training.train_iters or a smaller until_iter",
                about=("training.train_iters",),
            )
            return


RULES: tuple[Rule, ...] = (
    stages_have_pairs,
    stages_follow_each_other,
    stages_have_names,
    stages_mix_listed_pairs,
    weights_are_those_of_stages,
)

WARNINGS: tuple[Rule, ...] = (stages_are_reached,)

OF_MODEL: tuple[Rule, ...] = ()
