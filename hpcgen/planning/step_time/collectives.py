"""Time of transfers between GPUs: collectives and sends, inside and between NVLink domains."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Literal, NamedTuple

from hpcgen.planning.step_time.machine import Constant, Machine
from hpcgen.planning.step_time.measurements import Measurements, Row
from trainer.contract.model.layout import Layout
from trainer.contract.record import record

NVLINK_STEP_S = 3.4e-6
NETWORK_STEP_S = 14e-6
START_S = 8.4e-6
"""Latencies of a ring's step with NVLink and between nodes, and of its start, as NCCL assumes them for rings with
protocol Simple (src/graph/tuning.cc)."""
RAMP_BYTES = 10e6
"""A collective of this size inside a domain reaches half of the bandwidth of large ones. On four H200, all-reduce had
314 GB/s at 64 MiB, 355 at 1 GiB and 362 at 4 GiB."""
ALL_TO_ALL_SHARE = Constant(
    0.75,
    "all-to-all at 75% of the bandwidth of other collectives",
    "guessed: its messages are smaller",
    by_tune=True,
)
ADDED_SHARE = Constant(
    0.15,
    "a transfer next to products lengthens them by 15% of its time",
    "guessed: NCCL's kernels use 20 of 132 SMs",
    by_tune=True,
)
MAX_TRANSFERS_PER_PRODUCT = 4
"""If more transfers than this were measured next to one product, both waited for the host that started them."""
Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "exchange"]


class Group(NamedTuple):
    """Ranks that exchange data."""

    size: int
    per_domain: int
    """Smallest number of them in one NVLink domain."""

    @property
    def num_domains(self) -> int:
        """Number of NVLink domains of the ranks."""
        return -(-self.size // self.per_domain)

    @property
    def crosses_network(self) -> bool:
        """True if NVLink does not connect all ranks."""
        return self.size > self.per_domain


@record
class Groups:
    """The groups of a rank, by parallel axis. Source of the order of ranks, in which tensor parallelism comes first:
    megatron/core/parallel_state.py, tp-cp-ep-dp-pp."""

    tensor: Group
    context: Group
    data: Group
    """Ranks that share gradients and optimizer state of weights outside experts, with those of context parallelism."""
    instances: Group
    """Ranks with the same shard of optimizer state: layout.num_distributed_optimizer_instances."""
    expert: Group
    expert_tensor: Group
    expert_data: Group
    pipeline: Group

    @classmethod
    def of(cls, layout: Layout, nvlink_devices: int) -> Groups:
        """The groups of a layout on NVLink domains of `nvlink_devices` GPUs."""
        tensor, context = layout.tensor_model_parallel_size, layout.context_parallel_size
        stage_ranks = layout.world_size // layout.pipeline_model_parallel_size
        instances = layout.num_distributed_optimizer_instances
        experts = layout.expert_tensor_parallel_size * layout.expert_model_parallel_size
        domain = min(nvlink_devices, layout.world_size)

        def group(size: int, stride: int) -> Group:
            return Group(size, max(1, math.gcd(size * stride, domain) // stride))

        data = stage_ranks // tensor // instances
        expert_data = max(1, (layout.expert_data_parallel_size or 1) // instances)
        return cls(
            tensor=group(tensor, 1),
            context=group(context, tensor),
            data=group(data, tensor),
            instances=group(instances, stage_ranks // instances),
            expert=group(layout.expert_model_parallel_size, layout.expert_tensor_parallel_size),
            expert_tensor=group(layout.expert_tensor_parallel_size, 1),
            expert_data=group(expert_data, experts),
            pipeline=group(layout.pipeline_model_parallel_size, stage_ranks),
        )


@record(eq=False)
class Links:
    """Transfers of a machine. Sizes are bytes of the complete tensor, as in NCCL's tests."""

    machine: Machine

    def all_gather(self, size: float, group: Group) -> float:
        """Seconds to gather `size` bytes, of which each rank has a part."""
        return self._ring("all_gather", size, group)

    def reduce_scatter(self, size: float, group: Group) -> float:
        """Seconds to sum the tensors of all ranks, each of `size` bytes, of which each rank keeps a part."""
        return self._ring("reduce_scatter", size, group)

    def all_reduce(self, size: float, group: Group, *, in_switches: bool = False) -> float:
        """Seconds to sum tensors of `size` bytes on all ranks. Switches with SHARP halve what the network carries."""
        if in_switches and group.crosses_network:
            return self._ring("reduce_scatter", size, group)
        return self._ring("all_reduce", 2 * size, group)

    def all_to_all(self, size: float, group: Group) -> float:
        """Seconds in which each rank sends `size` bytes, in equal parts to all ranks including itself."""
        if group.size == 1 or not size:
            return 0.0
        share = size / group.size
        near = self._inside("all_to_all", size, group.per_domain, share * (group.per_domain - 1))
        if not group.crosses_network:
            return near
        return max(near, self._between("all_to_all", size, group))

    def send(self, size: float, group: Group) -> float:
        """Seconds to send `size` bytes to the next rank of the group, in the slowest place of the group, while as many
        arrive."""
        if group.size == 1 or not size:
            return 0.0
        if group.crosses_network:
            return self._between("exchange", size, Group(2, 1))
        return self._inside("exchange", size, 2, size)

    def added(self, transfer_s: float, beside_s: float) -> float:
        """Seconds by which a transfer lengthens the computation of `beside_s` that it runs next to.

        Both are times alone. A transfer takes SMs and memory bandwidth from the computation, which waits for its end.
        """
        share = ADDED_SHARE.value
        if (shares := _added_shares(self.machine.measurements)) and transfer_s:
            share = _interpolated(shares, math.log(transfer_s))
        hidden_s = min(transfer_s, beside_s)
        return transfer_s - hidden_s + share * hidden_s

    def guesses(self, groups: Groups) -> list[Constant]:
        """The constants that transfers of these groups use and that were not measured."""
        used = [group for group in vars(groups).values() if group.size > 1]
        constants: list[Constant] = []
        if any(group.per_domain > 1 for group in used):
            constants += [self.machine.nvlink_bandwidth, *self._more_devices(groups)]
        crosses_network = any(group.crosses_network for group in used)
        if crosses_network:
            constants += [self.machine.network_bandwidth, *self._more_domains(used)]
        far, near = self._between_is_measured("all_to_all"), bool(self._curve("all_to_all", 2))
        if groups.expert.size > 1 and not (far if groups.expert.crosses_network else near):
            constants.append(ALL_TO_ALL_SHARE)
        if used and not _added_shares(self.machine.measurements):
            constants.append(ADDED_SHARE)
        elif crosses_network:
            meaning = "transfers between nodes slow down products as much as those inside do"
            constants.append(Constant(1.0, meaning, "measured inside a node"))
        return [constant for constant in constants if not constant.is_measured]

    def _more_devices(self, groups: Groups) -> Iterator[Constant]:
        """Yields the assumption that transfers among more GPUs of a domain than were measured are as efficient. Of
        those between domains, only an all-to-all is also a transfer inside them."""
        inside = [group for group in vars(groups).values() if not group.crosses_network]
        needed = max(group.per_domain for group in (*inside, groups.expert))
        measured = max((ranks for _, ranks in self._curves), default=needed)
        if measured < needed:
            meaning = f"collectives of {needed} GPUs inside a domain as efficient as those of {measured}"
            yield Constant(1.0, meaning, f"measured with {measured} GPUs", by_tune=True)

    def _more_domains(self, used: Sequence[Group]) -> Iterator[Constant]:
        """Yields the assumption that groups in more domains than were measured are as efficient."""
        needed = max(group.num_domains for group in used)
        curves = _far_curves(self.machine.cluster, *self._bandwidths)
        measured = max((group.num_domains for _, group in curves), default=needed)
        if measured < needed:
            meaning = f"collectives between {needed} nodes as efficient as those between {measured}"
            yield Constant(1.0, meaning, f"measured between {measured} nodes", by_tune=True)

    def _between_is_measured(self, collective: Collective) -> bool:
        return any(name == collective for name, _ in _far_curves(self.machine.cluster, *self._bandwidths))

    def _ring(self, collective: Collective, size: float, group: Group) -> float:
        """Seconds of a ring through which `size` bytes pass, less the part of a rank. In a ring between nodes, every
        rank of a domain sends over its own link."""
        if group.size == 1 or not size:
            return 0.0
        if not group.crosses_network:
            return self._inside(collective, size, group.size, size * (group.size - 1) / group.size)
        return self._between(collective, size, group)

    def _between(self, collective: Collective, size: float, group: Group) -> float:
        """Seconds of a transfer of `size` bytes between domains, as measured for the most similar group."""
        expected = _expected_between(collective, size, group, *self._bandwidths)
        if self.machine.cluster is None:
            return expected
        curve = _far_curve(self.machine.cluster, *self._bandwidths, collective, group)
        return _interpolated(curve, math.log(size)) * expected if curve else expected

    @property
    def _bandwidths(self) -> tuple[float, float]:
        return self.machine.network_bandwidth.value, self.machine.nvlink_bandwidth.value

    def _inside(self, collective: Collective, size: float, ranks: int, sent: float) -> float:
        """Seconds of a transfer of `size` bytes inside a domain, of which each rank sends `sent` bytes."""
        if curve := self._curve(collective, ranks):
            return _interpolated(curve, math.log(size)) * _expected(
                self.machine.nvlink_bandwidth.value, sent, ranks
            )
        slower = 1 + RAMP_BYTES / size
        if collective == "all_to_all":
            slower /= ALL_TO_ALL_SHARE.value
        return _expected(self.machine.nvlink_bandwidth.value, slower * sent, ranks)

    def _curve(self, collective: Collective, ranks: int) -> Curve:
        """Measured relative to expected times, for the number of ranks closest to `ranks`. Empty if not measured."""
        curves = self._curves
        measured = [number for name, number in curves if name == collective]
        if not measured:
            return []
        return curves[collective, min(measured, key=lambda number: abs(math.log(number / ranks)))]

    @property
    def _curves(self) -> dict[tuple[str, int], Curve]:
        return _measured_curves(self.machine.measurements, self.machine.nvlink_bandwidth.value)


