"""Storage of a planned training run in its summary: JSON data for scripts, and lines of text for people."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from hpcgen.errors import Problem
from hpcgen.planning import checkpointing, storage
from hpcgen.planning.storage import SaveCosts
from hpcgen.run_plan.plan import Plan, located_in
from hpcgen.text import counted, duration, scaled, size_text
from trainer.contract.config import TrainerConfig
from trainer.contract.model.batch_size import total_samples

COLUMNS = {
    **{"": "<20", "TiB": ">5", "holds": ">7", "GB/s": ">6", "to write": ">12", "warning": ">12"},
    **{"save every": ">12", "lost": ">5"},
}
"""Title -> format of the columns of the table."""
OF_FAILURES = ("save every", "lost")
"""Columns only for runs on GPUs."""
SHORTEST_INTERVAL_S = 60
"""The shortest interval between checkpoints that is advised."""
MUCH_LOST = 0.01
"""Part of the time that an interval between checkpoints may lose in addition to the best one, without a warning."""


def in_json(plan: Plan, step_s: float | None) -> tuple[dict[str, Any], list[str]]:
    """The key of the summary about storage, and warnings. Names of keys include the units.

    If the time of a step is not predicted, it is assumed to be half of that of a slow step.
    """
    trainer = plan.trainer
    assert trainer is not None
    step_s = step_s or checkpointing.slow_step_s(trainer) / 2
    found = _storage(plan, trainer, step_s)
    warnings = _warnings(found["saving"], trainer, step_s)
    return {"storage": found}, [str(located_in(plan.run, problem)) for problem in warnings]


def _storage(plan: Plan, trainer: TrainerConfig, step_s: float) -> dict[str, Any]:
    """The storage that a training needs, with steps of `step_s` seconds."""
    checkpoint, num_steps = trainer.checkpoint, trainer.training.train_iters
    saves = checkpointing.num_saves(checkpoint, num_steps, step_s)
    kept = storage.kept_checkpoints(checkpoint, num_steps, saves)
    size = checkpointing.checkpoint_bytes(trainer)
    tokens = total_samples(trainer.training) * trainer.model.seq_length
    assert trainer.model.vocab_size
    return {
        "kept_checkpoints": kept,
        "kept_checkpoint_bytes": kept * size,
        "data_bytes": dataclasses.asdict(storage.data_size(tokens, trainer.model.vocab_size)),
        "saving": _saving(plan, trainer, step_s),
        "file_systems": list(_file_systems(plan, trainer, kept * size, size)),
    }


def _saving(plan: Plan, trainer: TrainerConfig, step_s: float) -> dict[str, Any] | None:
    """Cost of the interval between checkpoints, and the best interval; None on CPUs, whose failures are not known."""
    if trainer.device != "cuda":
        return None
    assert plan.training is not None
    costs = _costs(plan, trainer, plan.run.cluster.storage_write_gb_s)
    best_s = _best_interval_s(costs)
    interval_s = storage.save_interval_s(trainer.checkpoint, step_s, plan.training.allocation.time_s)
    return {
        "gpu_hours_between_failures": plan.run.cluster.gpu_hours_between_failures,
        "hours_between_failures": costs.between_failures_s / 3600,
        "stall_s": costs.stall_s,
        "interval_s": interval_s,
        "lost": costs.lost(interval_s),
        "best_interval_s": best_s,
        "least_lost": costs.lost(best_s),
    }


def _best_interval_s(costs: SaveCosts) -> float:
    """The interval to advise. Shorter ones save too little time for the load that they put on storage."""
    return max(costs.best_interval_s, SHORTEST_INTERVAL_S)


def _costs(plan: Plan, trainer: TrainerConfig, write_gb_s: float | None) -> SaveCosts:
    cluster = plan.run.cluster
    save_s = checkpointing.save_time_s(trainer, write_gb_s)
    return storage.save_costs(trainer, save_s, cluster.startup_time_s, cluster.gpu_hours_between_failures)


def _file_systems(plan: Plan, trainer: TrainerConfig, needed: int, one: int) -> Iterator[dict[str, Any]]:
    """Yields the cluster's storage and those of Azure. Each tier of Lustre has two sizes: the smallest one with room
    for `needed` bytes, and the largest one. A checkpoint takes `one` bytes.
    """
    write_gb_s = plan.run.cluster.storage_write_gb_s
    yield _file_system(plan, trainer, "this cluster", None, write_gb_s or checkpointing.ASSUMED_WRITE_GB_S)
    for tier in storage.LUSTRE_TIERS:
        for tib in dict.fromkeys((tier.fitting_tib(needed), tier.largest_tib)):
            row = _file_system(plan, trainer, tier.name, tib, tier.gb_s(tib))
            yield {**row, "holds_checkpoints": int(tib * storage.TIB / one)}
    for name, gb_s in storage.BLOB_GB_S.items():
        yield _file_system(plan, trainer, name, None, gb_s)


def _file_system(
    plan: Plan, trainer: TrainerConfig, name: str, tib: int | None, gb_s: float
) -> dict[str, Any]:
    costs = _costs(plan, trainer, gb_s)
    best_s = _best_interval_s(costs)
    save_s, step_s = checkpointing.save_time_s(trainer, gb_s), checkpointing.slow_step_s(trainer)
    evaluation_s = checkpointing.evaluation_s(trainer, step_s)
    return {
        "name": name,
        "size_tib": tib,
        "holds_checkpoints": None,
        "write_gb_s": gb_s,
        "ranks_gb_s": checkpointing.save_gb_s(trainer, gb_s),
        "save_time_s": save_s,
        "signal_lead_s": checkpointing.signal_lead_s(step_s, save_s, evaluation_s),
        "best_interval_s": best_s,
        "least_lost": costs.lost(best_s),
    }


def _warnings(saving: dict[str, Any] | None, trainer: TrainerConfig, step_s: float) -> Iterator[Problem]:
    """Yields a warning if the interval between checkpoints loses much more time than the best one."""
    if saving is None or saving["lost"] - saving["least_lost"] < MUCH_LOST:
        return
    checkpoint, best_s = trainer.checkpoint, saving["best_interval_s"]
    if storage.saves_by_steps(checkpoint, step_s):
        key, better = "save_interval", f"{max(1, round(best_s / step_s))} (steps)"
    else:
        key, better = "save_interval_minutes", f"{best_s / 60:.2g} (minutes)"
    reason = (
        f"results in a save every {_rounded(saving['interval_s'])}. Saves, and steps that are repeated after failures, "
        f"take about {saving['lost']:.1%} of the time. The least is {saving['least_lost']:.1%}, since a save stops "
        f"training for {duration(saving['stall_s'])}, and a failure is expected in "
        f"{duration(3600 * saving['hours_between_failures'])}"
    )
    yield Problem(f"checkpoint.{key}", reason, f"use about {better}")


def for_people(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """The storage in a summary as headings and text."""
    found = summary["storage"]
    lines = [("disk", _disk(found))]
    if found["saving"] is not None:
        lines.append(("failures", _failures(found["saving"])))
    return lines


def _disk(found: dict[str, Any]) -> str:
    checkpoints = counted(found["kept_checkpoints"], "checkpoint")
    data = found["data_bytes"]
    return (
        f"{size_text(found['kept_checkpoint_bytes'])} for up to {checkpoints}; "
        f"{size_text(data['bin'] + data['idx'])} for all tokens if none is read twice"
    )


def _failures(saving: dict[str, Any]) -> str:
    rate = "" if saving["gpu_hours_between_failures"] else " at the rate of Llama 3's training"
    return (
        f"one expected in {duration(3600 * saving['hours_between_failures'])}{rate}; failures and saves lose about "
        f"{saving['lost']:.1%} of the time, at least {saving['least_lost']:.1%} with a save every "
        f"{_rounded(saving['best_interval_s'])}"
    )


def _rounded(interval_s: float) -> str:
    """An interval in full minutes, or if it is short in seconds."""
    return duration(60 * round(interval_s / 60) if interval_s >= 600 else math.ceil(interval_s))


def table_for_people(summary: dict[str, Any]) -> Iterator[str]:
    """Yields the lines of a table of file systems, and the sizes of the data."""
    found = summary["storage"]
    yield f"A checkpoint of {size_text(summary['checkpoint_bytes'])} on"
    titles = [title for title in COLUMNS if found["saving"] is not None or title not in OF_FAILURES]
    for cells in ({title: title for title in titles}, *map(_cells, found["file_systems"])):
        yield "  ".join(f"{cells[title]:{COLUMNS[title]}}" for title in titles).rstrip()
    if any(row["ranks_gb_s"] < row["write_gb_s"] for row in found["file_systems"]):
        yield f"* The ranks write less: {checkpointing.ASSUMED_RANK_WRITE_GB_S:g} GB/s each is assumed."
    compressed, jsonl, ids, index = map(size_text, found["data_bytes"].values())
    yield (
        f"All tokens of the run, if none is read twice: {compressed} as compressed JSON Lines, {jsonl} as JSON Lines, "
        f"{ids} as .bin and {index} as .idx"
    )


def _cells(row: dict[str, Any]) -> dict[str, str]:
    """The cells of a row by their titles."""
    tib, holds = row["size_tib"], row["holds_checkpoints"]
    return {
        "": row["name"],
        "TiB": "" if tib is None else str(tib),
        "holds": "" if holds is None else scaled(holds),
        "GB/s": f"{row['write_gb_s']:.4g}{'*' if row['ranks_gb_s'] < row['write_gb_s'] else ' '}",
        "to write": duration(math.ceil(row["save_time_s"])),
        "warning": duration(row["signal_lead_s"]),
        "save every": _rounded(row["best_interval_s"]),
        "lost": f"{row['least_lost']:.1%}",
    }
