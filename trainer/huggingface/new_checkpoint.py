"""A new directory with one checkpoint of weights only, which appears complete or not at all."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from trainer.contract.config import ParallelismConfig, to_dict
from trainer.contract.errors import TrainerError
from trainer.contract.files import checkpoint_files
from trainer.contract.files.checkpoint_files import (
    CHECKPOINT_VERSION,
    COMMON,
    COMPLETE,
    METADATA,
    TRACKER,
    TRAINER_MARK,
)
from trainer.contract.files.system_calls import sync_path
from trainer.contract.problem import listed
from trainer.huggingface.destination import Report, new_directory, sync_file, write_text
from trainer.huggingface.torch_dist import WeightsWriter
from trainer.metrics.versions import distribution_version

STORAGE = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""Contents of METADATA, as Megatron-Core writes it."""


def write_checkpoint(
    destination: Path, iteration: int, write: Callable[[WeightsWriter], Mapping[str, Any]]
) -> int:
    """Write a new directory of checkpoints, with one. Returns the size of the checkpoint (bytes).

    `write` writes the tensors and returns the record (content of COMPLETE) without the files.

    Raises:
        TrainerError: the directory exists, or the storage has changed data. Nothing is written.
        NotSavedError: the directory cannot be written.
    """
    with new_directory(destination) as directory:
        path = checkpoint_files.iteration_directory(directory, iteration)
        path.mkdir()
        with WeightsWriter(path) as writer:
            record = write(writer)
        files = writer.files | _write_common(path, iteration)
        write_text(path / COMPLETE, checkpoint_files.record_text({**record, "files": files}))
        write_text(directory / TRACKER, str(iteration))
        sync_path(path)
        _verify(path)
    return sum(file["bytes"] for file in files.values())


def record_of_import(
    precision: str, model: Mapping[str, Any], origins: Mapping[str, Any], **sections: Any
) -> dict[str, Any]:
    """Content of COMPLETE, without the files, for weights about whose training nothing is known."""
    return {
        "format": checkpoint_files.FORMAT,
        "weights_only": True,
        "iteration": 0,
        "consumed_samples": 0,
        "time": time.time(),
        "world_size": 1,
        "layout": to_dict(ParallelismConfig()),
        "precision": precision,
        "model": model,
        "training": {"micro_batch_size": 0, "global_batch_size": 0, "train_iters": 0},
        "optimizer": {},
        "data": {},
        **sections,
        "versions": {"trainer": distribution_version("hpcgen"), "torch": torch.__version__},
        "origins": {"code": {}, "pairs": {}, **origins},
    }


def report_use(destination: Path, report: Report, purpose: str = "start from it") -> None:
    """Report the line of a run file that loads the checkpoint in the directory `destination`."""
    report(f"to {purpose}, write into the run file:")
    load = json.dumps(os.path.normpath(destination.absolute()))
    report(f"checkpoint: {{load: {load}, finetune: true}}")


def _write_common(path: Path, iteration: int) -> dict[str, dict[str, Any]]:
    """Write the files that Megatron-Core expects in addition to tensors and index."""
    common = {
        TRAINER_MARK: True,
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": iteration,
        "consumed_samples": 0,
    }
    with (path / COMMON).open("xb") as file:
        torch.save(common, file)
    sync_file(path / COMMON)
    write_text(path / METADATA, json.dumps(STORAGE))
    return {name: checkpoint_files.describe_file(path / name) for name in (COMMON, METADATA)}


def _verify(path: Path) -> None:
    """Check that the checkpoint is valid as far as names, sizes and record show.

    Raises:
        TrainerError: the storage has something else than what was written.
    """
    if problems := checkpoint_files.problems(checkpoint_files.describe(path), hashes=False):
        raise TrainerError(
            f"the storage changed data that was written: {listed(problems)}. Check the storage and try again"
        )