@record(eq=False)
class NotedLinks(Links):
    """Links that note the transfers of a step."""

    noted: set[tuple[Collective, Group]]
    """Each kind of transfer, with the ranks that it is among."""

    def _inside(self, collective: Collective, size: float, ranks: int, sent: float) -> float:
        self.noted.add((collective, Group(ranks, ranks)))
        return super()._inside(collective, size, ranks, sent)

    def _between(self, collective: Collective, size: float, group: Group) -> float:
        self.noted.add((collective, group))
        return super()._between(collective, size, group)


Curve = list[tuple[float, float]]
"""Logarithms of sizes, and how much longer transfers of these sizes take than expected."""
HOST_BOUND = 1.4
"""Small transfers that take less than this times the fastest one waited for the host that started them."""


@functools.lru_cache(maxsize=16)
def _measured_curves(measurements: Measurements | None, bandwidth: float) -> dict[tuple[str, int], Curve]:
    """The curve of each collective and number of ranks."""
    measured: dict[tuple[str, int], list[Row]] = {}
    for row in measurements.collectives if measurements else ():
        if row.get("domains", 1) == 1:
            measured.setdefault((row["collective"], row["ranks"]), []).append(row)
    return {key: [_slower(row, bandwidth) for row in _of_the_gpu(rows)] for key, rows in measured.items()}


