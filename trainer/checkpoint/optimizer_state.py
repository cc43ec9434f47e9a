"""Saves and loads the distributed optimizer's state in the shapes of the parameters, without gathering it.

Each data-parallel rank owns one contiguous range of every flattened parameter's fp32 weight and moments. Megatron-Core
stores them in the parameter's shape, so that any layout can load them ("fully_reshardable"). To save them, it gathers
all of them in the host memory of every data-parallel rank while training waits.

Gathering is not necessary. A checkpoint may divide a tensor into any boxes, and a range of a flattened tensor consists
of a few boxes. So each rank saves and loads its own range in place. The stored data is the same, and Core's own code
can load it. There is one exception: if a buffer has padding between buckets, as with embeddings that two pipeline
stages share, Core 0.16.1 gathers the state from wrong positions.

Core stores a weight of all layers as one tensor. If some parameters are frozen, such a tensor of the state would have
holes, which torch.distributed.checkpoint refuses. Then each layer has a tensor of its own, with the name that Core uses
for layers of different shapes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from trainer.contract.files.tensor_names import AVERAGE, OPTIMIZER_STATE, has_all_layers, name_in_layer
from trainer.optimizer import parameter_groups
from trainer.optimizer.build import optimizers_of
from trainer.optimizer.weight_average import WeightAverage

SHARDING_TYPE = "fully_reshardable"
"""Core's name for the stored form."""

Box = tuple[tuple[int, ...], tuple[int, ...], int]
"""Offsets and sizes of a part of a tensor, and its start in the flattened tensor."""


def sliceable(optimizer: MegatronOptimizer) -> list[DistributedOptimizer] | None:
    """The distributed optimizers in `optimizer`; None for other kinds, and for offloaded or precision-aware state."""
    parts = list(optimizers_of(optimizer))
    are_plain = all(
        type(part) is DistributedOptimizer
        and not (part.config.use_precision_aware_optimizer or part.config.optimizer_cpu_offload)
        for part in parts
    )
    return parts if are_plain else None


def sharded_optimizer(
    parts: list[DistributedOptimizer],
    model: dict[str, Any],
    average: WeightAverage | None = None,
    *,
    by_layer: bool = False,
) -> dict[Any, Any]:
    """The optimizer's part of a checkpoint, with the `average` of its weights. `model` is the model's part. With
    `by_layer`, each layer has its own tensors.

    The tensors are not copies, so loading them changes the optimizer state in place.
    """
    if len(parts) > 1:
        # A part without parameters on this rank may not count steps.
        ChainedOptimizer(parts)._synchronize_steps()
    stored = [_sharded_part(part, model, average, by_layer=by_layer) for part in parts]
    return stored[0] if len(stored) == 1 else dict(enumerate(stored))


def _sharded_part(
    optimizer: DistributedOptimizer, model: dict[str, Any], average: WeightAverage | None, *, by_layer: bool
) -> dict[str, Any]:
    if not optimizer.optimizer.state:
        _make_moments(optimizer)
    return {
        **optimizer.state_dict(),
        "param_state": _parameter_state(optimizer, model, average, by_layer=by_layer),
        "param_state_sharding_type": SHARDING_TYPE,
    }


def saved_parts(loaded: dict[Any, Any]) -> list[dict[str, Any]]:
    """The state of each distributed optimizer that wrote a checkpoint, from the optimizer's part of the checkpoint. If
    expert parallelism has changed, the checkpoint may have one optimizer where the run has two, or the reverse.
    """
    return [part for part in (loaded, *loaded.values()) if isinstance(part, dict) and "optimizer" in part]


def _make_moments(optimizer: DistributedOptimizer) -> None:
    """Create the moments that the first update would create. Needed before a load, or if all steps overflowed."""
    optimizer.load_state_dict(optimizer.state_dict())
    for moments in optimizer.optimizer.state.values():
        for moment in filter(torch.is_tensor, moments.values()):
            moment.zero_()


def load_optimizer(parts: list[DistributedOptimizer], loaded: dict[Any, Any]) -> None:
    """Load the values that are not in sharded tensors: groups with their step counts, and fp16's loss scale."""
    saved = saved_parts(loaded)
    groups = [group for part in saved for group in part["optimizer"]["param_groups"]]
    for part in parts:
        content = {"optimizer": {"param_groups": parameter_groups.as_configured(groups, part.param_groups)}}
        if "grad_scaler" in saved[0]:
            content["grad_scaler"] = saved[0]["grad_scaler"]
        part.load_state_dict(content)


