"""Facts about a kind of node: a file of topologies/, the same on every cluster that has such nodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from hpcgen.config.container import MountPath, Runtime
from hpcgen.config.fields import EnvironmentName, Mask, Name, Text
from trainer.contract.config import FORBID_UNKNOWN_KEYS, Count, Fraction, NonNegative, PositiveFloat

GpuStage = Literal["train", "nccl-test", "node-health"]
"""The stages that use GPUs."""

BusId = Annotated[
    str, Text(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", 'a PCI address such as "0001:00:00.0"')
]
CpuList = Annotated[str, Text(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*", 'a list of CPUs such as "0-47"')]
DeviceName = Annotated[str, Text(r"[A-Za-z0-9_]{1,63}", "the name of a device such as mlx5_ib0")]
TorchRange = Annotated[str, Text(r"(<|>=)\d+\.\d+", 'a range of PyTorch versions: "<2.9" or ">=2.9"')]


@dataclass(frozen=True, kw_only=True)
class Variable:
    """One environment variable that jobs on these nodes need."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_UNKNOWN_KEYS

    value: str
    """The value; a variable cannot be unset, leave it out instead."""
    why: str
    """What it does and why this value, for the person who reads the script."""
    source: str
    """Where the fact comes from."""
    stages: tuple[GpuStage, ...] = ()
    """Stages it is for; empty means every stage that uses GPUs."""
    runtimes: tuple[Runtime, ...] = ()
    """Container runtimes it is for; empty means all."""
    torch: TorchRange | None = None
    """PyTorch versions it is for; null means all. Where the version is not known, it is set."""


@dataclass(frozen=True, kw_only=True)
class Processor:
    """The CPU, as CPUID names it: NCCL chooses its bandwidth tables by these."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_UNKNOWN_KEYS

    arch: Literal["x86_64", "arm64"]
    """Instruction set."""
    vendor: Literal["GenuineIntel", "AuthenticAMD", "ARM"]
    """Vendor string."""
    family: NonNegative
    """Family, in decimal."""
    model: NonNegative
    """Model, in decimal."""


@dataclass(frozen=True, kw_only=True)
class NumaNode:
    """One NUMA node; its number is its place in the list."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_UNKNOWN_KEYS

    cpus: CpuList
    """Its CPUs: "0-47"."""


@dataclass(frozen=True, kw_only=True)
class PciLink:
    """What each GPU, NIC and bridge is attached with."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_UNKNOWN_KEYS

    speed_gt_s: PositiveFloat
    """Transfers of one lane (GT/s): 16 is PCIe 4.0, 32 is PCIe 5.0."""
    width: Count
    """Lanes."""


@dataclass(frozen=True, kw_only=True)
class NvLink:
    """The network between the GPUs of one node."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_UNKNOWN_KEYS

    links: Count
    """NVLinks of one GPU."""
    bandwidth_gb_s: PositiveFloat
    """Bandwidth of one GPU over all its links, both directions together (GB/s)."""
    switches: NonNegative
    """NVSwitches of one node; 0 means GPUs are wired to one another."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU; its place in the list is its number when CUDA_DEVICE_ORDER is PCI_BUS_ID."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_UNKNOWN_KEYS

    bus_id: BusId
    """PCI address."""
    numa: NonNegative
    """NUMA node."""
    bridge: BusId | None = None
    """PCI bridge above it in the topology file; null means that it hangs from the CPU."""


@dataclass(frozen=True, kw_only=True)
class Nic:
    """One network adapter for traffic between GPUs of different nodes."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_UNKNOWN_KEYS

    name: DeviceName
    """Name of its RDMA device: mlx5_ib0."""
    bus_id: BusId
    """PCI address."""
    numa: NonNegative
    """NUMA node."""
    bridge: BusId | None = None
    """PCI bridge above it in the topology file; null means that it hangs from the CPU."""
    rate_gbit_s: PositiveFloat
    """Line rate (Gb/s)."""