def _slower(row: Row, bandwidth: float) -> tuple[float, float]:
    """The logarithm of the size of a measured transfer, and its time relative to the expected one."""
    name, ranks = row["collective"], row["ranks"]
    size = _ring_bytes(row)
    sent = size if name == "exchange" else size * (ranks - 1) / ranks
    return math.log(size), row["us"] * 1e-6 / _expected(bandwidth, sent, ranks)


def _expected(bandwidth: float, sent: float, ranks: int) -> float:
    """Seconds in which each rank sends `sent` bytes inside a domain, if it used the bandwidth of large collectives."""
    return sent / bandwidth + START_S + (ranks - 1) * NVLINK_STEP_S


def _ring_bytes(row: Row) -> float:
    """Bytes that pass through a ring, which an all-reduce does twice."""
    return (2 if row["collective"] == "all_reduce" else 1) * float(row["bytes"])


def _expected_between(collective: str, size: float, group: Group, network: float, nvlink: float) -> float:
    """Seconds of a transfer between domains that uses the bandwidths of large collectives."""
    between = group.num_domains - 1
    latency = START_S + (group.size - 1 - between) * NVLINK_STEP_S + between * NETWORK_STEP_S
    if collective == "exchange":
        return size / network + NETWORK_STEP_S
    if collective == "all_to_all":
        far = size / group.size * (group.size - group.per_domain) / network
        return far / ALL_TO_ALL_SHARE.value + latency
    return size * (group.size - 1) / group.size / min(group.per_domain * network, nvlink) + latency


