"""Finds the checkpoint to generate from, and the configuration of its model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from trainer.contract.config import (
    BlendConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelismConfig,
    TrainerConfig,
    TrainingConfig,
    from_dict,
)
from trainer.contract.config.resolve import resolve
from trainer.contract.errors import TrainerError
from trainer.contract.files import checkpoint_files
from trainer.contract.files.checkpoint_files import PREFIX, Checkpoint
from trainer.contract.files.regular_file import read_bytes
from trainer.contract.files.run_directory import RunDirectory
from trainer.contract.model.pipeline import almost_even_layout
from trainer.contract.problem import FilePlace, Problem, listed
from trainer.contract.resuming import base_model
from trainer.contract.rules.engine import FORWARD, require


def find_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`, or the newest complete one in a directory of checkpoints or of a run.

    Raises:
        TrainerError: there is none, or files of it are missing or truncated.
    """
    path = path.absolute()
    try:
        if not path.is_dir():
            what = "not a directory" if path.exists() else "no such directory"
            raise TrainerError(f"{what}. Name a run directory or an {PREFIX}... directory", where=path)
        if path.name.startswith(PREFIX):
            return _checked(path)
        directory = _directory_of_checkpoints(path)
        for each in map(checkpoint_files.describe, checkpoint_files.list_paths(directory)):
            if each.is_complete or each.is_foreign:
                return _checked(each.path)
        raise TrainerError(f"{path} has no complete checkpoint. {_what_it_has(directory)}")
    except OSError as error:
        raise TrainerError(
            f"{error.filename or path} cannot be read: {error.strerror}", retry=True
        ) from error


def complete_checkpoints(path: Path) -> tuple[list[Checkpoint], list[Problem]]:
    """The complete checkpoints in a directory of checkpoints or of a run, newest first, and the flaws of the other
    checkpoints.

    Raises:
        TrainerError: the directory cannot be read.
    """
    try:
        found = checkpoint_files.list_checkpoints(_directory_of_checkpoints(path.absolute()))
        checked = checkpoint_files.demote_incomplete(found)
    except OSError as error:
        raise TrainerError(
            f"{error.filename or path} cannot be read: {error.strerror}", retry=True
        ) from error
    flaws = [
        replace(each.flaw, where=FilePlace(each.path))
        for each in checked
        if each.flaw and not each.is_cut_off
    ]
    return [each for each in checked if each.is_complete], flaws


def _directory_of_checkpoints(path: Path) -> Path:
    """`path` itself, or the directory in which the run in `path` saves."""
    if checkpoint_files.list_paths(path):
        return path
    try:
        config = json.loads(read_bytes(path / RunDirectory.TRAINED_WITH))
    except (OSError, ValueError):
        config = None
    return RunDirectory.recorded(path, config).checkpoints


def _what_it_has(directory: Path) -> str:
    paths = checkpoint_files.list_paths(directory)
    if not paths:
        return f"Name a run directory or an {PREFIX}... directory"
    newest = checkpoint_files.describe(paths[0])
    return f"{newest.path.name} is incomplete: {newest.flaw}"


def _checked(path: Path) -> Checkpoint:
    if checkpoint_files.iteration_of(path) is None:
        raise TrainerError(f"{path} is not a checkpoint: its name is not {PREFIX} and at least 7 digits")
    found = checkpoint_files.describe(path)
    if problems := checkpoint_files.problems(found, hashes=False):
        raise TrainerError(f"{path} is not a complete checkpoint: {listed(problems)}")
    return found


def inference_config(
    found: Checkpoint,
    *,
    device: Literal["cuda", "cpu"],
    precision: Literal["bf16", "fp16", "fp32"] | None,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    num_replicas: int = 1,
    vocab_size: int | None = None,
) -> TrainerConfig:
    """Configuration of the trained model in a different layout, with its adapters, without dropout and MTP layers.

    From the section `data`, it keeps only the keys about documents. Call `prepare_device` first.

    `vocab_size` is the number of tokens for a checkpoint of Megatron-LM that does not say how many rows are padding.

    Raises:
        TrainerError: the record has an unknown or invalid key, or the model cannot be split in this way.
    """
    record = record_of(found)
    unused = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "mtp_num_layers": None}
    recorded: dict[str, Any] = record["model"] | unused
    if found.record is None and vocab_size is not None and vocab_size <= recorded["padded_vocab_size"]:
        recorded = {"vocab_size": vocab_size, **recorded}
    model = from_dict(ModelConfig, recorded, f"{found.path / checkpoint_files.COMPLETE}: model")
    training = TrainingConfig(
        micro_batch_size=1,
        global_batch_size=num_replicas,
        train_iters=1,
        precision=precision or record["precision"],
        transformer_impl="torch",
    )
    config = TrainerConfig(
        name=found.path.name,
        run_dir=str(found.path.parent),
        device=device,
        world_size=tensor_parallel * pipeline_parallel * num_replicas,
        model=model,
        parallelism=ParallelismConfig(
            tensor_model_parallel_size=tensor_parallel,
            pipeline_model_parallel_size=pipeline_parallel,
            pipeline_model_parallel_layout=_uneven_layout(model.num_layers, pipeline_parallel),
        ),
        training=training,
        optimizer=OptimizerConfig(lr=1.0, lr_warmup_iters=0),
        data=_documents(record),
        lora=base_model.adapters(found.path, record),
    )
    require(config, FORWARD)
    return resolve(config)


def _documents(record: Mapping[str, Any]) -> BlendConfig:
    """How the model was trained on documents. The record of an imported model does not say it."""
    names = ("sft", "reset_attention_mask", "reset_position_ids", "eod_mask_loss", "eod_id")
    recorded = record.get("data", {})
    return BlendConfig(mock=True, **{name: recorded[name] for name in names if name in recorded})


def _uneven_layout(num_layers: int, stages: int) -> str | None:
    """Layers of each pipeline stage, if they cannot all have the same number of layers."""
    return almost_even_layout(num_layers, stages) if num_layers > stages and num_layers % stages else None


def record_of(found: Checkpoint) -> dict[str, Any]:
    """The record of a checkpoint, or the sections of it that the arguments of one of Megatron-LM tell. Call
    `device.prepare` first.

    Raises:
        TrainerError: a later version of the trainer wrote it, or Megatron-LM's arguments cannot be used.
    """
    if found.record is None:
        from trainer.checkpoint.foreign import read_model  # imports megatron.core

        model, resumed = read_model(found.path)
        return {
            **resumed.sections,
            "model": model,
            "precision": resumed.precision,
            "consumed_samples": resumed.consumed_samples,
        }
    if problem := checkpoint_files.format_problem(found.path, found.record):
        raise TrainerError(problem)
    return found.record
