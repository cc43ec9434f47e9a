"""Time of transfers between GPUs: collectives and sends, inside and between NVLink domains."""

from __future__ import annotations

import math

from hpcgen.planning.step_time.machine import Constant, Machine
from trainer.contract.model.layout import Layout
from trainer.contract.record import record

NVLINK_STEP_S = 3.4e-6
NETWORK_STEP_S = 14e-6
START_S = 8.4e-6
"""Latencies of a ring's step with NVLink and between nodes, and of its start, as NCCL assumes them for rings with
protocol Simple (src/graph/tuning.cc)."""
ALL_TO_ALL_SHARE = Constant(
    0.75, "all-to-all at 75% of the bandwidth of other collectives", "guessed: its messages are smaller"
)
RAMP_BYTES = 10e6
"""A collective of this size inside a domain reaches half of the bandwidth of large ones. On four H200, all-reduce had
314 GB/s at 64 MiB, 355 at 1 GiB and 362 at 4 GiB."""
SLOWDOWN = Constant(
    1.15, "products are 15% slower beside transfers", "guessed: NCCL's kernels use 20 of 132 SMs"
)


@record
class Group:
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
        return self._ring(size, group)

    def reduce_scatter(self, size: float, group: Group) -> float:
        """Seconds to sum the tensors of all ranks, each of `size` bytes, of which each rank keeps a part."""
        return self._ring(size, group)

    def all_reduce(self, size: float, group: Group, *, in_switches: bool = False) -> float:
        """Seconds to sum tensors of `size` bytes on all ranks. Switches with SHARP halve what the network carries."""
        return self._ring(size, group) * (1 if in_switches and group.crosses_network else 2)

    def all_to_all(self, size: float, group: Group) -> float:
        """Seconds in which each rank sends `size` bytes, in equal parts to all ranks including itself."""
        if group.size == 1 or not size:
            return 0.0
        near = (group.per_domain - 1) / group.size * size / self.machine.nvlink_bandwidth.value
        far = (group.size - group.per_domain) / group.size * size / self.machine.network_bandwidth.value
        return max(near, far) / ALL_TO_ALL_SHARE.value + self._latency(group)

    def send(self, size: float, group: Group) -> float:
        """Seconds to send `size` bytes to the next rank of the group, in the slowest place of the group."""
        if group.size == 1 or not size:
            return 0.0
        if group.crosses_network:
            return size / self.machine.network_bandwidth.value + NETWORK_STEP_S
        return size / self.machine.nvlink_bandwidth.value + NVLINK_STEP_S

    def added(self, transfer_s: float, beside_s: float) -> float:
        """Seconds by which a transfer lengthens the computation of `beside_s` that it runs beside.

        Both are times alone. The computation is slower while the transfer lasts.
        """
        if transfer_s <= beside_s * SLOWDOWN.value:
            return transfer_s * (1 - 1 / SLOWDOWN.value)
        return transfer_s - beside_s

    def guesses(self, groups: Groups) -> list[Constant]:
        """The constants that transfers of these groups use and that were not measured."""
        used = [group for group in vars(groups).values() if group.size > 1]
        constants = []
        if any(group.per_domain > 1 for group in used):
            constants.append(self.machine.nvlink_bandwidth)
        if any(group.crosses_network for group in used):
            constants.append(self.machine.network_bandwidth)
        if groups.expert.size > 1:
            constants.append(ALL_TO_ALL_SHARE)
        if used:
            constants.append(SLOWDOWN)
        return [constant for constant in constants if not constant.is_measured]

    def _ring(self, size: float, group: Group) -> float:
        """Seconds of a ring that passes every byte once, over the links of all ranks of a domain."""
        if group.size == 1 or not size:
            return 0.0
        bandwidth = self.machine.nvlink_bandwidth.value
        if group.crosses_network:
            bandwidth = min(bandwidth, group.per_domain * self.machine.network_bandwidth.value)
        else:
            bandwidth *= size / (size + RAMP_BYTES)
        return size * (group.size - 1) / group.size / bandwidth + self._latency(group)

    def _latency(self, group: Group) -> float:
        between = group.num_domains - 1
        inside = group.size - 1 - between
        return START_S + inside * NVLINK_STEP_S + between * NETWORK_STEP_S
