"""Runs the rules and turns violations into one problem per mistake, with values that work."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from hpcgen.errors import Problem
from hpcgen.planning import resources
from trainer.contract.problem import in_yaml
from trainer.contract.rules import engine
from trainer.contract.rules.engine import ERRORS
from trainer.contract.rules.facts import Facts, Rule
from trainer.contract.wording import one_of

WARNINGS: tuple[Rule, ...] = (*resources.RULES, *engine.WARNINGS)

Key = tuple[str, str]
"""Identity of a violation: the rule's name and the path."""


MEMORY_SECTIONS = ("model", "parallelism", "training", "optimizer", "data")
"""Sections that the memory estimate reads, in addition to the number of nodes."""


def check(facts: Facts, *, must_fit: bool = True) -> tuple[list[Problem], list[Problem]]:
    """The errors and warnings of a run. There are warnings only if there are no errors. With `must_fit`, a model that
    does not fit the devices is an error.
    """
    errors = _problems(facts, ERRORS, may_break_rules=True)
    if must_fit and not any(_affects_memory(facts, problem) for problem in errors):
        errors += _misfits(facts)
    return errors, [] if errors else _problems(facts, ERRORS + WARNINGS, may_break_rules=False)


def _affects_memory(facts: Facts, problem: Problem) -> bool:
    """True if the estimate would be that of a mistake."""
    return problem.path == facts.world.path or problem.path.partition(".")[0] in MEMORY_SECTIONS


def _misfits(facts: Facts) -> list[Problem]:
    """The problem of a model that does not fit, with values that break no rule."""
    rule, problems = resources.model_fits_device, []
    for violation in rule(facts):
        problem = _repaired(violation, _ways_to_fit(facts, violation))
        hint = f"{problem.hint}. If memory-test shows that it fits, use --set memory_check=warning"
        problems.append(dataclasses.replace(problem, hint=hint))
    return problems


def _ways_to_fit(facts: Facts, violation: Problem) -> str:
    """The changes of one key with which the model fits and that break no rule, those of the violation's key first."""
    rules = ERRORS + WARNINGS
    before, key = _violations(facts, rules).keys(), _key(resources.model_fits_device, violation)

    def works(change: Mapping[str, object]) -> bool:
        changed = functools.reduce(lambda made, path: made.with_value(path, change[path]), change, facts)
        left = _violations(changed, rules).keys()
        return key not in left and left <= before

    ways = {
        path: [change[path] for change in changes if works(change)]
        for path, changes in resources.changes_of_memory(facts).items()
    }
    own = _hint(ways.pop(violation.path)[:3], violation)
    others = [
        f"{path if path == facts.world.path else path.rpartition('.')[2]}: {in_yaml(values[0])}"
        for path, values in ways.items()
        if values
    ]
    found = [own] if own else []
    found += [f"use {one_of(others)}"] if others else []
    if found:
        return ", or ".join(found)
    return "no change of one key is enough: use a smaller model, or more nodes with more model parallelism"


def _problems(facts: Facts, rules: Sequence[Rule], *, may_break_rules: bool) -> list[Problem]:
    """One problem per invalid value.

    Each invalid value is replaced by the best candidate before the next violation is considered. Violations that the
    replacement removes were consequences and are not reported.
    """
    problems: dict[str, Problem] = {}
    for key, violation in _violations(facts, rules).items():
        remaining = _violations(facts, rules).get(key)
        if remaining is None or violation.path in problems:
            continue
        values = _offers(facts, rules, key, remaining, may_break_rules=may_break_rules)
        advice = _ways_to_fit(facts, violation) if _is_misfit(key) else _hint(values, violation)
        problems[violation.path] = _repaired(violation, advice)
        if values:
            facts = facts.with_value(violation.path, values[0])
    return list(problems.values())


def _repaired(violation: Problem, advice: str) -> Problem:
    """The violation with all its advice as the hint."""
    return dataclasses.replace(violation, hint=advice, candidates=(), settings=())


def _is_misfit(key: Key) -> bool:
    return key[0] == resources.model_fits_device.__name__


def _violations(facts: Facts, rules: Sequence[Rule]) -> dict[Key, Problem]:
    return {_key(rule, violation): violation for rule in rules for violation in rule(facts)}


def _key(rule: Rule, violation: Problem) -> Key:
    return rule.__name__, violation.path


def _offers(
    facts: Facts, rules: Sequence[Rule], key: Key, violation: Problem, *, may_break_rules: bool
) -> list[object]:
    """The candidates that remove the violation and leave the fewest others, best first. Of these, those with which the
    model fits the devices.

    A candidate that breaks another rule is offered only with `may_break_rules` and if there is no better one. The user
    must then change two values.
    """
    before = _violations(facts, rules).keys()
    ranked = []
    for value in violation.candidates:
        changed = facts.with_value(violation.path, value)
        left = _violations(changed, rules).keys()
        broken = len(left - before)
        if key not in left and (may_break_rules or not broken):
            misfits = len([*resources.model_fits_device(changed)])
            ranked.append(((broken, len(left), misfits), value))
    best = min((rank for rank, _ in ranked), default=None)
    return [value for rank, value in ranked if rank == best][: violation.offers]


def _hint(values: Sequence[object], violation: Problem) -> str:
    """The hint: "use 1, 2 or 4, or <advice>", with numbers in ascending order."""
    advice = violation.advice
    if not values:
        return advice
    numbers = [value for value in values if isinstance(value, int)]
    *others, last = map(in_yaml, sorted(numbers) if len(numbers) == len(values) else values)
    use = f"use {', '.join(others)} or {last}" if others else f"use {last}"
    return f"{use}, or {advice}" if advice else use
