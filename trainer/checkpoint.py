"""Checkpoints in Megatron-LM's directory layout, loadable at another TP, PP, VPP or DP.

`iter_0000010/` holds one checkpoint (torch_dist); `latest_checkpointed_iteration.txt`, the tracker, names the
newest complete one. The tracker is published only when all of its checkpoint is on disk.
"""

from __future__ import annotations

import dataclasses
import queue
import shutil
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed.checkpoint.api import CheckpointException

from trainer.config import ModelConfig, TrainerConfig
from trainer.distributed import from_rank_0
from trainer.errors import TrainerError
from trainer.logging import Log
from trainer.run_directory import publish, sync_directory
from trainer.step import TrainingState, Vote

TRACKER = "latest_checkpointed_iteration.txt"

CHECKPOINT_VERSION = 3.0
"""Megatron-LM's number for its parameter layout (QKV interleaved by group)."""

HYPERPARAMETERS = ("max_lr", "min_lr", "betas", "eps")
"""What a parameter group holds beside its state."""

# Core collects what its writers did through a server process, so that it can save in the background. Saves
# here are waited for: a plain queue does. The server would cost each rank 2 s and the memory of one more
# Python, and die, just before the save, of a stop signal that Slurm sends to every process of the step.
filesystem_async._results_queue = queue.Queue()


class Checkpoints:
    """The checkpoints of this life of the run."""

    def __init__(
        self, directory: Path, config: TrainerConfig, groups: ProcessGroupCollection, log: Log
    ) -> None:
        self._directory, self._config, self._groups, self._log = directory, config, groups, log

    def vote(self) -> Vote:
        """What this rank has to say about saves at the end of a step."""
        return Vote()

    def advance(self, vote: Vote) -> None:
        """Completes a background save once all ranks have written. Every rank calls this after each step."""

    def save(self, state: TrainingState, *, wait: bool) -> None:
        """Starts a save of the state as it is, and completes it before returning if `wait`. Every rank calls this."""
        save(state, self._directory, self._config, self._groups)
        self._log.line(f"iteration {state.iteration}: checkpoint saved in {self._directory}")


def save(
    state: TrainingState, directory: Path, config: TrainerConfig, groups: ProcessGroupCollection
) -> None:
    """Saves the state of all ranks as the newest checkpoint in `directory`. Every rank calls this."""
    target = iteration_directory(directory, state.iteration)
    if not from_rank_0(lambda: _make_room(directory, state.iteration)):
        return
    for chunk in state.model:
        chunk.start_param_sync(force_sync=True)
    metadata = _metadata(groups)
    content = _sharded_state(state, metadata, is_loading=False)
    content |= {
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": state.iteration,
        "consumed_samples": state.consumed_samples,
        "spikes": state.spikes.state_dict(),
        "model_config": _shape(config.model),
        "sample_order": _sample_order(config),
    }
    dist_checkpointing.save(content, str(target), content_metadata=_plain(metadata))
    from_rank_0(lambda: _publish_tracker(directory, state.iteration))
    if (keep_last := config.checkpoint.keep_last) is not None:
        from_rank_0(lambda: _remove_older(directory, keep_last))


def newest(own: Path, other: str | None) -> Path | None:
    """The newest complete checkpoint in `own`, else in `other`; None when the run begins from random weights.

    Raises:
        TrainerError: `other` is named and holds no checkpoint; or see `tracked_iteration`.
    """
    if (iteration := tracked_iteration(own)) is not None:
        return iteration_directory(own, iteration)
    if other is None:
        return None
    if (iteration := tracked_iteration(Path(other))) is None:
        raise TrainerError(
            f"checkpoint.load = {other!r} holds no {TRACKER}: name a directory of checkpoints, "
            "or leave it out to start from random weights"
        )
    return iteration_directory(Path(other), iteration)


def iteration_directory(directory: Path, iteration: int) -> Path:
    """Where the checkpoint of an iteration lies, as Megatron-LM names it."""
    return directory / f"iter_{iteration:07d}"


def load(source: Path, state: TrainingState, config: TrainerConfig, groups: ProcessGroupCollection) -> None:
    """Fills the state of all ranks from a checkpoint, whatever layout saved it.

    The learning rates, betas and weight decay of the configuration win over those of the checkpoint.

    Raises:
        TrainerError: it cannot be loaded. A run that has saved once never starts again from random weights.
    """
    try:
        common = dist_checkpointing.load_common_state_dict(str(source))
        _check(source, "model", common.get("model_config", {}), _shape(config.model))
        _check(source, "sample order", common.get("sample_order", {}), _sample_order(config))
        content = _sharded_state(state, _metadata(groups), is_loading=True)
        loaded = dist_checkpointing.load(content, str(source))
    except TrainerError:
        raise
    # Pickle, zip, key and shape errors, and torch's own, which is no Exception.
    except (Exception, CheckpointException) as error:
        raise TrainerError(
            f"{source}, which {source.parent / TRACKER} names, cannot be loaded "
            f"({type(error).__name__}: {error}); write the number of an older complete checkpoint into the "
            "tracker, or move the directory away to start from random weights"
        ) from error
    _fill(state, loaded)


