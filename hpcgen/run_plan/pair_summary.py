"""Pairs of a planned training in its summary: samples, tokens and epochs of each, and what is doubted."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from hpcgen.errors import Problem
from hpcgen.planning.mixture import Reading, pair_readings
from hpcgen.run_plan.plan import Plan, located_in
from hpcgen.text import counted
from trainer.contract.config import TrainerConfig
from trainer.packing.counts import Counts

MAX_PAIRS = 20
"""Maximum number of pairs in the lines for people."""

MAX_EPOCHS = 4.0
"""Epochs up to which a repeated text is worth about as much as a new one.

Source: Muennighoff et al., "Scaling data-constrained language models", arXiv 2305.16264.
"""


def in_json(plan: Plan, trainer: TrainerConfig) -> tuple[list[dict[str, Any]], list[str]]:
    """Samples that the training reads of each pair, by stage of its data, and warnings."""
    found = pair_readings(trainer)
    warnings = [str(located_in(plan.run, problem)) for problem in doubts(trainer, found)]
    return [dataclasses.asdict(reading) for reading in found], warnings


def doubts(trainer: TrainerConfig, found: Sequence[Reading]) -> Iterator[Problem]:
    """Yields warnings about texts that are read too often, and about pairs that are hardly read."""
    key = "data.datasets" if trainer.data.datasets else "data.train"
    repeated = (
        {} if trainer.data.sft else {prefix: n for prefix, n in _epochs(found).items() if n > MAX_EPOCHS}
    )
    if repeated:
        prefix, epochs = max(repeated.items(), key=lambda each: each[1])
        others = counted(len(repeated) - 1, "other pair")
        more = f", and {others} more than {MAX_EPOCHS:g}" if len(repeated) > 1 else ""
        yield Problem(
            key,
            f"is read too often: the run reads {prefix} for {epochs:.1f} epochs{more}. Beyond about {MAX_EPOCHS:g} "
            "epochs, a repeated text teaches less and less (arXiv 2305.16264)",
            "add documents, lower the weight of the pair, or lower training.train_iters",
        )
    yield from refused_chats(trainer, found)
    for prefix in _hardly_read(found):
        yield Problem(
            key,
            f"has a pair that the run hardly reads: {prefix} gives at most one sample",
            "raise its weight, or remove it",
        )


def refused_chats(trainer: TrainerConfig, found: Sequence[Reading]) -> Iterator[Problem]:
    """Yields a problem for each pair of which the training refuses to read so few chats."""
    for prefix, chats in {each.prefix: each.chats for each in found}.items():
        if chats and (reason := chats.problem("train", trainer.model.seq_length)):
            yield Problem(
                "model.seq_length",
                f"leaves too little of {prefix}: {reason}",
                "use a longer model.seq_length, or other chats",
            )


def _epochs(found: Sequence[Reading]) -> dict[str, float]:
    """Epochs of each pair in the complete run, as far as they are known."""
    total: dict[str, float] = {}
    for reading in found:
        before = 0.0
        if reading.prefix not in total and reading.read and reading.remaining:
            before = reading.read * reading.epochs / reading.remaining
        total[reading.prefix] = total.get(reading.prefix, 0.0) + before + reading.epochs
    return total


def _hardly_read(found: Sequence[Reading]) -> list[str]:
    """Prefixes of pairs of which no stage needs more than the one sample that planning rounds up to."""
    read = {reading.prefix for reading in found if reading.remaining > 1 or reading.read != 0}
    return [prefix for prefix in dict.fromkeys(each.prefix for each in found) if prefix not in read]


def for_people(pairs: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """A line for each pair of a stage."""
    shown = [
        ("pair", _pair(pair, has_begun=pair["stage"] == pairs[0]["stage"])) for pair in pairs[:MAX_PAIRS]
    ]
    more = len(pairs) - MAX_PAIRS
    return [*shown, ("pair", f"and {counted(more, 'more pair')}")] if more > 0 else shown


def _pair(pair: dict[str, Any], *, has_begun: bool) -> str:
    """`has_begun` is false for a stage that follows the current one."""
    read = "?" if pair["read"] is None else f"{pair['read']:,}"
    stage = f"stage {pair['stage']}, " if pair["stage"] else ""
    before, after = (f"{read} samples read, ", "") if has_begun else ("", f" after {read} samples")
    parts = [
        f"{stage}{pair['prefix']}: {before}{pair['remaining']:,} to read{after} ({_epochs_text(pair)}, "
        f"{pair['tokens']:,} tokens)"
    ]
    if pair["iterations_per_epoch"] is not None:
        parts.append(f"one epoch is {pair['iterations_per_epoch']:,.1f} iterations")
    if pair["chats"] is not None:
        counts = Counts(**pair["chats"])
        parts += [f"{counts.read:,} of {counted(counts.chats, 'chat')} read", *counts.left_out()]
    return "; ".join(parts)


def _epochs_text(pair: dict[str, Any]) -> str:
    if pair["is_estimated"]:
        return f"about {pair['epochs']:.2f} epochs if all chats fit and samples have no padding"
    return f"{'' if pair['chats'] else 'about '}{pair['epochs']:.2f} epochs"
