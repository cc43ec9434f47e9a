"""The distributed optimizer's state as tensors of the model's shapes, without gathering it.

Each data-parallel rank owns one contiguous range of every flattened parameter's fp32 weight and moments.
Megatron-Core stores these in the parameter's shape, so that any layout can load them ("fully_reshardable"), and to
save them gathers all of them in the host memory of every data-parallel rank, while training stands still. But a
checkpoint may cut a tensor into any boxes, and a range of a flattened tensor is a few boxes: so each rank saves and
loads its own range, in place. What is stored is the same, and Core's own way loads it. (With one exception: where
a buffer has padding between buckets, as with embeddings that two pipeline stages share, Core 0.16.1 gathers the state
from the wrong places.)
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

SHARDING_TYPE = "fully_reshardable"
"""Core's name for the form that is stored."""

PREFIX = "optimizer.state"
MOMENTS = ("exp_avg", "exp_avg_sq")

Box = tuple[tuple[int, ...], tuple[int, ...], int]
"""Offsets and sizes of a part of a tensor, and where it begins in the flattened tensor."""


def sliceable(optimizer: MegatronOptimizer) -> DistributedOptimizer | None:
    """The one distributed optimizer that `optimizer` is, with all its state on its device; None when it is not so."""
    if isinstance(optimizer, ChainedOptimizer) and len(optimizer.chained_optimizers) == 1:
        [optimizer] = optimizer.chained_optimizers
    is_plain = type(optimizer) is DistributedOptimizer and not (
        optimizer.config.use_precision_aware_optimizer or optimizer.config.optimizer_cpu_offload
    )
    return optimizer if is_plain else None


def sharded_optimizer(optimizer: DistributedOptimizer, model: dict[str, Any]) -> dict[str, Any]:
    """The optimizer's part of a checkpoint, beside `model`, the model's part. Its tensors are the state itself.

    Loading it fills the state in place.
    """
    if not optimizer.optimizer.state:
        _make_moments(optimizer)
    return {
        **optimizer.state_dict(),
        "param_state": _parameter_state(optimizer, model),
        "param_state_sharding_type": SHARDING_TYPE,
    }


def _make_moments(optimizer: DistributedOptimizer) -> None:
    """What the first update would make: before a load, or when all steps so far overflowed."""
    optimizer.load_state_dict(optimizer.state_dict())
    for moments in optimizer.optimizer.state.values():
        for name in MOMENTS:
            moments[name].zero_()


def load_optimizer(optimizer: DistributedOptimizer, loaded: dict[str, Any]) -> None:
    """Takes over what is not in tensors: the groups, with their count of steps, and fp16's loss scale."""
    tensors = ("param_state", "param_state_sharding_type")
    optimizer.load_state_dict({name: value for name, value in loaded.items() if name not in tensors})


def _parameter_state(optimizer: DistributedOptimizer, model: dict[str, Any]) -> dict[int, Any]:
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
        instance = optimizer.distributed_optimizer_instance_id
        state[index] = {
            name: dict(
                enumerate(_pieces(name, tensors[name], own.start, own.end, stored_as[parameter], instance))
            )
            for name in ("param", *MOMENTS)
        }
    return state


def _pieces(
    name: str,
    values: torch.Tensor,
    start: int,
    stop: int,
    stored_as: ShardedTensor | ShardedTensorFactory,
    instance: int,
) -> Iterator[ShardedTensor]:
    """`values`, elements [start, stop) of the flattened parameter that is `stored_as`, as boxes of what is stored."""
    parameter = stored_as.data
    stored_as = dataclasses.replace(stored_as, key=f"{PREFIX}.{name}.{stored_as.key}")
    # A factory stores one parameter as several tensors: a gated MLP's first matrix as its two halves.
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
        axis_fragmentations=None,  # no regular grid
        prepend_axis_num=0,
        # Data-parallel ranks own different parts; beyond them, whoever has a copy of the weight has one of this.
        replica_id=(*part.replica_id[:2], instance),
    )


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Cuts elements [start, stop) of a flattened tensor of `shape` into boxes, in order; as few as row by row gives.

    That is: the end of a row, whole rows, and the beginning of a row; the ends are cut in the same way.
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
