"""Averages of a run's weights as a checkpoint with weights only. Holds one part of a tensor of each at a time.

The mean of the last checkpoints is often better than each of them (Izmailov et al., arXiv 1803.05407; for language
models, Sanyal et al., arXiv 2306.03241).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer.contract.errors import TrainerError
from trainer.contract.files import checkpoint_files
from trainer.contract.files.checkpoint_files import COMPLETE, Checkpoint
from trainer.contract.files.hashing import file_sha256
from trainer.contract.files.tensor_names import AVERAGE, OPTIMIZER_STATE, has_all_layers, name_in_layer
from trainer.contract.resuming import base_model
from trainer.contract.resuming.record_shape import CONFIRMED
from trainer.contract.wording import counted, few
from trainer.huggingface.destination import Report
from trainer.huggingface.new_checkpoint import report_use, write_checkpoint
from trainer.huggingface.torch_dist import StoredWeights, WeightsWriter
from trainer.inference.checkpoint import complete_checkpoints

REPORT_INTERVAL_S = 10.0
"""Interval between lines about the progress (seconds)."""

OF_TRAINING = ("sampling", CONFIRMED)
"""Keys of a record from which a run would resume."""


def average(source: Path, last: int, destination: Path, report: Report) -> None:
    """Write the mean of the weights of the `last` complete checkpoints in `source`, a run or a directory of
    checkpoints, as a checkpoint in the new directory `destination`. It has the iteration of the newest.

    Sums are in fp32. All files of the checkpoints are compared with their hashes first.

    Raises:
        TrainerError: there are fewer checkpoints, or some are damaged or of different models. Nothing is written.
        NotSavedError: the destination cannot be written.
    """
    checkpoints = _chosen(source, last)
    if any(base_model.has_adapters(each.record) for each in checkpoints):
        raise TrainerError(
            "has LoRA adapters. Their weights are products B A, and the mean of products is not the product of means. "
            "Set training.ema_decay for a moving average of A and B",
            where=source.absolute(),
        )
    sources = [StoredWeights(each.path) for each in checkpoints]
    if mismatched := sorted({name for each in sources for name in sources[0].names ^ each.names}):
        raise TrainerError(f"the checkpoints do not have the same tensors: {few(mismatched, 3)}")
    iterations = ", ".join(str(each.iteration) for each in reversed(checkpoints))
    _write(checkpoints, partial(_mean, sources), destination, f"the mean of iterations {iterations}", report)


def write_moving_average(source: Path, destination: Path, report: Report) -> None:
    """Write the moving average of the weights (training.ema_decay) in the newest complete checkpoint in `source`, a run
    or a directory of checkpoints, as a checkpoint in the new directory `destination`. Weights that are not trained have
    no average, and keep their values.

    Raises:
        TrainerError: there is no checkpoint, or it is damaged or has no average. Nothing is written.
        NotSavedError: the destination cannot be written.
    """
    [newest] = checkpoints = _chosen(source, 1)
    assert newest.record is not None
    decay, stored = newest.record["training"].get("ema_decay"), StoredWeights(newest.path)
    if newest.record.get("weights_only"):
        raise TrainerError(f"{newest.path} has only weights, and no moving average. Name a run")
    if decay is None:
        raise TrainerError(
            f"{newest.path} has no moving average of the weights, since it was trained without training.ema_decay. Use "
            "--last N for the mean of checkpoints"
        )
    what = f"the moving average (ema_decay = {decay}) of iteration {newest.iteration}"
    _write(checkpoints, partial(_moving_average, stored), destination, what, report)


def _write(
    checkpoints: Sequence[Checkpoint],
    averaged: Callable[[str, tuple[int, ...]], torch.Tensor],
    destination: Path,
    what: str,
    report: Report,
) -> None:
    """Write a checkpoint like the first of `checkpoints`, with the `averaged` part of each tensor at an index."""
    newest = checkpoints[0]

    def write(writer: WeightsWriter) -> dict[str, Any]:
        _require_unchanged(checkpoints, report)
        _write_parts(StoredWeights(newest.path), averaged, writer, report)
        return _record(checkpoints)

    write_checkpoint(destination, newest.iteration, write)
    report(f"wrote {what} to {destination / newest.path.name}")
    report_use(destination, report)


def _chosen(source: Path, last: int) -> list[Checkpoint]:
    """The `last` newest complete checkpoints, newest first."""
    found, flaws = complete_checkpoints(source)
    if len(found) < last:
        others = f". Others are not complete: {few(list(map(str, flaws)), 3, separator=';')}" if flaws else ""
        raise TrainerError(
            f"has {counted(len(found), 'complete checkpoint')}, not {last}{others}", where=source.absolute()
        )
    chosen = found[:last]
    newest = chosen[0].record
    assert newest is not None
    for each in chosen[1:]:
        assert each.record is not None
        models = [record["model"] for record in (each.record, newest)]
        keys = sorted(set(models[0]) | set(models[1]))
        if differing := [key for key in keys if models[0].get(key) != models[1].get(key)]:
            raise TrainerError(
                f"{each.path.name} has another model than {chosen[0].path.name}: model.{', model.'.join(differing)} "
                "differ. Only checkpoints of one model have a mean",
                where=source.absolute(),
            )
    return chosen


def _require_unchanged(checkpoints: Sequence[Checkpoint], report: Report) -> None:
    """Compare all files with the hashes in their records."""
    for each in checkpoints:
        assert each.record is not None
        size = sum(file["bytes"] for file in each.record["files"].values())
        report(f"checking {each.path} ({size / 1e9:,.2f} GB)")
        if problems := checkpoint_files.problems(each, hashes=True):
            raise TrainerError(few(list(map(str, problems)), 3, separator=";"), where=each.path)


def _write_parts(
    newest: StoredWeights,
    averaged: Callable[[str, tuple[int, ...]], torch.Tensor],
    writer: WeightsWriter,
    report: Report,
) -> None:
    """Write each tensor in parts, and the index."""
    parts = [(name, first) for name in sorted(newest.names) for first in _firsts(newest, name)]
    reported = time.monotonic()
    for done, (name, first) in enumerate(parts):
        if time.monotonic() - reported > REPORT_INTERVAL_S:
            reported = time.monotonic()
            report(f"averaged {done} of {len(parts)} parts of tensors")
        shape, part = newest.shape(name), averaged(name, first)
        assert shape is not None
        if part.is_floating_point() and not bool(part.isfinite().all()):
            raise TrainerError(f"the average of {name} has numbers that are not finite")
        writer.write_part(name, shape, first, part)
    writer.finish()


def _firsts(weights: StoredWeights, name: str) -> Iterator[tuple[int, ...]]:
    """Indices of the parts of a tensor: by layer if it has all layers, and the matrices that are stacked in it."""
    shape = weights.shape(name)
    assert shape is not None
    return itertools.product(*map(range, shape[: max(len(shape) - 2, has_all_layers(name))]))


def _mean(sources: Sequence[StoredWeights], name: str, first: tuple[int, ...]) -> torch.Tensor:
    """The mean of a part of a tensor, in the data type of the newest checkpoint. Counts are those of the newest."""
    newest = sources[0].read_part(name, first)
    if not newest.is_floating_point():
        return newest
    total = newest.float()
    for each in sources[1:]:
        part = each.read_part(name, first)
        if part.shape != newest.shape:
            raise TrainerError(f"{name} does not have the same shape in all checkpoints")
        total = total + part.float()
    return (total / len(sources)).to(newest.dtype)


def _moving_average(stored: StoredWeights, name: str, first: tuple[int, ...]) -> torch.Tensor:
    """The average of a part of a tensor, in the data type of the weights; the part itself if it is not trained."""
    weights = stored.read_part(name, first)
    average = f"{OPTIMIZER_STATE}.{AVERAGE}.{name}"
    if stored.shape(average) is not None:
        return stored.read_part(average, first).to(weights.dtype)
    if has_all_layers(name):  # with frozen parameters, each layer has its own
        average = name_in_layer(average, first[0])
        if stored.shape(average) is not None:
            return stored.read_part(average, first[1:]).to(weights.dtype)
    return weights


def _record(checkpoints: Sequence[Checkpoint]) -> dict[str, Any]:
    """Content of COMPLETE, without the files: that of the newest checkpoint, and which checkpoints the mean is of."""
    newest = checkpoints[0].record
    assert newest is not None
    kept = {key: value for key, value in newest.items() if key not in OF_TRAINING}
    averaged = [
        {
            "path": str(each.path),
            "iteration": each.iteration,
            "record_sha256": file_sha256(each.path / COMPLETE)[0],
        }
        for each in reversed(checkpoints)
    ]
    return {**kept, "weights_only": True, "time": time.time(), "averaged": averaged}
