"""All mistakes in the section `program.deepspeed`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from hpcgen.config.program import DeepSpeedConfig
from hpcgen.errors import Problem
from hpcgen.planning.deepspeed import batch
from hpcgen.planning.deepspeed.facts import ZERO, Facts
from hpcgen.planning.deepspeed.file import CONFIG, variable_problems
from hpcgen.planning.deepspeed.keys import REMOVED, RENAMED, SECTIONS
from hpcgen.planning.deepspeed.rules import RULES
from hpcgen.planning.deepspeed.types import Key, Section
from hpcgen.text import did_you_mean

AUTO = "Hugging Face's Trainer and Accelerate do not fill in this key, so DeepSpeed uses its default or fails"


def deepspeed_problems(
    section: DeepSpeedConfig, ranks: int, ranks_per_node: int, nvlink_nodes: int = 1
) -> Iterator[Problem]:
    """Yields the mistakes in the section, for a job with `ranks` ranks, on nodes of which NVLink connects some."""
    config, size = section.config, section.model_parallel_size
    yield from variable_problems(config)
    wrong = list(key_problems(config))
    yield from wrong
    if ranks % size:
        reason = f"does not divide the {ranks} ranks of the job"
        yield Problem("program.deepspeed.model_parallel_size", reason, "use a divisor of the number of ranks")
        return
    paths = [problem.path.removeprefix(f"{CONFIG}.") for problem in wrong]
    for path in paths:
        config = _without(config, path)
    unsure = {path.partition(".")[0] for path in paths}
    if unsure <= SECTIONS[""].keys.keys() - set(batch.SIZES):
        yield from batch.problems(config, ranks // size)
    if ZERO not in unsure:  # most rules depend on the stage
        facts = Facts(
            config=config,
            ranks=ranks,
            ranks_per_node=ranks_per_node,
            nvlink_nodes=nvlink_nodes,
            model_parallel_size=size,
        )
        for problem in itertools.chain.from_iterable(rule(facts) for rule in RULES):
            if problem.path.removeprefix(f"{CONFIG}.").split(".")[0] not in unsure:
                yield problem


def _without(values: Any, path: str) -> Any:
    """`values` without the value at a dotted path. Unknown keys can contain dots themselves."""
    if not isinstance(values, Mapping):
        return values
    return {
        name: _without(value, path.removeprefix(f"{name}.")) if path.startswith(f"{name}.") else value
        for name, value in values.items()
        if name != path
    }


def key_problems(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Yields unknown, removed and deprecated keys, and values of the wrong type."""
    yield from _section_problems(SECTIONS[""], config, CONFIG)
    for name in ("optimizer", "scheduler"):
        section = config.get(name)
        if not isinstance(section, Mapping) or not isinstance(section.get("type"), str):
            continue
        kind = section["type"].lower() if name == "optimizer" else section["type"]
        known, values = SECTIONS.get(f"{name}:{kind}"), section.get("params")
        if known is not None and isinstance(values, Mapping):
            yield from _section_problems(known, values, f"{CONFIG}.{name}.params")


def _section_problems(section: Section, values: Any, path: str) -> Iterator[Problem]:
    if not isinstance(values, Mapping):
        if not (values is None and section.nullable):
            yield Problem(path, "must be a mapping of keys to values", f"source: {section.source}")
        return
    for name, value in values.items():
        inner, key = f"{path}.{name}", section.keys.get(name)
        if isinstance(key, Section):
            yield from _section_problems(key, value, inner)
        elif key is not None:
            yield from _value_problems(key, value, inner)
        elif not section.open:
            yield _unknown(section, path, name)


def _value_problems(key: Key, value: Any, path: str) -> Iterator[Problem]:
    if key.deprecated:
        yield Problem(path, "is deprecated", key.deprecated)
    elif (value == "auto" and key.auto) or (value is None and key.nullable):
        return
    elif problem := key.type(path, value):
        yield replace(problem, hint=f"remove it: {AUTO}") if value == "auto" else problem


def _unknown(section: Section, path: str, name: str) -> Problem:
    removed = REMOVED.get(path.removeprefix(CONFIG).removeprefix("."), {})
    if name in removed:
        return Problem(f"{path}.{name}", "was removed from DeepSpeed", removed[name])
    if name in RENAMED:
        return Problem(f"{path}.{name}", "is not a key of DeepSpeed", f"use {RENAMED[name]}")
    if name == "max_grad_norm" and path.endswith("optimizer.params"):
        return Problem(f"{path}.{name}", "is not a parameter of the optimizer", "use gradient_clipping")
    hint = did_you_mean(name, section.keys) or f"known keys are {', '.join(sorted(section.keys))}"
    return Problem(f"{path}.{name}", "is not a key of DeepSpeed", hint)
