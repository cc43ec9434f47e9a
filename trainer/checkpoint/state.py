"""Contents of a checkpoint: the tensors of model and optimizer, sharded by Core, and a few plain values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model

from trainer.checkpoint import optimizer_state
from trainer.checkpoint.unpickling import checked_extra_state
from trainer.checkpoint.writer import Bucket, not_finite
from trainer.contract.errors import NonFiniteError
from trainer.contract.files.checkpoint_files import CHECKPOINT_VERSION, TRAINER_MARK
from trainer.contract.optimizers.kind import AVERAGE_BYTES, Kind, Optimizer
from trainer.contract.wording import counted
from trainer.distributed.groups import this_rank
from trainer.lora.adapter import is_adapter
from trainer.optimizer import parameter_groups
from trainer.optimizer.build import PARTS, optimizers_of
from trainer.optimizer.weight_average import WeightAverage
from trainer.step import TrainingState

HYPERPARAMETERS = ("max_lr", "min_lr", *(key for parts in PARTS.values() for key in parts.GROUP_KEYS))
"""Keys of a parameter group that come from the configuration, if the group has them."""

PADDING = 4 * 2048
"""Upper bound of the padding between the copies of a weight and its state (bytes)."""

EXTRA_STATE = "_extra_state"
"""Suffix of the name of Transformer Engine's own values: the history of FP8 scales, empty without FP8."""


def sharding(groups: ProcessGroupCollection, *, adapters: bool = False) -> dict[str, Any]:
    """Options for Core's sharding of model and optimizer. With `adapters`, for checkpoints that contain only these."""
    return {
        # A stacked tensor has a part for each layer, but not every layer needs to have the same adapters.
        **({"non_homogeneous_layers": True} if adapters else {}),
        # The only sharding of optimizer state that loads at any TP, PP, VPP and DP.
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": groups.dp_cp,
    }


def sharded_weights(state: TrainingState, metadata: dict[str, Any]) -> dict[str, Any]:
    """The weights that checkpoints contain as Core's sharded tensors and objects, by chunk: all, or the adapters."""
    return _sharded(state, metadata, partial(_is_saved, state))


def sharded_base(state: TrainingState, metadata: dict[str, Any]) -> dict[str, Any]:
    """The weights that do not belong to adapters as Core's sharded tensors and objects, by chunk."""
    return _sharded(state, metadata, lambda name: not is_adapter(name))


def _sharded(
    state: TrainingState, metadata: dict[str, Any], is_part: Callable[[str], bool]
) -> dict[str, Any]:
    return {
        _chunk_name(state, index): {
            name: tensor
            for name, tensor in chunk.module.sharded_state_dict(metadata=metadata).items()
            if is_part(name)
        }
        for index, chunk in enumerate(state.model)
    }


def _is_saved(state: TrainingState, name: str) -> bool:
    return is_adapter(name) or not state.has_adapters


def sharded_optimizer(
    state: TrainingState,
    weights: dict[str, Any],
    metadata: dict[str, Any],
    average: WeightAverage | None,
    *,
    is_loading: bool,
) -> dict[str, Any]:
    """The optimizer as sharded tensors, with the `average` of its weights. `weights` are the weights of its model."""
    if (parts := _sliceable(state, metadata["distrib_optim_sharding_type"])) is not None:
        by_layer = state.is_partly_frozen
        return {"optimizer": optimizer_state.sharded_optimizer(parts, weights, average, by_layer=by_layer)}
    assert average is None  # Core's own code would leave it out
    content = state.optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=metadata)
    return {"optimizer": content}


def common_state(state: TrainingState, metadata: dict[str, Any]) -> dict[str, Any]:
    """The values that are the same on all ranks."""
    return {
        TRAINER_MARK: True,
        "content_metadata": {name: value for name, value in metadata.items() if name != "dp_cp_group"},
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": state.iteration,
        "consumed_samples": state.consumed_samples,
        "spikes": state.spikes.state_dict(),
        "best": state.best.state_dict(),
    }


def buffer_names(state: TrainingState, buckets: list[Bucket]) -> frozenset[str]:
    """Names of the tensors in `buckets` that are module buffers. They may contain infinities, for example in masks."""
    buffers = {buffer.data_ptr() for chunk in state.model for buffer in chunk.module.buffers()}
    return frozenset(
        item.index.fqn
        for _, _, (_, tensors) in buckets
        for item, tensor in tensors
        if tensor.data_ptr() in buffers
    )


def check_loaded(state: TrainingState, path: Path) -> None:
    """Check that the weights and the optimizer state that were loaded from `path` are finite.

    Raises:
        NonFiniteError: on all ranks, if any value is not finite.
    """
    bad = next((name for name, tensor in _trained(state) if not_finite(tensor)), None)
    raise_not_finite(
        bad,
        f"{path} contains numbers that are not finite, although its files are unchanged",
        f"Rename it, for example to {path.name}.bad, to resume from the one before it",
    )


