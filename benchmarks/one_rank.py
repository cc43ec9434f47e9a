"""Runs rank 0 of a program alone, as if the other ranks were there.

    RANK=0 LOCAL_RANK=0 WORLD_SIZE=4 python -m benchmarks.one_rank MODULE [ARGUMENTS]

The rank does all of its own work in its own memory, and only the transfers take no time: its process groups are torch's
"fake" ones. What it would receive from other ranks is copied from what it sends. For experts, rank r sends what this
rank does, but to the rank r places further, so that this rank's experts get the average number of tokens. The computed
values have no meaning.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed import ProcessGroup, Store, distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainer.distributed import rendezvous

_last_sent: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}
"""The tensor of each shape and type that was sent last."""


def main() -> None:
    """Run the module in this process, with collectives that involve no other."""
    use_one_rank()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path.cwd()))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def use_one_rank() -> None:
    """Replace functions of torch.distributed in this process. Call it before Megatron-Core is imported."""
    connect, new_group = distributed.init_process_group, distributed.new_group

    def connect_to_nobody(*_: Any, store: Store | None = None, **__: Any) -> None:
        connect("fake", store=store or FakeStore(), rank=0, world_size=int(os.environ["WORLD_SIZE"]))

    def new_fake_group(*arguments: Any, **options: Any) -> Any:
        return new_group(*arguments, **(options | {"backend": None, "pg_options": None}))

    rendezvous.open_store = lambda *_, **__: distributed.HashStore()
    _replace("init_process_group", connect_to_nobody)
    _replace("new_group", new_fake_group)
    for name, fill in {
        "all_gather_into_tensor": gather,
        "all_gather": gather_list,
        "all_to_all_single": exchange,
        "reduce_scatter_tensor": scatter,
        "isend": send,
        "send": send,
        "irecv": receive,
        "recv": receive,
    }.items():
        _replace(name, _then(getattr(distributed, name), fill))
    from trainer.faults import stragglers

    stragglers.gather_places = lambda ranks, _: [
        stragglers.Place("one rank", rank, 0, (rank,), "") for rank in range(ranks.world_size)
    ]


def _replace(name: str, function: Callable[..., Any]) -> None:
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

    Counts of tokens per expert are rotated by one rank's experts for each rank, to match `exchange`.
    """
    size = distributed.get_world_size(group)
    if input_tensor.untyped_storage().data_ptr() == output_tensor.untyped_storage().data_ptr():
        return
    is_count_per_expert = input_tensor.dtype == torch.int64 and input_tensor.numel() % size == 0
    for rank, part in enumerate(output_tensor.view(-1).chunk(size)):
        shift = rank * input_tensor.numel() // size if is_count_per_expert else 0
        part.copy_(input_tensor.reshape(-1).roll(shift))


def gather_list(
    tensor_list: list[torch.Tensor],
    tensor: torch.Tensor,
    group: ProcessGroup | None = None,
    *_: Any,
    **__: Any,
) -> None:
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
    """Receive from rank r what this rank sends to rank -r, so that every part comes once."""
    size = distributed.get_world_size(group)

    def parts(tensor: torch.Tensor, sizes: Sequence[int] | None) -> Sequence[torch.Tensor]:
        return tensor.chunk(size) if sizes is None else tensor.split([int(each) for each in sizes])

    sent, received = parts(input, input_split_sizes), parts(output, output_split_sizes)
    for rank, part in enumerate(received):
        part.copy_(sent[-rank % size])


def scatter(output: torch.Tensor, input: torch.Tensor, *arguments: Any, **options: Any) -> None:
    """Receive this rank's part of its own input, unless it is already there."""
    if output.untyped_storage().data_ptr() != input.untyped_storage().data_ptr():
        output.copy_(input[: len(output)])


def send(tensor: torch.Tensor, *_: Any, **__: Any) -> None:
    _last_sent[tensor.shape, tensor.dtype] = tensor.detach()


def receive(tensor: torch.Tensor, *_: Any, **__: Any) -> None:
    """Receive the last tensor of this shape that was sent, or zeros."""
    tensor = tensor.detach()
    sent = _last_sent.get((tensor.shape, tensor.dtype))
    tensor.zero_() if sent is None else tensor.copy_(sent)


if __name__ == "__main__":
    main()
