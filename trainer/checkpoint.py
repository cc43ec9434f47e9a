"""Checkpoints in Megatron-LM's directory layout, loadable at another TP, PP, VPP or DP.

`iter_0000010/` holds one checkpoint (torch_dist); `latest_checkpointed_iteration.txt`, the tracker, names the
newest complete one. The tracker is published only when all of its checkpoint is on disk.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.process_groups_config import ProcessGroupCollection

from trainer.config import ModelConfig, TrainerConfig
from trainer.errors import TrainerError
from trainer.model import vocabulary_rows
from trainer.run_directory import publish, sync_directory
from trainer.step import TrainingState

TRACKER = "latest_checkpointed_iteration.txt"

CHECKPOINT_VERSION = 3.0
"""Megatron-LM's number for its parameter layout (QKV interleaved by group)."""


def save(state: TrainingState, directory: Path, config: TrainerConfig, groups: ProcessGroupCollection) -> None:
    """Saves the state of all ranks as the newest checkpoint in `directory`. Every rank calls this."""
    target = directory / f"iter_{state.iteration:07d}"
    if torch.distributed.get_rank() == 0:
        if tracked_iteration(directory) == state.iteration:
            is_new = False
        else:
            is_new = True
            shutil.rmtree(target, ignore_errors=True)  # the tracker does not name it: a save that was cut off
            target.mkdir(parents=True)
    else:
        is_new = None
    if not _from_rank_0(is_new):
        return
    for chunk in state.model:
        chunk.start_param_sync(force_sync=True)
    metadata = _metadata(groups)
    content = _sharded_state(state, metadata, is_loading=False)
    content |= {
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": state.iteration,
        "model_config": _shape(config.model),
    }
    dist_checkpointing.save(content, str(target), content_metadata=_plain(metadata))
    if torch.distributed.get_rank() == 0:
        sync_directory(target)
        sync_directory(directory)
        publish(directory / TRACKER, str(state.iteration))
    torch.distributed.barrier()


def load(state: TrainingState, directories: list[Path], config: TrainerConfig, groups: ProcessGroupCollection) -> None:
    """Loads the newest checkpoint of the first directory that has a tracker; keeps `state` when none has.

    Raises:
        TrainerError: there is a tracker, but its checkpoint cannot be loaded. A run that has saved once never
            starts again from random weights.
    """
    found = None
    if torch.distributed.get_rank() == 0:
        found = next(((d, i) for d in directories if (i := tracked_iteration(d)) is not None), None)
    found = _from_rank_0(found)
    if found is None:
        return
    directory, iteration = found
    source = directory / f"iter_{iteration:07d}"
    try:
        _load_from(source, state, config, groups)
    except TrainerError:
        raise
    except Exception as error:  # Core raises what it meets: pickle, zip, key and shape errors
        raise TrainerError(
            f"{directory / TRACKER} names iteration {iteration}, but {source} cannot be loaded "
            f"({type(error).__name__}: {error}); put the number of an older complete checkpoint into the tracker, "
            "or move the directory away to start from random weights"
        ) from error
    if state.iteration != iteration:
        raise TrainerError(f"{source} holds iteration {state.iteration}, not {iteration}")


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
        raise TrainerError(
            f"{tracker} holds {text[:50]!r}, not the number of an iteration; write that of the newest complete "
            f"checkpoint into it ({', '.join(sorted(p.name for p in directory.glob('iter_*'))) or 'there is none'})"
        ) from None


def _load_from(
    source: Path, state: TrainingState, config: TrainerConfig, groups: ProcessGroupCollection
) -> None:
    common = dist_checkpointing.load_common_state_dict(str(source))
    _check_shape(source, common.get("model_config", {}), _shape(config.model))
    loaded = dist_checkpointing.load(_sharded_state(state, _metadata(groups), is_loading=True), str(source))
    for index, chunk in enumerate(state.model):
        chunk.module.load_state_dict(loaded[_chunk_name(state, index)])
    state.optimizer.load_state_dict(loaded["optimizer"])
    state.scheduler.num_steps = 0
    state.scheduler.step(loaded["iteration"])
    state.iteration = loaded["iteration"]


def _sharded_state(state: TrainingState, metadata: dict[str, Any], is_loading: bool) -> dict[str, Any]:
    content = {
        _chunk_name(state, index): chunk.module.sharded_state_dict(metadata=metadata)
        for index, chunk in enumerate(state.model)
    }
    content["optimizer"] = state.optimizer.sharded_state_dict(content, is_loading=is_loading, metadata=metadata)
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
    shape = {name: value for name, value in dataclasses.asdict(model).items() if name not in free}
    shape["padded_vocab_size"] = vocabulary_rows(model)
    shape["ffn_hidden_size"] = model.ffn_hidden_size or 4 * model.hidden_size
    shape["num_query_groups"] = model.num_query_groups or model.num_attention_heads
    shape["kv_channels"] = model.kv_channels or model.hidden_size // model.num_attention_heads
    shape["max_position_embeddings"] = model.max_position_embeddings or model.seq_length
    return shape


def _check_shape(source: Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    differences = [
        f"model.{name} = {wanted[name]!r}, there {value!r}"
        for name, value in saved.items()
        if name in wanted and wanted[name] != value
    ]
    if differences:
        raise TrainerError(f"{source} is of another model: {'; '.join(differences)}")


def _from_rank_0(value: Any) -> Any:
    box = [value]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]
