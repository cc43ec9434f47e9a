"""Runs one rank of a layout alone, as if the other ranks were there.

The rank does all of its own work in its own memory, and only the transfers take no time: its process groups are torch's
"fake" ones. The data that it would receive from other ranks in a collective is a copy of the data that it sends. For
experts, rank r sends what this rank does, but to as many places further as it is itself, so that this rank's experts
get the average number of tokens. Between pipeline stages, it receives random numbers. The computed values have no
meaning.

Megatron-LM's --fake-process-group also runs a single rank, and receives nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed
from torch.distributed import ProcessGroup, distributed_c10d

RECEIVED_STD = 0.01
"""Standard deviation of what a pipeline stage receives. Small enough for gradients; experts see different tokens."""


def connect(rank: int, world_size: int) -> None:
    """Create torch's default process group, in which this process is `rank`. Call `replace_collectives` before."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def replace_collectives() -> None:
    """Replace collectives of torch.distributed in this process. Call it before Megatron-Core is imported."""
    fills: dict[str, Callable[..., None]] = {
        "all_gather_into_tensor": gather,
        "all_gather": gather_list,
        "all_to_all_single": exchange,
        "reduce_scatter_tensor": scatter,
        "reduce_scatter": scatter_list,
        "irecv": receive,
        "recv": receive,
    }
    for name, fill in fills.items():
        replace(name, _then(getattr(distributed, name), fill))


def replace(name: str, function: Callable[..., Any]) -> None:
    """Replace a function of torch.distributed in this process."""
    for module in (distributed, distributed_c10d):
        setattr(module, name, function)


def _then(function: Callable[..., Any], fill: Callable[..., None]) -> Callable[..., Any]:
    """The fake collective, after which `fill` writes what other ranks would have sent."""

    def both(*arguments: Any, **options: Any) -> Any:
        work = function(*arguments, **options)
        fill(*arguments, **options)
        return work

    return both


def gather(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: ProcessGroup | None = None,
    *_: Any,
    **__: Any,
) -> None:
    """Receive copies of the input. If it is a part of the output, the other parts keep their parameters.

    Counts of tokens per expert are rotated by one rank's experts for each expert-parallel rank, to match `exchange`.
    """
    size, own = distributed.get_world_size(group), distributed.get_rank(group)
    if input_tensor.untyped_storage().data_ptr() == output_tensor.untyped_storage().data_ptr():
        return
    shift, together = 0, 1
    if input_tensor.dtype == torch.int64:
        from megatron.core import parallel_state

        expert_ranks = parallel_state.get_expert_model_parallel_world_size()
        shift, together = input_tensor.numel() // expert_ranks, size // expert_ranks
    for rank, part in enumerate(output_tensor.view(-1).chunk(size)):
        part.copy_(input_tensor.reshape(-1).roll((rank // together - own // together) * shift))


def gather_list(
    tensor_list: list[torch.Tensor],
    tensor: torch.Tensor,
    group: ProcessGroup | None = None,
    *_: Any,
    **__: Any,
) -> None:
    """Receive copies of the tensor."""
    for part in tensor_list:
        part.copy_(tensor)


def exchange(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
    *_: Any,
    **__: Any,
) -> None:
    """Receive from the rank r places further what this rank sends to the rank r places before, so that every part comes
    once.
    """
    size, own = distributed.get_world_size(group), distributed.get_rank(group)

    def parts(tensor: torch.Tensor, sizes: Sequence[int] | None) -> Sequence[torch.Tensor]:
        return tensor.chunk(size) if sizes is None else tensor.split([int(each) for each in sizes])

    sent, received = parts(input, input_split_sizes), parts(output, output_split_sizes)
    for rank, part in enumerate(received):
        part.copy_(sent[(2 * own - rank) % size])


def scatter(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any = distributed.ReduceOp.SUM,
    group: ProcessGroup | None = None,
    *_: Any,
    **__: Any,
) -> None:
    """Receive this rank's part of its own input, unless it is already there."""
    if output.untyped_storage().data_ptr() != input.untyped_storage().data_ptr():
        output.copy_(input.chunk(distributed.get_world_size(group))[distributed.get_rank(group)])


def scatter_list(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: Any = distributed.ReduceOp.SUM,
    group: ProcessGroup | None = None,
    *_: Any,
    **__: Any,
) -> None:
    """Receive this rank's part of its own input."""
    output.copy_(input_list[distributed.get_rank(group)])


def receive(tensor: torch.Tensor, *_: Any, **__: Any) -> None:
    """Receive random numbers."""
    tensor.detach().normal_(std=RECEIVED_STD) if tensor.is_floating_point() else tensor.zero_()
