"""Builds a model for inference and loads its weights, whatever layout saved them."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed.checkpoint.api import CheckpointException

from trainer.checkpoint import reading
from trainer.checkpoint import state as contents
from trainer.checkpoint.loading import sharding_of_complete
from trainer.checkpoint.loading_errors import raise_environment_fault
from trainer.contract.code import code_loading, imports
from trainer.contract.code.code_record import CodeRecord
from trainer.contract.config import TrainerConfig
from trainer.contract.errors import Scope, TrainerError
from trainer.contract.files.checkpoint_files import COMPLETE, Checkpoint
from trainer.contract.files.shared_files import require_own
from trainer.contract.resuming import base_model
from trainer.contract.resuming.record_shape import origins
from trainer.contract.wording import few
from trainer.distributed.rendezvous import Ranks
from trainer.faults.storage import at_rank_0
from trainer.inference.checkpoint import inference_config
from trainer.inference.groups import open_groups
from trainer.inference.model import Model
from trainer.lora.adapter import is_adapter
from trainer.model.build import build_chunks
from trainer.model.core_config import HALF, transformer_config
from trainer.model.kernels import TORCH


def load(
    found: Checkpoint,
    ranks: Ranks,
    *,
    device: Literal["cuda", "cpu"],
    precision: Literal["bf16", "fp16", "fp32"] | None = None,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    vocab_size: int | None = None,
) -> Model:
    """Load the model of a checkpoint. Ranks beyond TP x PP hold further replicas.

    `vocab_size` is the number of tokens for a checkpoint of Megatron-LM that does not say how many rows are padding.

    Raises:
        TrainerError: the ranks do not match the layout, the model cannot be split in this way, or the checkpoint cannot
            be loaded.
        LostPeersError: not all ranks connected.
    """
    config = inference_config(
        found,
        device=device,
        precision=precision,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        num_replicas=ranks.world_size // (tensor_parallel * pipeline_parallel),
        vocab_size=vocab_size,
    )
    return load_part(found, config, open_groups(config, ranks))


def load_part(found: Checkpoint, config: TrainerConfig, groups: ProcessGroupCollection) -> Model:
    """Load this rank's part of the model. `config` is the `inference_config` of the checkpoint.

    Raises:
        TrainerError: the checkpoint cannot be loaded.
    """
    _use_code(found, config)
    core = dataclasses.replace(
        transformer_config(config, TORCH),
        # With initialization on a CPU, Core would allocate complete matrices and cut out the rank's part.
        use_cpu_initialization=config.device == "cpu",
        # A capacity drops tokens when a batch has many. Here, a text must not depend on the other texts in its batch.
        moe_expert_capacity_factor=None,
        moe_pad_expert_input_to_capacity=False,
    )
    [chunk] = build_chunks(config, core, groups, TORCH)
    chunk.to(HALF.get(config.training.precision, torch.float32))
    base = found
    if base_model.has_adapters(found.record):
        base = at_rank_0(lambda: base_model.find(found.record or {}, None), found.path)
        if broken := reading.problems(base, lambda: None):
            raise TrainerError(base_model.damage(base, found.path, broken), scope=Scope.ALL_RANKS)
        _load_weights(chunk, found, contents.sharding(groups, adapters=True), is_adapter)
    _load_weights(chunk, base, sharding_of_complete(base, groups), lambda name: not is_adapter(name))
    return Model(config, chunk, groups)


def _require_trusted(record: Path, paths: Mapping[str, str]) -> None:
    """Refuse code that the record of a checkpoint names if other users could have chosen it. A user who can write the
    record could name any file. If other users can write it, the code must be this user's own.
    """
    if not paths:
        return
    with contextlib.suppress(PermissionError):
        require_own(record.stat(), record)
        return
    for key, path in paths.items():
        if file := imports.file_of(path):
            try:
                for place in (Path(file), Path(file).absolute().parent):
                    require_own(place.stat(), place)
            except OSError as error:
                raise TrainerError(
                    f"{record} can be written by other users and names code, which was not run: {key} = {path}. "
                    f"{error.filename} {error.strerror}. If you trust the code, copy the checkpoint to a directory "
                    "of your own (cp -r, chmod -R go-w) and name the copy"
                ) from error


def _use_code(found: Checkpoint, config: TrainerConfig) -> None:
    """Let all ranks execute the user's code as rank 0 reads it. Warn if the checkpoint was trained with other code."""
    paths = {key: path for key, path in imports.named(config).items() if key.startswith("model.")}
    at_rank_0(lambda: _require_trusted(found.path / COMPLETE, paths), found.path)
    codes = at_rank_0(lambda: code_loading.read(paths.values()), found.path)
    code_loading.use(codes)
    saved = origins(found.record).get("code", {})
    for key, path in paths.items():
        change = (
            CodeRecord.of(codes[path]).change(key, saved[key]) if path in codes and key in saved else None
        )
        if change is not None and torch.distributed.get_rank() == 0:
            print(
                f"warning: {key}: {found.path} was trained with {change.before}, which is now {change.after}. Its "
                "results may differ from those of the trained model",
                file=sys.stderr,
                flush=True,
            )


def _load_weights(
    chunk: GPTModel, found: Checkpoint, sharding: dict[str, Any], is_part: Callable[[str], bool]
) -> None:
    """Load the weights that `is_part` chooses by their names."""
    sharded = chunk.sharded_state_dict(metadata=sharding)
    weights = {"model": {name: tensor for name, tensor in sharded.items() if is_part(name)}}
    try:
        loaded, _, absent = dist_checkpointing.load(
            weights,
            str(found.path),
            TorchDistLoadShardedStrategy(),
            strict=StrictHandling.RETURN_UNEXPECTED,
        )
        missing = {name for name in absent if contents.EXTRA_STATE not in name}
        if not missing:
            missing = set(filter(is_part, _fill(chunk, loaded["model"])))
    # torch's CheckpointException does not derive from Exception.
    except (Exception, CheckpointException) as error:
        raise_environment_fault(error, found.path)
        raise TrainerError(
            f"{found.path} cannot be loaded ({type(error).__name__}: {error}). Check its files with "
            f"hpcgen checkpoint inspect --verify {found.path}"
        ) from error
    if missing:
        raise TrainerError(
            f"{found.path} does not fit the model in its own record: it has no {few(sorted(missing), 5)}"
        )


def _fill(chunk: GPTModel, loaded: dict[str, Any]) -> set[str]:
    """Copy the loaded weights. Returns the names of missing weights."""
    weights = {name: value for name, value in loaded.items() if contents.EXTRA_STATE not in name}
    absent, unknown = chunk.load_state_dict(weights, strict=False)
    return {name for name in (*absent, *unknown) if contents.EXTRA_STATE not in name}