def tracked_iteration(directory: Path) -> int | None:
    """The iteration of the newest complete checkpoint; None when nothing was saved there.

    Raises:
        TrainerError: the tracker is there but holds no number.
    """
    tracker = directory / TRACKER
    try:
        text = tracker.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        return int(text)
    except ValueError:
        saved = sorted(path.name for path in directory.glob("iter_*"))
        raise TrainerError(
            f"{tracker} holds {text[:50]!r}, not the number of an iteration; "
            f"write that of the newest complete checkpoint into it (there: {', '.join(saved) or 'none'})"
        ) from None


def _make_room(directory: Path, iteration: int) -> bool:
    """Makes the directory of a checkpoint; false when it is there, complete."""
    if tracked_iteration(directory) == iteration:
        return False
    target = iteration_directory(directory, iteration)
    if target.exists():  # no tracker names it: a save that was cut off
        shutil.rmtree(target)
    target.mkdir(parents=True)
    return True


def _publish_tracker(directory: Path, iteration: int) -> None:
    sync_directory(iteration_directory(directory, iteration))
    sync_directory(directory)
    publish(directory / TRACKER, str(iteration))


def _remove_older(directory: Path, keep: int) -> None:
    """Removes all but the newest `keep` checkpoints; the tracked one is the newest."""
    tracked = tracked_iteration(directory)
    saved = sorted(path for path in directory.glob("iter_*") if path.name[5:].isdigit())
    complete = [path for path in saved if tracked is not None and int(path.name[5:]) <= tracked]
    for path in complete[:-keep]:
        shutil.rmtree(path)


def _fill(state: TrainingState, loaded: dict[str, Any]) -> None:
    for index, chunk in enumerate(state.model):
        chunk.module.load_state_dict(loaded[_chunk_name(state, index)])
    configured = [{name: group[name] for name in HYPERPARAMETERS} for group in state.optimizer.param_groups]
    state.optimizer.load_state_dict(loaded["optimizer"])
    for group, values in zip(state.optimizer.param_groups, configured, strict=True):
        group.update(values)
    state.iteration, state.consumed_samples = loaded["iteration"], loaded["consumed_samples"]
    state.spikes.load_state_dict(loaded["spikes"])
    state.scheduler.step(state.iteration)


def _sharded_state(state: TrainingState, metadata: dict[str, Any], is_loading: bool) -> dict[str, Any]:
    content = {
        _chunk_name(state, index): chunk.module.sharded_state_dict(metadata=metadata)
        for index, chunk in enumerate(state.model)
    }
    content["optimizer"] = state.optimizer.sharded_state_dict(
        content, is_loading=is_loading, metadata=metadata
    )
    return content


def _chunk_name(state: TrainingState, index: int) -> str:
    # Megatron-LM's names; what decides where a tensor lies in the checkpoint is its own, global name.
    return "model" if len(state.model) == 1 else f"model{index}"


def _metadata(groups: ProcessGroupCollection) -> dict[str, Any]:
    return {
        # The one sharding of optimizer state that loads at any TP, PP, VPP and DP.
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": groups.dp_cp,
    }


def _plain(metadata: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metadata.items() if name != "dp_cp_group"}


def _shape(model: ModelConfig) -> dict[str, Any]:
    """What must not change between saving and loading."""
    free = {"seq_length", "attention_dropout", "hidden_dropout", "init_method_std", "vocab_size"}
    return {name: value for name, value in dataclasses.asdict(model).items() if name not in free}


def _sample_order(config: TrainerConfig) -> dict[str, Any]:
    """What decides which samples an iteration reads: with another value, some would be read twice or never."""
    return {
        "global_batch_size": config.training.global_batch_size,
        "seed": config.training.seed,
        "seq_length": config.model.seq_length,
    }


def _check(source: Path, what: str, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    differences = [
        f"{name} = {wanted[name]!r}, there {value!r}"
        for name, value in saved.items()
        if name in wanted and wanted[name] != value
    ]
    if differences:
        raise TrainerError(f"{source} is of another {what}: {'; '.join(differences)}")
