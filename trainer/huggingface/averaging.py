"""The mean of checkpoints of a run, as a checkpoint with weights only. Holds one part of a tensor of each at a time.

The mean of the last checkpoints is often better than each of them (Izmailov et al., arXiv 1803.05407; for language
models, Sanyal et al., arXiv 2306.03241).
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from trainer.contract.errors import TrainerError
from trainer.contract.files import checkpoint_files
from trainer.contract.files.checkpoint_files import COMPLETE, TRACKER, Checkpoint
from trainer.contract.files.system_calls import sync_path
from trainer.contract.resuming.record_shape import CONFIRMED
from trainer.contract.wording import counted, few
from trainer.huggingface.destination import new_directory, write_text
from trainer.huggingface.importing import Report, verify, write_common
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
    newest = checkpoints[0]
    with new_directory(destination) as directory:
        _require_unchanged(checkpoints, report)
        path = checkpoint_files.iteration_directory(directory, newest.iteration)
        path.mkdir()
        writer = WeightsWriter(path)
        _write_means([StoredWeights(each.path) for each in checkpoints], writer, report)
        files = writer.files | write_common(path, newest.iteration)
        record = {**_record(checkpoints), "files": files}
        write_text(path / COMPLETE, checkpoint_files.record_text(record))
        write_text(directory / TRACKER, str(newest.iteration))
        sync_path(path)
        verify(path)
    iterations = ", ".join(str(each.iteration) for each in reversed(checkpoints))
    report(f"wrote the mean of iterations {iterations} to {destination / path.name}")
    report("to start from it, write into the run file:")
    load = json.dumps(os.path.normpath(destination.absolute()))
    report(f"checkpoint: {{load: {load}, finetune: true}}")


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


def _write_means(sources: Sequence[StoredWeights], writer: WeightsWriter, report: Report) -> None:
    """Write the mean of each tensor, and the index."""
    newest, *others = sources
    if mismatched := sorted({name for each in others for name in newest.names ^ each.names}):
        raise TrainerError(f"the checkpoints do not have the same tensors: {few(mismatched, 3)}")
    parts = [(name, first) for name in sorted(newest.names) for first in _firsts(newest, name)]
    reported = time.monotonic()
    for done, (name, first) in enumerate(parts):
        if time.monotonic() - reported > REPORT_INTERVAL_S:
            reported = time.monotonic()
            report(f"averaged {done} of {len(parts)} parts of tensors")
        shape = newest.shape(name)
        assert shape is not None
        writer.write_part(name, shape, first, _mean(sources, name, first))
    writer.finish()


def _firsts(weights: StoredWeights, name: str) -> Iterator[tuple[int, ...]]:
    """Indices of the parts of a tensor: the matrices that are stacked in it, by layer and by expert."""
    shape = weights.shape(name)
    assert shape is not None
    return itertools.product(*map(range, shape[:-2]))


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


def _record(checkpoints: Sequence[Checkpoint]) -> dict[str, Any]:
    """Content of COMPLETE, without the files: that of the newest checkpoint, and which checkpoints the mean is of."""
    newest = checkpoints[0].record
    assert newest is not None
    kept = {key: value for key, value in newest.items() if key not in OF_TRAINING}
    averaged = [
        {
            "path": str(each.path),
            "iteration": each.iteration,
            "record_sha256": checkpoint_files.describe_file(each.path / COMPLETE)["sha256"],
        }
        for each in reversed(checkpoints)
    ]
    return {**kept, "weights_only": True, "time": time.time(), "averaged": averaged}