@functools.lru_cache(maxsize=1024)
def _far_curve(
    cluster: Measurements | None, network: float, nvlink: float, collective: str, group: Group
) -> Curve:
    """Measured relative to expected times between domains, for the most similar group. Empty if not measured."""
    curves = _far_curves(cluster, network, nvlink)
    measured = [other for name, other in curves if name == collective]
    if not measured:
        return []

    def distance(other: Group) -> float:
        by_domains = abs(math.log(other.num_domains / group.num_domains))
        return by_domains + abs(math.log(other.per_domain / group.per_domain))

    return curves[collective, min(measured, key=distance)]


@functools.lru_cache(maxsize=16)
def _far_curves(
    cluster: Measurements | None, network: float, nvlink: float
) -> dict[tuple[str, Group], Curve]:
    """The curve of each collective and each shape of a group between domains."""
    measured: dict[tuple[str, Group], list[Row]] = {}
    for row in cluster.collectives if cluster else ():
        if (domains := row.get("domains", 1)) > 1:
            group = Group(row["ranks"], row["ranks"] // domains)
            measured.setdefault((row["collective"], group), []).append(row)
    curves = {
        (name, group): [
            (
                math.log(_ring_bytes(row)),
                row["us"] * 1e-6 / _expected_between(name, _ring_bytes(row), group, network, nvlink),
            )
            for row in _of_the_gpu(rows)
        ]
        for (name, group), rows in measured.items()
    }
    return {key: curve for key, curve in curves.items() if curve}


@functools.lru_cache(maxsize=16)
def _added_shares(measurements: Measurements | None) -> Curve:
    """Logarithms of transfers' times alone, and the share of it by which they lengthened products."""
    found: dict[int, Curve] = {}
    for row in measurements.beside if measurements else ():
        transfers = row["product_beside_us"] / row["beside_us"]
        if transfers <= MAX_TRANSFERS_PER_PRODUCT:
            added_us = (row["product_beside_us"] - row["product_alone_us"]) / transfers
            point = math.log(row["alone_us"] * 1e-6), max(0.0, added_us / row["alone_us"])
            found.setdefault(row["bytes"], []).append(point)
    return sorted(
        (median(time for time, _ in points), median(share for _, share in points))
        for points in found.values()
    )


def _of_the_gpu(rows: list[Row]) -> list[Row]:
    """The rows of one collective that do not measure the host, by size. Empty if all do."""
    limit = HOST_BOUND * min(row["us"] for row in rows)
    small = max((row["bytes"] for row in rows if row["us"] <= limit), default=0)
    return sorted((row for row in rows if row["bytes"] > small), key=lambda row: row["bytes"])


def _interpolated(curve: Curve, at: float) -> float:
    """The value of a curve, which continues its ends."""
    index = bisect.bisect(curve, (at,))
    if index in (0, len(curve)):
        return curve[min(index, len(curve) - 1)][1]
    (left, before), (right, after) = curve[index - 1 : index + 1]
    return before + (after - before) * (at - left) / (right - left)