@dataclass(frozen=True, kw_only=True)
class AllReduceThreshold:
    """Bus bandwidth of all_reduce_perf that a healthy allocation reaches under these conditions."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_UNKNOWN_KEYS

    min_nodes: Count
    """Smallest allocation it is for."""
    max_nodes: Count | None = None
    """Largest allocation it is for; null means no limit."""
    nvls: bool
    """Whether NCCL used NVLink SHARP."""
    collnet: bool
    """Whether NCCL used CollNet, that is SHARP in the InfiniBand switches; it says nothing about one node."""
    message_gib: PositiveFloat
    """Size of the message it was measured with (GiB)."""
    expected_gb_s: PositiveFloat | None = None
    """What a healthy allocation shows (GB/s)."""
    warn_below_gb_s: PositiveFloat | None = None
    """Less is worth a look (GB/s); null means that nothing is between good and bad."""
    fail_below_gb_s: PositiveFloat
    """Less means that a node or a link is broken (GB/s)."""
    source: str
    """Where the figures come from."""


@dataclass(frozen=True, kw_only=True)
class Health:
    """What a check of one node compares with. Null means that it isn't checked."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_UNKNOWN_KEYS

    memory_mb: Count | None = None
    """MemTotal of the node (MB of 1024 x 1024 bytes)."""
    memory_tolerance: Fraction = 0.05
    """How far MemTotal may be off, as a fraction."""
    nvme_disks: NonNegative | None = None
    """Local NVMe disks."""
    host_device_gb_s: PositiveFloat | None = None
    """Least bandwidth between host and one GPU, in each direction (GB/s)."""
    peer_gb_s: PositiveFloat | None = None
    """Least bandwidth of one GPU reading from another (GB/s)."""
    ib_gdr_gbit_s: PositiveFloat | None = None
    """Least bandwidth of one NIC with GPUDirect RDMA (Gb/s)."""
    all_reduce: tuple[AllReduceThreshold, ...] = ()
    """Bandwidths of an all-reduce; the first whose conditions fit holds."""


@dataclass(frozen=True, kw_only=True)
class NodeType:
    """A kind of node. It may extend another and say only what differs."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_UNKNOWN_KEYS

    extends: Name | None = None
    """Another node type whose facts hold where this one is silent; mappings are merged."""
    description: str
    """One line for people."""
    vm_sizes: tuple[Name, ...] = ()
    """Sizes of virtual machine that are such nodes, as the cloud names them."""
    device: Literal["cuda", "cpu"]
    """What training computes on."""
    gpus_per_node: NonNegative
    """GPUs of one node; 0 for nodes without."""
    gpu_model: str | None = None
    """Name of the GPU for people."""
    gpu_memory_gib: PositiveFloat | None = None
    """Memory of one GPU (GiB)."""
    gpu_memory_gb_s: PositiveFloat | None = None
    """Bandwidth of one GPU's memory (GB/s)."""
    peak_tflops: dict[Literal["bf16", "fp16", "fp8", "fp32"], PositiveFloat] = field(default_factory=dict)
    """Dense peak of one device by precision (TFLOP/s); a precision that is absent has no MFU."""
    cpus_per_node: Count | None = None
    """CPUs as Slurm counts them; null when it differs from node to node."""
    cpu_masks: tuple[Mask, ...] = ()
    """CPUs of each local rank. Used when every GPU has one task, with as many CPUs as its mask, and the job has whole
    nodes; otherwise binding is left to Slurm."""
    processor: Processor | None = None
    """The CPU's model; the topology file needs it."""
    numa_nodes: tuple[NumaNode, ...] = ()
    """NUMA nodes by number."""
    pci_link: PciLink | None = None
    """PCIe of each GPU, NIC and bridge; the topology file needs it."""
    nvlink: NvLink | None = None
    """NVLink between the GPUs; null means none."""
    fabric: Literal["infiniband", "ethernet"] | None = None
    """What the NICs are attached to."""
    gpus: tuple[Gpu, ...] = ()
    """The GPUs in the order of their PCI addresses."""
    nics: tuple[Nic, ...] = ()
    """The NICs; nics[i] is the one that gpus[i] uses."""
    topology_file: MountPath | None = None
    """NCCL's topology XML on the host."""
    exclusive: bool = True
    """A job takes whole nodes."""
    environment: dict[EnvironmentName, Variable] = field(default_factory=dict)
    """Variables of GPU jobs on these nodes."""
    sharp: dict[EnvironmentName, Variable] = field(default_factory=dict)
    """Variables of jobs that use SHARP, besides those of `environment`."""
    health: Health | None = None
    """What node-health and nccl-test compare with; null means that there is nothing to compare with."""
    sources: dict[Name, str] = field(default_factory=dict)
    """Where each fact is from, by its key in this file."""
