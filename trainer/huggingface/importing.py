"""Imports a Hugging Face directory as a checkpoint with weights only, holding one tensor in memory."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trainer.contract.config import ParallelismConfig, to_dict
from trainer.contract.errors import TrainerError
from trainer.contract.families.model_family import in_order
from trainer.contract.files import checkpoint_files
from trainer.contract.files.checkpoint_files import COMMON, COMPLETE, METADATA, TRACKER, TRAINER_MARK
from trainer.contract.files.system_calls import sync_path
from trainer.contract.problem import listed
from trainer.huggingface import tokenizer_files
from trainer.huggingface.destination import new_directory, sync_file, write_text
from trainer.huggingface.reading import HuggingFaceDirectory
from trainer.huggingface.torch_dist import WeightsWriter
from trainer.huggingface.transforms import to_core
from trainer.metrics.versions import distribution_version

Report = Callable[[str], None]

CHECKPOINT_VERSION = 3.0
"""Megatron-LM's version number for its parameter layout (QKV interleaved by group)."""

STORAGE = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""Contents of METADATA, as Megatron-Core writes it."""


def import_model(source: Path, destination: Path, report: Report) -> None:
    """Write the model in the directory `source` as iteration 0 in a new directory of checkpoints.

    Raises:
        TrainerError: the model is damaged or not supported. Nothing is written.
        NotSavedError: the destination cannot be written.
    """
    model = HuggingFaceDirectory(source)
    tokenizer = tokenizer_files.find_tokenizer(source)
    if tokenizer is not None:
        tokenizer_files.check_size(tokenizer, model.model.vocab_size)
    with new_directory(destination) as directory:
        started = time.monotonic()
        path = checkpoint_files.iteration_directory(directory, 0)
        path.mkdir()
        with WeightsWriter(path) as writer:
            dtype = _write_weights(model, writer)
        files = writer.files | write_common(path, 0)
        record = {**_record(model, dtype), "files": files}
        write_text(path / COMPLETE, checkpoint_files.record_text(record))
        write_text(directory / TRACKER, "0")
        sync_path(path)
        verify(path)
        seconds = time.monotonic() - started
    size = sum(file["bytes"] for file in files.values())
    report(
        f"imported {source} ({model.family.architecture}) to {destination}: {size / 1e9:,.2f} GB in {seconds:,.1f} s "
        f"({size / 1e6 / max(seconds, 1e-9):,.0f} MB/s)"
    )
    report("to start from it, write into the run file:")
    load = json.dumps(os.path.normpath(destination.absolute()))
    report(f"checkpoint: {{load: {load}, finetune: true}}")


def _write_weights(source: HuggingFaceDirectory, writer: WeightsWriter) -> torch.dtype:
    """Write all tensors and the index. Returns the data type of the embedding."""
    model, dtype = source.model, torch.float32
    for weight, layer in in_order(source.family, model):
        parts = [source.read(name.format(n=layer)) for name in weight.names]
        tensor = to_core(weight, parts, model)
        if not bool(tensor.isfinite().all()):
            raise TrainerError(
                f"{weight.names[0].format(n=layer)} has numbers that are not finite", where=source.path
            )
        if weight.form == "vocabulary":
            dtype = tensor.dtype
        writer.write(weight, tensor, layer, model.num_layers)
    writer.finish()
    return dtype


def write_common(path: Path, iteration: int) -> dict[str, dict[str, Any]]:
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


def _record(source: HuggingFaceDirectory, dtype: torch.dtype) -> dict[str, Any]:
    """Content of COMPLETE, without the files. Nothing is known about the training."""
    precision = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "fp32")
    config = source.path / "config.json"
    return {
        "format": checkpoint_files.FORMAT,
        "weights_only": True,
        "iteration": 0,
        "consumed_samples": 0,
        "time": time.time(),
        "world_size": 1,
        "layout": to_dict(ParallelismConfig()),
        "precision": precision,
        "model": json.loads(json.dumps(dataclasses.asdict(source.model))),
        "training": {"micro_batch_size": 0, "global_batch_size": 0, "train_iters": 0},
        "optimizer": {},
        "data": {},
        "versions": {"trainer": distribution_version("hpcgen"), "torch": torch.__version__},
        "origins": {
            "code": {},
            "pairs": {},
            "huggingface": {
                "name": str(source.path.absolute()),
                "family": source.family.name,
                "config": checkpoint_files.describe_file(config),
                "files": {
                    file.name: {"bytes": file.stat().st_size, "modified_ns": file.stat().st_mtime_ns}
                    for file in source.files
                },
            },
        },
    }


def verify(path: Path) -> None:
    """Check that the checkpoint is valid as far as names, sizes and record show.

    Raises:
        TrainerError: the storage has something else than what was written.
    """
    if problems := checkpoint_files.problems(checkpoint_files.describe(path), hashes=False):
        raise TrainerError(
            f"the storage changed data that was written: {listed(problems)}. Check the storage and try again"
        )
