"""Facts of a site that are valid but implausible, usually because of another unit: MiB for GiB, MB/s for GB/s.

Nothing here is refused, because new hardware can exceed every limit. Only `cluster check` shows it, because only the
administrator can correct it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

from hpcgen.config.cluster import ClusterConfig
from hpcgen.config.fabric import fabric_of
from hpcgen.config.known_gpus import KNOWN_GPUS, KnownGpu, gpu_called
from hpcgen.config.node_type import NodeType
from hpcgen.config.sbatch_values import other_reading
from hpcgen.config.variable_values import device_names, is_interface
from hpcgen.errors import Problem
from hpcgen.text import few
from trainer.contract.record import record


@record
class Span:
    """The plausible values of a fact, and the units that people mistake for its unit."""

    low: float
    high: float
    unit: str
    others: Mapping[str, float]
    """Another unit -> its size in `unit`."""

    def problem(self, path: str, value: float) -> Problem | None:
        """The problem of an implausible value."""
        if self.low <= value <= self.high:
            return None
        reason = f"is implausible in {self.unit} (usual are {self.low:,g} to {self.high:,g})"
        meant = {
            unit: value * size for unit, size in self.others.items() if self.low <= value * size <= self.high
        }
        if meant:
            unit, number = next(iter(meant.items()))
            return Problem(path, f"{reason}. It looks like {unit}", f"write {number:.6g}, if it is")
        return Problem(path, reason, "correct it, if it is not meant")


_GIB = {"MiB": 1 / 1024, "bytes": 1 / 1024**3, "KiB": 1 / 1024**2, "TiB": 1024}
_GB_S = {"MB/s": 1e-3, "TB/s": 1e3, "bytes/s": 1e-9}
_MB = {"GiB": 1024, "kB": 1 / 1024, "bytes": 1 / 1024**2, "TiB": 1024**2}
_GBIT_S = {"Mb/s": 1e-3, "bits/s": 1e-9}
_TFLOPS = {"PFLOP/s": 1e3, "GFLOP/s": 1e-3, "FLOP/s": 1e-12}
_SECONDS = {"milliseconds": 1e-3, "minutes": 60}
NODE_TYPE_SPANS = {
    "gpu_memory_gib": Span(4, 400, "GiB", _GIB),
    "gpu_memory_gb_s": Span(150, 30_000, "GB/s", _GB_S),
    "cpus_per_node": Span(1, 2048, "CPUs", {}),
    "nvlink.bandwidth_gb_s": Span(40, 10_000, "GB/s", _GB_S),
    "pci_link.speed_gt_s": Span(2.5, 128, "GT/s", {}),
    "health.memory_mb": Span(8_000, 32_000_000, "MB", _MB),
    "health.host_device_gb_s": Span(2, 1_000, "GB/s", _GB_S),
    "health.peer_gb_s": Span(4, 5_000, "GB/s", _GB_S),
    "health.ib_gdr_gbit_s": Span(8, 1_600, "Gb/s", _GBIT_S),
}
_PEAK = Span(1, 30_000, "TFLOP/s", _TFLOPS)
CLUSTER_SPANS = {
    "storage_write_gb_s": Span(0.02, 1_000, "GB/s", _GB_S),
    "startup_time_s": Span(10, 7_200, "seconds", _SECONDS),
    "gpu_idle_limit_s": Span(60, 86_400, "seconds", _SECONDS),
    "gpu_hours_between_failures": Span(500, 900_000, "GPU-hours", {}),
    "max_array_size": Span(2, 4_000_001, "tasks", {}),
}
_MOST_PER_GPU_HOUR = 200
_HARD_CURRENCIES = ("USD", "EUR", "GBP", "CHF", "CAD", "AUD")
_UNITS_PER_DOLLAR = 20_000
"""More than a dollar is worth in most other currencies."""
SHARED_DIRECTORIES = ("/home", "/nfs", "/lustre", "/gpfs", "/beegfs", "/shared", "/projects", "/project")
"""Usual mount points of shared file systems."""


_TOLERANCE = 0.06
_MEMORY_TOLERANCE = 0.12
"""GB against GiB, and what the driver keeps."""

LARGEST_DOMAIN = 72
"""GPUs that NVLink connects in a rack of GB200 or GB300 NVL72."""
_FAST_GPU_TFLOPS = 300
_SLOW_NIC_GBIT_S = 100


def node_type_doubts(node_type: NodeType) -> Iterator[Problem]:
    """Yields facts of a node type that are probably wrong."""
    for path, span in NODE_TYPE_SPANS.items():
        value = _value(node_type, path)
        if value is not None and (problem := span.problem(path, value)):
            yield problem
    yield from _peak_doubts(node_type)
    yield from _gpu_doubts(node_type)
    yield from _nic_doubts(node_type)
    yield from _domain_doubts(node_type)
    named = node_type.environment.get("NCCL_TOPO_FILE")
    if named and node_type.topology_file and named.value != node_type.topology_file:
        reason = f"is not the file that NCCL reads, NCCL_TOPO_FILE = {named.value}"
        yield Problem("topology_file", reason, "correct one of them")


def topology_file_doubt(node_type: NodeType, others: Mapping[str, NodeType]) -> Problem | None:
    """The problem of a topology file that belongs to another node type; None if none is known.

    `others` are node types by name, of which those with the same GPUs are of the same kind.
    """
    path = node_type.topology_file
    owners = {name: other for name, other in others.items() if path and other.topology_file == path}
    if not owners or any(_has_same_gpus(node_type, other) for other in owners.values()):
        return None
    name = min(owners)
    reason = f"is the topology file of node type {name}, whose GPUs or NICs differ"
    return Problem("topology_file", reason, "name the file of these nodes, or set it to null")


def _has_same_gpus(one: NodeType, other: NodeType) -> bool:
    if one.gpus and other.gpus and one.gpus != other.gpus:
        return False
    return (one.gpus_per_node, one.nics or other.nics) == (other.gpus_per_node, other.nics)


def unnamed_nics(node_type: NodeType, variables: Mapping[str, str]) -> Problem | None:
    """The problem of NICs that NCCL is not told to use; None if it is, or if nothing names them."""
    names = [nic.name for nic in node_type.nics]
    fabric = fabric_of(node_type)
    if fabric is None or fabric.own_network != "IB" or not names:
        return None
    if "NCCL_IB_HCA" in variables or "NCCL_IB_HCA" in node_type.environment:
        return None
    reason = "are not named in NCCL_IB_HCA, so NCCL uses all RDMA devices of a node, also those of a storage network"
    hint = f'set NCCL_IB_HCA to "={",".join(names)}" in the node type, if a node has others'
    return Problem("nics", reason, hint)


def cluster_doubts(cluster: ClusterConfig, node_type: NodeType) -> Iterator[Problem]:
    """Yields facts of a profile that are probably wrong."""
    for path, span in CLUSTER_SPANS.items():
        value = _value(cluster, path)
        if value is not None and (problem := span.problem(path, value)):
            yield problem
    yield from price_doubts(cluster)
    asked = cluster.gres.split(":")[1:-1]
    named, found = gpu_called(asked[0]) if asked else None, _gpu_of(node_type)
    if named and found and named.name.split()[0] != found.name.split()[0]:
        reason = (
            f"requests {asked[0]}, but gpu_model of node type {cluster.node_type} is {node_type.gpu_model}"
        )
        yield Problem("gres", reason, "use the type of slurm.conf (scontrol show node)")
    if "/" not in cluster.python and not re.match("python|pypy", cluster.python):
        reason = "is not the usual name of a Python interpreter"
        yield Problem("python", reason, "write python3, or the absolute path of an interpreter")
    yield from _scratch_doubts(cluster)
    yield from _rendezvous_doubts(cluster, node_type)
    for section, limits in (("partitions", cluster.partitions), ("qos", cluster.qos)):
        for name, limit in limits.items():
            if limit.max_time and (reading := other_reading(limit.max_time)):
                yield Problem(f"{section}.{name}.max_time", *reading)


def price_doubts(cluster: ClusterConfig) -> Iterator[Problem]:
    """Yields implausible prices of the profile and its partitions. A free partition has the price 0."""
    prices = {"price_per_gpu_hour": cluster.price_per_gpu_hour}
    for name, partition in cluster.partitions.items():
        prices[f"partitions.{name}.price_per_gpu_hour"] = partition.price_per_gpu_hour
    scale = 1 if cluster.currency in _HARD_CURRENCIES else _UNITS_PER_DOLLAR
    span = Span(0.01, scale * _MOST_PER_GPU_HOUR, f"{cluster.currency} per GPU-hour", {})
    yield from filter(None, (span.problem(path, price) for path, price in prices.items() if price))


def _rendezvous_doubts(cluster: ClusterConfig, node_type: NodeType) -> Iterator[Problem]:
    interface = cluster.rendezvous.interface if cluster.rendezvous else None
    fact = node_type.environment.get("NCCL_SOCKET_IFNAME")
    value = cluster.environment.get("NCCL_SOCKET_IFNAME", fact.value if fact else "")
    if interface and value.startswith("=") and interface not in device_names(value):
        reason = f"is not the interface of NCCL_SOCKET_IFNAME = {value}, so ranks may meet on another network"
        yield Problem(
            "rendezvous.interface", reason, "correct one of them, if both should be the same network"
        )


def _scratch_doubts(cluster: ClusterConfig) -> Iterator[Problem]:
    scratch = PurePosixPath(cluster.scratch)
    shared = {"code_dir": cluster.code_dir, "nccl_baseline": cluster.nccl_baseline}
    inside = [key for key, path in shared.items() if path and PurePosixPath(path).is_relative_to(scratch)]
    top = next((top for top in SHARED_DIRECTORIES if scratch.is_relative_to(top)), "")
    if inside or top:
        why = (
            f"contains {inside[0]}, which all nodes share"
            if inside
            else f"is below {top}, usually a shared file system"
        )
        reason = f"{why}. Caches of all nodes would be in one place"
        yield Problem("scratch", reason, "use a directory on a disk of each node, such as /tmp")


def _peak_doubts(node_type: NodeType) -> Iterator[Problem]:
    if node_type.gpus_per_node and not node_type.peak_tflops:
        hint = "set the dense peak of the data sheet, such as {bf16: 312}"
        yield Problem("peak_tflops", "is missing, so MFU is not reported", hint, is_missing=True)
    gpu = _gpu_of(node_type)
    for precision, peak in node_type.peak_tflops.items():
        path = f"peak_tflops.{precision}"
        if problem := _PEAK.problem(path, peak):
            yield problem
            continue
        dense = _dense_peaks(precision, gpu)
        if not dense or any(_is_near(peak, figure) for figure in dense):
            continue
        if any(_is_near(peak, 2 * figure) for figure in dense):
            of_gpu = f" of {gpu.name}" if gpu else ""
            reason = f"is the figure with sparsity{of_gpu}, so MFU would be half of the true one"
            yield Problem(path, reason, f"use the dense peak, {peak / 2:g}")
        elif gpu:
            reason = f"differs from the dense peak of {gpu.name}, {dense[0]:g} TFLOP/s"
            yield Problem(path, reason, "correct it, or correct gpu_model")


def _dense_peaks(precision: str, gpu: KnownGpu | None) -> list[float]:
    """Dense peaks of a known GPU, or of all known GPUs. Those with sparsity are twice as high."""
    key = "bf16" if precision == "fp16" else precision
    peaks = (getattr(each, key, None) for each in ([gpu] if gpu else KNOWN_GPUS))
    return [peak for peak in peaks if peak is not None]


def _is_near(value: float, figure: float) -> bool:
    return abs(value - figure) <= _TOLERANCE * figure


def _gpu_of(node_type: NodeType) -> KnownGpu | None:
    return gpu_called(node_type.gpu_model or "")


def _gpu_doubts(node_type: NodeType) -> Iterator[Problem]:
    memory, gpu = node_type.gpu_memory_gib, _gpu_of(node_type)
    if memory is None or NODE_TYPE_SPANS["gpu_memory_gib"].problem("", memory):
        return
    named = re.search(r"(\d+)\s*Gi?B", node_type.gpu_model or "")
    sizes = (float(named[1]),) if named else gpu.memory_gb if gpu else ()
    if sizes and not any(abs(memory - size) <= _MEMORY_TOLERANCE * size for size in sizes):
        reason = (
            f"does not fit gpu_model = {node_type.gpu_model} ({few([f'{size:g}' for size in sizes], 4)} GB)"
        )
        yield Problem("gpu_memory_gib", reason, "correct one of them (nvidia-smi --query-gpu=memory.total)")


def _nic_doubts(node_type: NodeType) -> Iterator[Problem]:
    fabric = fabric_of(node_type)
    rates = fabric.rates_gbit_s if fabric else ()
    is_rdma = fabric is not None and fabric.device_class != "net"
    if node_type.device == "cuda" and is_rdma and not node_type.nics and not node_type.nics_per_node:
        reason = "is missing, so node-health and the check before a job find no missing or slow NIC"
        hint = f"count the NICs of a node for fabric {node_type.fabric}, or list them in nics"
        yield Problem("nics_per_node", reason, hint, is_missing=True)
    is_fast = max(node_type.peak_tflops.values(), default=0) >= _FAST_GPU_TFLOPS
    for index, nic in enumerate(node_type.nics):
        path, rate = f"nics[{index}]", nic.rate_gbit_s
        if fabric and is_rdma and is_interface(nic.name) and not fabric.names(nic.name):
            reason = "is the name of a network interface, so node-health would not find the RDMA device"
            yield Problem(f"{path}.name", reason, "use the name that ibv_devices prints, such as mlx5_0")
        if rates and rate not in rates:
            usual = ", ".join(f"{each:g}" for each in rates)
            meant = next(
                (each for each in rates if rate in (each / 8, each / 10, each * 1000, each / 1000)), None
            )
            hint = f"write {meant:g}, if it is meant" if meant else "correct it"
            yield Problem(f"{path}.rate_gbit_s", f"is no rate of {node_type.fabric} in Gb/s ({usual})", hint)
        elif is_rdma and is_fast and rate < _SLOW_NIC_GBIT_S:
            reason = "is slow for GPUs of this speed. 25 and 50 look like GB/s (1 GB/s is 8 Gb/s)"
            yield Problem(f"{path}.rate_gbit_s", reason, "write the rate in Gb/s")
        else:
            continue
        return  # the other NICs usually have the same mistake


def _domain_doubts(node_type: NodeType) -> Iterator[Problem]:
    nodes = node_type.nvlink.domain_nodes if node_type.nvlink else 1
    gpus = nodes * node_type.gpus_per_node
    if nodes > 1 and gpus > LARGEST_DOMAIN:
        reason = f"makes a domain of {gpus} GPUs, but the largest that are known have {LARGEST_DOMAIN}"
        hint = f"count nodes, not GPUs: write {nodes // node_type.gpus_per_node}, if {nodes} is the number of GPUs"
        yield Problem("nvlink.domain_nodes", reason, hint)


def _value(config: object, path: str) -> float | None:
    for name in path.split("."):
        config = getattr(config, name, None)
    return config if isinstance(config, int | float) else None
