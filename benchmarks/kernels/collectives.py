"""`python -m benchmarks.kernels.collectives ROWS`, one process per rank: transfers between the GPUs of this machine.

`bytes` are those of the complete tensor: what an all-gather returns, and what the other collectives take on each rank.
A `send_recv` goes from one rank to another. An `exchange` is one in each direction at once. Some transfers also run
next to matrix products, and both are slower then.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed import ProcessGroup

KIB = 2**10
SIZES = tuple(KIB * size for size in (64, 256, 2**10, 2**12, 2**14, 2**16, 2**18, 2**20, 2**21))
BESIDE = tuple(KIB * size for size in (2**16, 2**18, 2**20))
TINY = (4 * KIB,)
"""Sizes with which CPUs try this."""
SIDE = 8192
"""m, n and k of the products next to transfers."""
CHUNK_S = 0.02
CHUNKS = 5
BESIDE_S = 0.1
WARM_CALLS = 3
PAIRWISE = ("send_recv", "exchange")
IN_A_RING = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")

Transfer = Callable[[], object]


def main() -> None:
    """Measure each collective among the first 2 ranks, the first 4, and so on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    rank, world_size, device = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), arguments.device
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        distributed.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    else:
        distributed.init_process_group("gloo")
    ranks = 2
    with arguments.rows.open("a") as rows:
        while ranks <= world_size:
            group = distributed.new_group(list(range(ranks)))
            if rank < ranks:
                for row in measured(group, device):
                    if rank == 0:
                        rows.write(json.dumps(row) + "\n")
                        rows.flush()
            distributed.barrier()
            ranks *= 2
    distributed.destroy_process_group()


def measured(group: ProcessGroup, device: str) -> Any:
    """Rows of this group. All its ranks iterate together."""
    ranks = group.size()
    for collective in (*IN_A_RING, *PAIRWISE * (ranks == 2)):
        for size in SIZES if device == "cuda" else TINY:
            us = alone(transfer(collective, size, group, device), group, device) * 1e6
            yield {
                "section": "collectives",
                "collective": collective,
                "ranks": ranks,
                "bytes": size,
                "us": us,
            }
    if device == "cuda":
        product = matrix_product(device)
        for collective in ("all_gather", "reduce_scatter", "all_to_all", *PAIRWISE[:1] * (ranks == 2)):
            for size in BESIDE:
                times = beside(transfer(collective, size, group, device), product, group)
                yield {"section": "beside", "collective": collective, "ranks": ranks, "bytes": size} | times


def transfer(collective: str, size: int, group: ProcessGroup, device: str) -> Transfer:
    """Return a function that starts a transfer of `size` bytes."""
    ranks, rank = group.size(), group.rank()
    whole = torch.randn(size // 2, device=device, dtype=torch.bfloat16)
    part = torch.empty(size // 2 // ranks, device=device, dtype=torch.bfloat16)
    other = torch.empty_like(whole) if collective in ("all_to_all", *PAIRWISE) else part
    if collective == "all_gather":
        return lambda: distributed.all_gather_into_tensor(whole, part, group)
    if collective == "reduce_scatter":
        return lambda: distributed.reduce_scatter_tensor(part, whole, group=group)
    if collective == "all_reduce":
        return lambda: distributed.all_reduce(whole, group=group)
    if collective == "all_to_all":
        return lambda: distributed.all_to_all_single(other, whole, group=group)
    peer = 1 - rank
    send, receive = (
        distributed.P2POp(distributed.isend, whole, peer, group),
        distributed.P2POp(distributed.irecv, other, peer, group),
    )
    operations = [send, receive] if collective == "exchange" else [send if rank == 0 else receive]

    def start() -> None:
        for work in distributed.batch_isend_irecv(operations):
            work.wait()

    return start


def matrix_product(device: str) -> Transfer:
    """Return a function that starts a long matrix product."""
    a, b = (torch.randn(SIDE, SIDE, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def alone(start: Transfer, group: ProcessGroup, device: str) -> float:
    """Median seconds of a transfer, or a product, that runs again and again. The slowest rank counts."""
    for _ in range(WARM_CALLS):
        start()
    if device == "cpu":
        return slowest(clocked(start), group, device)
    once = slowest(elapsed(start, 3), group, device)
    number = max(1, round(CHUNK_S / once))
    times = [elapsed(start, number) for _ in range(CHUNKS)]
    return slowest(statistics.median(times), group, device)


def clocked(start: Transfer) -> float:
    """Seconds of one call on a CPU."""
    begin = time.perf_counter()
    start()
    return time.perf_counter() - begin


def elapsed(start: Transfer, number: int) -> float:
    """Mean seconds of `number` calls on the GPU."""
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    first.record()
    for _ in range(number):
        start()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 1e3 / number


def slowest(seconds: float, group: ProcessGroup, device: str) -> float:
    """The largest value of all ranks of the group."""
    value = torch.tensor([seconds], device=device, dtype=torch.float64)
    distributed.all_reduce(value, distributed.ReduceOp.MAX, group)
    return float(value)


def beside(start: Transfer, product: Transfer, group: ProcessGroup) -> dict[str, float]:
    """Microseconds of a transfer and of a product: each alone, and while the other one runs.

    The time of the transfer includes its wait until a product leaves it SMs. Products are slower during this time, by
    as much as the transfer delays all of them.
    """
    transfer_s, product_s = alone(start, group, "cuda"), alone(product, group, "cuda")
    products = math.ceil(1.5 * transfer_s / product_s)
    number = max(4, round(BESIDE_S / (products * product_s)))
    alone_s, delay_s, beside_s = [], [], []
    for _ in range(CHUNKS):  # alternating, because clocks change with the power that the last seconds took
        alone_s.append(elapsed(product, products * number))
        distributed.barrier(group)
        times, total_s = overlapped(start, product, products, number)
        delay_s.append(total_s / number - products * alone_s[-1])
        beside_s.append(times[0])
    alone_us, delay_us, beside_us = (
        slowest(statistics.median(each), group, "cuda") * 1e6 for each in (alone_s, delay_s, beside_s)
    )
    return {
        "alone_us": transfer_s * 1e6,
        "beside_us": beside_us,
        "product_alone_us": alone_us,
        "product_beside_us": alone_us * beside_us / max(beside_us - delay_us, beside_us / 10),
    }


def overlapped(start: Transfer, product: Transfer, products: int, number: int) -> tuple[list[float], float]:
    """Seconds of each of `number` transfers, of which each starts with `products` products, and of all products."""
    stream = torch.cuda.Stream()
    bounds = [torch.cuda.Event(enable_timing=True) for _ in range(2 * number + 2)]
    torch.cuda.synchronize()
    product()  # so that the host has queued a transfer before the GPU comes to it
    bounds[-2].record()
    stream.wait_stream(torch.cuda.current_stream())
    for index in range(number):
        with torch.cuda.stream(stream):
            bounds[2 * index].record()
            start()
            bounds[2 * index + 1].record()
        for _ in range(products):
            product()
    bounds[-1].record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) / 1e3 for a, b in zip(bounds[0:-2:2], bounds[1:-2:2], strict=True)]
    return times, bounds[-2].elapsed_time(bounds[-1]) / 1e3


if __name__ == "__main__":
    main()
