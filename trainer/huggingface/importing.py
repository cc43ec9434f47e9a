"""Imports a Hugging Face directory as a checkpoint with weights only, holding one tensor in memory."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import torch

from trainer.contract.errors import TrainerError
from trainer.contract.families.model_family import in_order
from trainer.contract.files import checkpoint_files
from trainer.huggingface import tokenizer_files
from trainer.huggingface.destination import Report
from trainer.huggingface.new_checkpoint import record_of_import, report_use, write_checkpoint
from trainer.huggingface.reading import HuggingFaceDirectory
from trainer.huggingface.torch_dist import WeightsWriter
from trainer.huggingface.transforms import to_core


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
    started = time.monotonic()
    size = write_checkpoint(destination, 0, lambda writer: _record(model, _write_weights(model, writer)))
    seconds = time.monotonic() - started
    report(
        f"imported {source} ({model.family.architecture}) to {destination}: {size / 1e9:,.2f} GB in {seconds:,.1f} s "
        f"({size / 1e6 / max(seconds, 1e-9):,.0f} MB/s)"
    )
    report_use(destination, report)


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


def _record(source: HuggingFaceDirectory, dtype: torch.dtype) -> dict[str, Any]:
    """Content of COMPLETE, without the files."""
    origin = {
        "name": str(source.path.absolute()),
        "family": source.family.name,
        "config": checkpoint_files.describe_file(source.path / "config.json"),
        "files": {
            file.name: {"bytes": file.stat().st_size, "modified_ns": file.stat().st_mtime_ns}
            for file in source.files
        },
    }
    return record_of_import(
        {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "fp32"),
        json.loads(json.dumps(dataclasses.asdict(source.model))),
        {"huggingface": origin},
    )
