"""Loads the state of all ranks from a checkpoint that was saved with any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed.checkpoint.api import CheckpointException

from trainer.checkpoint import megatron_lm
from trainer.checkpoint import state as contents
from trainer.checkpoint.finding import Source
from trainer.checkpoint.foreign import read_foreign
from trainer.checkpoint.loading_errors import raise_environment_fault, scope_of
from trainer.contract.config import ParallelismConfig
from trainer.contract.errors import Scope, TrainerError
from trainer.contract.files.checkpoint_files import Checkpoint
from trainer.contract.wording import few
from trainer.model.build import gather_weights
from trainer.model.vocabulary import add_tokens
from trainer.step import TrainingState


def load(
    source: Source, state: TrainingState, groups: ProcessGroupCollection, tokens: int | None = None
) -> None:
    """Load the state of all ranks from a checkpoint that was saved with any layout. `tokens` is the number of tokens of
    a vocabulary that may be larger than the checkpoint's (checkpoint.resize_vocabulary).

    Learning rates, betas and weight decay come from the configuration, not from the checkpoint. An average of the
    weights that the checkpoint lacks begins with the loaded weights.

    Raises:
        NonFiniteError: on all ranks, if the checkpoint contains values that are not finite.
        TrainerError: the checkpoint cannot be loaded although its files are unchanged, so an older one would not help;
            or the storage fails, which may be temporary.
        RuntimeError: from gloo, NCCL, the store or CUDA: another rank is gone, or the memory is full.
    """
    if source.base is not None:
        _load_base(source.base, state, groups)
        if not source.has_adapters:
            return
    sharding = contents.sharding(groups, adapters=state.has_adapters)
    if source.foreign is not None:
        sharding |= source.foreign.content_metadata
    weights = contents.sharded_weights(state, sharding)
    if source.weights_only and tokens is not None and source.sections["model"].get("vocab_size") is None:
        raise TrainerError(
            f"{source.path} does not say how many rows of its embedding are tokens, so checkpoint.resize_vocabulary "
            "cannot find the new ones. Export it and import it again",
            scope=Scope.ALL_RANKS,
        )
    average = state.average if _has_average(source) else None
    optimizer = (
        {}
        if source.weights_only
        else contents.sharded_optimizer(state, weights, sharding, average, is_loading=True)
    )
    try:
        loaded, absent = _read(source.path, weights | optimizer, groups)
        if source.foreign is not None:
            loaded |= _position(source.foreign, state)
        if not absent:
            contents.fill(state, loaded, weights_only=source.weights_only)
            if source.weights_only and tokens is not None:
                _add_tokens(source, state, groups, tokens)
            _complete(state, source, optimizer, groups, has_average=average is not None)
    # Pickle, zip, key and shape errors, and torch's CheckpointException, which is raised on all ranks and does not
    # derive from Exception.
    except (Exception, CheckpointException) as error:
        raise_environment_fault(error, source.path)
        raise TrainerError(
            f"{source.path} cannot be loaded, although its files are unchanged ({type(error).__name__}: {error}). Use "
            f"the versions that wrote it ({_versions(source.checkpoint)}), or rename it to resume from the previous "
            "checkpoint",
            scope=scope_of(error),
        ) from error
    _require_all(absent, source.path)
    contents.check_loaded(state, source.path)


def _complete(
    state: TrainingState,
    source: Source,
    optimizer: dict[str, Any],
    groups: ProcessGroupCollection,
    *,
    has_average: bool,
) -> None:
    """Set what the tensors of the checkpoint do not contain. `optimizer` is the sharded state of the optimizer."""
    if not source.weights_only:
        state.consumed_tokens = source.consumed_tokens
    if any(change.name == "training.precision" and change.after == "fp32" for change in source.changes):
        _restore_fp32_weights(source, state, optimizer, groups)
    if state.average is not None and not has_average:
        state.average.restart()


def sharding_of_complete(found: Checkpoint, groups: ProcessGroupCollection) -> dict[str, Any]:
    """Options with which Core reads the weights of a complete checkpoint, which Megatron-LM may have written.

    Raises:
        TrainerError: Megatron-LM wrote it, and these versions cannot read it.
    """
    sharding = contents.sharding(groups)
    if found.is_foreign:
        sharding |= read_foreign(found.path, ParallelismConfig(), weights_only=True).content_metadata
    return sharding


def _load_base(base: Checkpoint, state: TrainingState, groups: ProcessGroupCollection) -> None:
    """Load the frozen weights of a run with adapters."""
    sharding = sharding_of_complete(base, groups)
    try:
        loaded, absent = _read(base.path, contents.sharded_base(state, sharding), groups)
        if not absent:
            contents.fill_base(state, loaded)
    except (Exception, CheckpointException) as error:
        raise_environment_fault(error, base.path)
        raise TrainerError(
            f"{base.path} cannot be loaded, although its files are unchanged ({type(error).__name__}: {error}). Use "
            f"the versions that wrote it ({_versions(base)})",
            scope=scope_of(error),
        ) from error
    _require_all(absent, base.path)
    contents.check_loaded(state, base.path)


def _require_all(absent: set[str], path: Path) -> None:
    """Raise TrainerError on all ranks if tensors are absent."""
    if absent:
        raise TrainerError(
            f"{path} belongs to another model: it has no {few(sorted(absent), 5)}",
            scope=Scope.ALL_RANKS,
        )


def _add_tokens(source: Source, state: TrainingState, groups: ProcessGroupCollection, tokens: int) -> None:
    """Fill the rows of new tokens, of which the run has `tokens` in all."""
    add_tokens(state.model, groups, int(source.sections["model"]["vocab_size"]), tokens)
    state.optimizer.reload_model_params()


def _has_average(source: Source) -> bool:
    """True if the average of the weights continues that of the checkpoint."""
    if source.weights_only or source.foreign is not None:
        return False
    return source.sections["training"].get("ema_decay") is not None


def _restore_fp32_weights(
    source: Source, state: TrainingState, optimizer: dict[Any, Any], groups: ProcessGroupCollection
) -> None:
    """Continue a run of half precision in fp32 with the fp32 weights of its optimizer.

    In fp32, the model and the optimizer share their weights, and the rounded weights of the model have been loaded too.
    """
    _read(source.path, optimizer, groups)
    gather_weights(state.model)


def _position(foreign: megatron_lm.Resumed, state: TrainingState) -> dict[str, Any]:
    """Values for `fill` that Megatron-LM stores in another place, or not at all."""
    return {
        "iteration": foreign.iteration,
        "consumed_samples": foreign.consumed_samples,
        "spikes": state.spikes.state_dict(),
    }


def _read(
    path: Path, content: dict[str, Any], groups: ProcessGroupCollection
) -> tuple[dict[str, Any], set[str]]:
    """Read `content` from the checkpoint. Also returns the names of the tensors that the checkpoint does not have.

    Data that several data-parallel ranks need is read from the storage only once per instance of the optimizer. Between
    instances it is not exchanged, because Core puts received values into new tensors, and the optimizer's state must be
    filled in place.
    """
    strategy = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), groups.intra_dp_cp)
    loaded, _, absent_here = dist_checkpointing.load(
        content, str(path), strategy, strict=StrictHandling.RETURN_UNEXPECTED
    )
    absent: list[set[str]] = [set()] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(absent, absent_here)
    # Transformer Engine's extra state holds FP8 scales. Checkpoints written with other kernels do not have it.
    return loaded, {name for names in absent for name in names if contents.EXTRA_STATE not in name}


def _versions(checkpoint: Checkpoint) -> str:
    versions = (checkpoint.record or {}).get("versions", {})
    return ", ".join(f"{name} {version}" for name, version in versions.items()) or "Megatron-LM's"
