"""Transfers between GPUs, inside NVLink domains and between them, alone or next to matrix products.

`bytes` are those of the complete tensor: what an all-gather returns, and what the other collectives take on each rank.
A `send_recv` goes from one rank to another. An `exchange` is one in each direction at once. Next to products, both are
slower. The `ranks` of a row are in so many `domains`, equally many in each. As in training, all groups of this shape
that the job has transfer at the same time.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed
from torch.distributed import ProcessGroup

from trainer.contract.calibration import Job
from trainer.health.fabric import Fabric

SIDE = 8192
"""m, n and k of the products next to transfers."""
CHUNK_S = 0.02
CHUNKS = 5
BESIDE_S = 0.1
WARM_CALLS = 3
PAIRWISE = ("send_recv", "exchange")
IN_A_RING = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")

Transfer = Callable[[], object]


def groups_of(ranks: int, domains: int, domain_size: int, world_size: int) -> list[list[int]]:
    """Groups of `ranks` ranks in `domains` domains of `domain_size`, as many as there are.

    The list is empty if the world is too small. Each group has consecutive ranks in each of its domains.
    """
    near = ranks // domains
    if near * domains != ranks or near > domain_size:
        return []
    found = []
    for first in range(0, world_size // domain_size - domains + 1, domains):
        for start in range(0, domain_size - near + 1, near):
            places = [(first + domain) * domain_size + start for domain in range(domains)]
            found.append([rank for place in places for rank in range(place, place + near)])
    return found


class Transfers:
    """The groups of a job, between which transfers are measured."""

    def __init__(self, fabric: Fabric, domain_size: int) -> None:
        self._world = fabric.world()
        self._device = fabric.device.type
        self._domain_size = min(domain_size, self._world.size())
        self._groups: dict[tuple[int, int], tuple[ProcessGroup | None, ProcessGroup | None]] = {}
        self._product: Transfer | None = None

    def measured(self, job: Job) -> dict[str, Any] | None:
        """The row of a job with its results. All ranks call this together; ranks outside all groups get None.

        Rank 0 is in a group, unless the job has too few ranks. Then no rank gets a row.
        """
        row = job.row
        group, everyone = self._group(row["ranks"], row.get("domains", 1))
        found = None
        if group is not None and everyone is not None:
            start = transfer(row["collective"], row["bytes"], group, self._device)
            if job.section == "collectives":
                found = row | {"us": alone(start, everyone, self._device) * 1e6}
            else:
                self._product = self._product or matrix_product(self._device)
                found = row | beside(start, self._product, everyone)
        distributed.barrier()
        return found

    def _group(self, ranks: int, domains: int) -> tuple[ProcessGroup | None, ProcessGroup | None]:
        """This rank's group of a shape, and the ranks of all groups of the shape. None on the other ranks."""
        if (ranks, domains) not in self._groups:
            rank, own = self._world.rank(), None
            shapes = groups_of(ranks, domains, self._domain_size, self._world.size())
            for members in shapes:
                made = distributed.new_group(members)
                own = made if rank in members else own
            everyone = (
                distributed.new_group(sorted(rank for members in shapes for rank in members))
                if shapes
                else None
            )
            self._groups[ranks, domains] = own, everyone if own is not None else None
        return self._groups[ranks, domains]


def transfer(collective: str, size: int, group: ProcessGroup, device: str) -> Transfer:
    """Return a function that starts a transfer of `size` bytes."""
    ranks, rank = group.size(), group.rank()
    part = torch.empty(max(1, size // 2 // ranks), device=device, dtype=torch.bfloat16)
    whole = torch.randn(ranks * len(part), device=device, dtype=torch.bfloat16)
    other = torch.empty_like(whole) if collective in ("all_to_all", *PAIRWISE) else part
    if collective == "all_gather":
        return lambda: distributed.all_gather_into_tensor(whole, part, group)
    if collective == "reduce_scatter":
        return lambda: distributed.reduce_scatter_tensor(part, whole, group=group)
    if collective == "all_reduce":
        return lambda: distributed.all_reduce(whole, group=group)
    if collective == "all_to_all":
        return lambda: distributed.all_to_all_single(other, whole, group=group)
    peer = distributed.get_global_rank(group, 1 - rank)
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
        return slowest(statistics.median(clocked(start) for _ in range(CHUNKS)), group, device)
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
