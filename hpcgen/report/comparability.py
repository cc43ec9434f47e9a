"""Losses and metrics of several runs that have one name but measure different things."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpcgen.report.essentials import text
from hpcgen.report.run import Run

MAX_SHOWN = 3
"""Number of pairs of a blend that a sentence names."""

Facts = dict[str, Any]
"""The settings that a number was measured with, by key."""


def validation_facts(config: Mapping[str, Any]) -> Facts:
    """The facts that a validation loss depends on, by key of the configuration; empty if there is none."""
    data, model = config.get("data"), config.get("model")
    if not isinstance(data, dict) or not isinstance(model, dict):
        return {}
    source = next((key for key in ("valid", "datasets", "mock") if data.get(key)), None)
    if source is None:
        return {}
    facts = {f"data.{source}": _pairs(data[source]), "model.seq_length": model.get("seq_length")}
    if source == "datasets":
        facts["data.split"] = data.get("split")
    for key in ("reset_attention_mask", "eod_mask_loss", "sft"):
        facts[f"data.{key}"] = bool(data.get(key))
    return facts


def differences_of_meaning(names: Sequence[str], runs: Sequence[Run]) -> list[str]:
    """A sentence for each number of the runs that must not be compared, with what differs."""
    return [
        *_sentences("losses", names, [_vocabulary(run.config) for run in runs]),
        *_sentences(
            "validation losses",
            names,
            [validation_facts(run.config) if _is_validated(run) else {} for run in runs],
        ),
        *_of_results(names, runs),
    ]


def _is_validated(run: Run) -> bool:
    return any(event.get("split") == "valid" for event in run.history.evaluations)


def _vocabulary(config: Mapping[str, Any]) -> Facts:
    """The size of the vocabulary. Its padded size depends on the layout."""
    model = config.get("model")
    size = model.get("vocab_size") if isinstance(model, dict) else None
    return {} if size is None else {"model.vocab_size": size}


def _of_results(names: Sequence[str], runs: Sequence[Run]) -> Iterator[str]:
    """Yields sentences about texts and tasks in the newest results."""
    texts: list[dict[str, Facts]] = []
    tasks: list[dict[str, Facts]] = []
    for run in runs:
        newest = run.results[-1] if run.results else None
        limit = {"evaluation.limit": newest.settings.limit} if newest else {}
        texts.append(
            {
                each.name: {
                    "pair": os.path.realpath(each.prefix),
                    "tokens": each.tokens,
                    "window": each.seq_length,
                    "separate documents": each.separate_documents,
                    "answers only": each.answers_only,
                    **limit,
                }
                for each in (newest.data if newest else ())
            }
        )
        tasks.append(
            {
                each.name: {
                    "version": each.version,
                    "examples": each.num_fewshot,
                    "documents": each.documents,
                    **limit,
                }
                for each in (newest.tasks if newest else ())
            }
        )
    for what, found in (("losses on the text", texts), ("metrics of the task", tasks)):
        for name in dict.fromkeys(name for of_run in found for name in of_run):
            yield from _sentences(f"{what} {name}", names, [of_run.get(name, {}) for of_run in found])


def _sentences(what: str, names: Sequence[str], facts: Sequence[Facts]) -> Iterator[str]:
    """Yields a sentence if facts differ. Runs without facts have no such number."""
    known = [(name, of_run) for name, of_run in zip(names, facts, strict=True) if of_run]
    differing = []
    for key in dict.fromkeys(key for _, of_run in known for key in of_run):
        values = [of_run.get(key) for _, of_run in known]
        if any(value != values[0] for value in values):
            shown = zip(_without_common(values), known, strict=True)
            differing.append(
                f"{key} is " + ", ".join(f"{_in_short(value)} in {name}" for value, (name, _) in shown)
            )
    if differing:
        yield f"The {what} cannot be compared: {'; '.join(differing)}"


def _without_common(values: Sequence[Any]) -> list[Any]:
    """The values; of lists, the elements that are not in all of them, if there are any."""
    if not all(isinstance(value, list) for value in values):
        return list(values)
    common = set(values[0]).intersection(*values[1:])
    return [[each for each in value if each not in common] or value for value in values]


def _in_short(value: Any) -> str:
    if isinstance(value, list) and len(value) > MAX_SHOWN:
        return f"{text(value[:MAX_SHOWN])} and {len(value) - MAX_SHOWN} more"
    return text(value)


def _pairs(source: Any) -> Any:
    """The pairs of a blend by their real paths, with weights."""
    if not isinstance(source, list):
        return source
    pairs = [each for each in source if isinstance(each, dict)]
    return [
        os.path.realpath(str(each.get("prefix")))
        + ("" if each.get("weight") is None else f" (weight {each['weight']})")
        for each in pairs
    ]
