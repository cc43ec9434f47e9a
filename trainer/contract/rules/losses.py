"""Rules for the user's own loss and metrics."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.contract.code.imports import IMPORT_PATH
from trainer.contract.files.metrics_columns import own_name_problem
from trainer.contract.problem import Problem
from trainer.contract.rules.facts import Facts, Rule
from trainer.contract.rules.model import import_path


def losses_are_import_paths(facts: Facts) -> Iterator[Problem]:
    """training.loss and training.metrics are import paths (trainer/contract/code/imports.py)."""
    yield from import_path("training.loss", facts.training.loss)
    for index, path in enumerate(facts.training.metrics):
        yield from import_path(f"training.metrics[{index}]", path)


def metrics_have_columns_of_their_own(facts: Facts) -> Iterator[Problem]:
    """The name of a metric's function is a column of metrics.jsonl (trainer/model/head.py)."""
    seen: dict[str, str] = {}
    for index, path in enumerate(facts.training.metrics):
        match = IMPORT_PATH.fullmatch(path)
        if match is None:
            continue
        key, name = f"training.metrics[{index}]", match["name"]
        if problem := own_name_problem(name):
            yield Problem(key, f"names the function {name}, which {problem}", "rename the function")
        elif name in seen:
            reason = f"names a function {name}, as {seen[name]} does, but each is a column of metrics.jsonl"
            yield Problem(key, reason, "rename one of them", about=(seen[name],))
        seen.setdefault(name, key)


OF_MODEL: tuple[Rule, ...] = ()

RULES: tuple[Rule, ...] = (losses_are_import_paths, metrics_have_columns_of_their_own)

WARNINGS: tuple[Rule, ...] = ()