def raise_not_finite(what: str | None, problem: str, consequence: str) -> None:
    """Raise NonFiniteError on all ranks if any rank passes `what`, the name of values that are not finite."""
    found: list[str | None] = [None] * torch.distributed.get_world_size()
    here = what and f"{this_rank()}: {what}"
    torch.distributed.all_gather_object(found, here)
    if named := [each for each in found if each]:
        others = f" (also on {counted(len(named) - 1, 'other rank')})" if len(named) > 1 else ""
        raise NonFiniteError(f"{problem}: {named[0]}{others}. {consequence}")


def _trained(state: TrainingState) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors on this rank that training changes, with their names."""
    for chunk in state.model:
        yield from chunk.named_parameters()
    for part in optimizers_of(state.optimizer):
        yield from (("the optimizer's fp32 weights", weight) for weight in part.get_parameters())
        for moments in part.optimizer.state.values():
            yield from ((f"the optimizer's {name}", m) for name, m in moments.items() if torch.is_tensor(m))


def staged_bytes(state: TrainingState, groups: ProcessGroupCollection, optimizer: Optimizer) -> int:
    """Approximate number of bytes that a rank copies for a save: its shares of weights, fp32 weights and moments."""
    parameters = [
        parameter
        for chunk in state.model
        for name, parameter in chunk.named_parameters()
        if _is_saved(state, name)
    ]
    of_state = max(optimizer.state_bytes(kind) for kind in get_args(Kind))
    of_state += 0 if state.average is None else AVERAGE_BYTES
    total, largest = 0.0, 0
    for parameter in parameters:
        ranks = (groups.dp_cp if getattr(parameter, "allreduce", True) else groups.expt_dp).size()
        weight = parameter.numel() * parameter.element_size()
        total += (weight + (of_state * parameter.numel() if parameter.requires_grad else 0)) / ranks
        if ranks > 1:  # weights are not split between ranks
            largest = max(largest, weight)
    return int(1.02 * total) + largest + PADDING * len(parameters)


@torch.no_grad()
def fill(state: TrainingState, loaded: dict[str, Any], *, weights_only: bool) -> None:
    """Fill `state` with loaded values. Learning rates, betas and epsilon keep their configured values."""
    _fill_weights(state, loaded, partial(_is_saved, state))
    if weights_only:
        state.optimizer.reload_model_params()
        return
    configured = [
        {name: group[name] for name in HYPERPARAMETERS if name in group}
        for group in state.optimizer.param_groups
    ]
    saved = optimizer_state.saved_parts(loaded["optimizer"])
    for part in saved:
        if part.get("grad_scaler") == {}:  # a fixed scale, which an adaptive one cannot load
            del part["grad_scaler"]
    sharding_type = saved[0].get("param_state_sharding_type") if saved else None
    if (parts := _sliceable(state, sharding_type)) is not None:
        optimizer_state.load_optimizer(parts, loaded["optimizer"])
    else:
        for part in saved:
            parameter_groups.copy_rates(part["optimizer"]["param_groups"], state.optimizer.param_groups)
        state.optimizer.load_state_dict(loaded["optimizer"])
    for group, values in zip(state.optimizer.param_groups, configured, strict=True):
        group.update(values)
    state.iteration, state.consumed_samples = loaded["iteration"], loaded["consumed_samples"]
    state.spikes.load_state_dict(loaded["spikes"])
    if "best" in loaded:  # not in checkpoints of 0.2.0
        state.best.load_state_dict(loaded["best"])
    state.scheduler.step(state.iteration)


def fill_base(state: TrainingState, loaded: dict[str, Any]) -> None:
    """Fill the weights that do not belong to adapters with loaded values."""
    with torch.no_grad():
        _fill_weights(state, loaded, lambda name: not is_adapter(name))


def _fill_weights(state: TrainingState, loaded: dict[str, Any], is_part: Callable[[str], bool]) -> None:
    """Fill the weights that `is_part` chooses by their names. `loaded` must have all of them and no others."""
    for index, chunk in enumerate(state.model):
        module = unwrap_model(chunk)  # the bf16 wrapper would not report missing names
        # Core leaves out a chunk of which a checkpoint of adapters has nothing.
        weights = {
            name: checked_extra_state(value) if EXTRA_STATE in name else value
            for name, value in loaded.get(_chunk_name(state, index), {}).items()
        }
        absent, unknown = module.load_state_dict(weights, strict=False)
        if absent := [name for name in absent if is_part(name) and EXTRA_STATE not in name] or unknown:
            raise KeyError(", ".join(absent))


def _sliceable(state: TrainingState, sharding_type: str | None) -> list[DistributedOptimizer] | None:
    """The parts of the optimizer if their state can be sharded and loaded in place; None if Core's code is needed."""
    in_place = sharding_type == optimizer_state.SHARDING_TYPE
    return optimizer_state.sliceable(state.optimizer) if in_place else None


def _chunk_name(state: TrainingState, index: int) -> str:
    # Megatron-LM's names. They do not affect where a tensor is stored, which depends on its own global name.
    return "model" if len(state.model) == 1 else f"model{index}"