def _parameter_state(
    optimizer: DistributedOptimizer, model: dict[str, Any], average: WeightAverage | None, *, by_layer: bool
) -> dict[int, Any]:
    stored_as = {
        base.data: base
        for base in nested_values(model)
        if isinstance(base, ShardedTensor | ShardedTensorFactory)
    }
    owned = [
        (parameter, ranges["param"])
        for buffer in optimizer.gbuf_ranges
        for buckets in buffer.values()
        for bucket in buckets
        for parameter, ranges in bucket["param_map"].items()
    ]
    state: dict[int, Any] = {}
    for index, (parameter, own) in enumerate(owned):
        tensors = optimizer._get_main_param_and_optimizer_states(parameter)
        if average is not None:
            tensors |= {AVERAGE: average.of(tensors["param"])}
        instance = optimizer.distributed_optimizer_instance_id
        for name, tensor in tensors.items():
            if torch.is_tensor(tensor):
                pieces = _pieces(name, tensor, own.start, own.end, stored_as[parameter], instance)
                state.setdefault(index, {})[name] = dict(
                    enumerate(map(_of_layer, pieces) if by_layer else pieces)
                )
    return state


def _pieces(
    name: str,
    values: torch.Tensor,
    start: int,
    stop: int,
    stored_as: ShardedTensor | ShardedTensorFactory,
    instance: int,
) -> Iterator[ShardedTensor]:
    """Divide `values`, elements [start, stop) of a flattened parameter, into boxes of its tensors in `stored_as`."""
    parameter = stored_as.data
    stored_as = dataclasses.replace(stored_as, key=f"{OPTIMIZER_STATE}.{name}.{stored_as.key}")
    # A factory stores one parameter as several tensors, such as the two halves of a gated MLP's first matrix.
    is_factory = isinstance(stored_as, ShardedTensorFactory)
    for part in nested_values(stored_as.build()) if is_factory else [stored_as]:
        begin = part.data.storage_offset() - parameter.data.storage_offset()
        assert part.data.is_contiguous(), part
        assert part.data.untyped_storage().data_ptr() == parameter.data.untyped_storage().data_ptr(), part
        first, last = max(start, begin), min(stop, begin + part.data.numel())
        for offsets, sizes, at in boxes(part.local_shape, first - begin, last - begin):
            box = values.view(-1)[begin + at - start :][: math.prod(sizes)]
            yield _piece(part, offsets, sizes, box, instance)


def _piece(
    part: ShardedTensor, offsets: tuple[int, ...], sizes: tuple[int, ...], values: torch.Tensor, instance: int
) -> ShardedTensor:
    prepended = part.prepend_axis_num
    shape = (1,) * prepended + sizes
    return dataclasses.replace(
        part,
        data=values.view(shape),
        dtype=values.dtype,
        local_shape=shape,
        global_offset=tuple(map(sum, zip(part.global_offset, (0,) * prepended + offsets, strict=True))),
        axis_fragmentations=None,  # boxes do not form a regular grid
        prepend_axis_num=0,
        # Data-parallel ranks own different parts. Other replicas of the weight also replicate its state.
        replica_id=(*part.replica_id[:2], instance),
    )


def _of_layer(piece: ShardedTensor) -> ShardedTensor:
    """This piece in a tensor that has only its layer."""
    if not piece.global_shape or not has_all_layers(piece.key):
        return piece
    assert piece.data is not None
    layer = piece.global_offset[0]
    return dataclasses.replace(
        piece,
        key=name_in_layer(piece.key, layer),
        data=piece.data[0],
        local_shape=piece.local_shape[1:],
        global_shape=piece.global_shape[1:],
        global_offset=piece.global_offset[1:],
    )


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Divide elements [start, stop) of a flattened tensor of `shape` into a few boxes, in order.

    They are the end of a row, complete rows, and the beginning of a row. The two ends are divided recursively.
    """
    if start >= stop:
        return
    if len(shape) < 2:
        yield (start,) * len(shape), (stop - start,) * len(shape), start
        return
    row = math.prod(shape[1:])
    head = min(stop, -(-start // row) * row)
    tail = max(head, stop // row * row)
    yield from _in_row(shape, start, head, row)
    if head < tail:
        yield (head // row, *(0,) * (len(shape) - 1)), ((tail - head) // row, *shape[1:]), head
    yield from _in_row(shape, tail, stop, row)


def _in_row(shape: tuple[int, ...], start: int, stop: int, row: int) -> Iterator[Box]:
    index = start // row
    for offsets, sizes, at in boxes(shape[1:], start - index * row, stop - index * row):
        yield (index, *offsets), (1, *sizes), index * row + at
