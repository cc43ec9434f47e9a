"""A node type: the facts about a kind of node, in a file of topologies/. They hold on every cluster with such nodes."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Literal

from hpcgen.config.container import MountPath, Runtime
from hpcgen.config.fields import EnvironmentName, Mask, Name, Text
from hpcgen.config.stages import STAGE_ROWS
from trainer.contract.config import Count, Fraction, NonNegative, PositiveFloat
from trainer.contract.health import Threshold
from trainer.contract.record import config_section

if TYPE_CHECKING:
    GpuStage = str
else:
    GpuStage = Literal[tuple(name for name, stage in STAGE_ROWS.items() if stage.uses_gpus)]
"""Name of a stage that uses GPUs."""

BusId = Annotated[
    str, Text(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", 'a PCI address such as "0001:00:00.0"')
]
CpuList = Annotated[str, Text(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*", 'a list of CPUs such as "0-47"')]
DeviceName = Annotated[str, Text(r"[A-Za-z0-9_]{1,63}", "the name of a device such as mlx5_ib0")]
FabricName = Literal["infiniband", "roce", "efa", "gib", "tcpxo", "slingshot", "ethernet"]
"""Name of a file in topologies/fabrics."""
VariablePattern = Annotated[
    str, Text(r"[A-Z_][A-Z0-9_]*(\[![A-Z]\])?\*?", 'the name of a variable, or a pattern such as "NCCL_IB_*"')
]
ComputeCapability = Annotated[str, Text(r"[1-9]\d?\.\d", 'a compute capability such as "9.0"')]
TorchRange = Annotated[str, Text(r"(<|>=)\d+\.\d+", 'a range of PyTorch versions: "<2.9" or ">=2.9"')]


@config_section
class Variable:
    """One environment variable that jobs on these nodes need."""

    value: str
    """Value. To leave the variable unset, omit its entry."""
    why: str
    """Effect of the variable and reason for the value, for readers of the script."""
    source: str
    """Source of the fact."""
    stages: tuple[GpuStage, ...] = ()
    """Stages to set it for. Default: all stages that use GPUs."""
    runtimes: tuple[Runtime, ...] = ()
    """Container runtimes to set it for. Default: all."""
    torch: TorchRange | None = None
    """PyTorch versions to set it for. Default: all. It is also set if the version is unknown."""


@config_section
class Exclusion:
    """Why an environment variable must not be set."""

    why: str
    """Effect of the variable."""
    source: str
    """Source of the fact."""


@config_section
class Processor:
    """CPU model as reported by CPUID. NCCL selects its bandwidth tables by these values."""

    arch: Literal["x86_64", "arm64", "aarch64"]
    """Instruction set. aarch64 is the kernel's name of arm64."""
    vendor: Literal["GenuineIntel", "AuthenticAMD", "ARM"] | None = None
    """Vendor string; null for Arm processors, which have no CPUID."""
    family: NonNegative | None = None
    """Family, in decimal; null for Arm processors."""
    model: NonNegative | None = None
    """Model, in decimal; null for Arm processors."""

    @property
    def is_arm(self) -> bool:
        """True for processors that run aarch64 code."""
        return self.arch != "x86_64"


@config_section
class NumaNode:
    """A NUMA node. Its number is its position in the list."""

    cpus: CpuList
    """CPUs, such as "0-47"."""


@config_section
class PciLink:
    """PCIe link of each GPU, NIC and bridge."""

    speed_gt_s: PositiveFloat
    """Transfer rate of a lane in GT/s: 16 for PCIe 4.0, 32 for PCIe 5.0."""
    width: Count
    """Number of lanes."""


@config_section
class NvLink:
    """NVLink network between GPUs."""

    links: Count
    """Number of NVLinks per GPU."""
    bandwidth_gb_s: PositiveFloat
    """Bandwidth of a GPU over all its links in GB/s, as the sum of both directions."""
    switches: NonNegative | None = None
    """Number of NVSwitches per node; 0 if the GPUs are connected directly, null if unknown."""
    domain_nodes: Count = 1
    """Number of nodes whose GPUs are connected by NVLink, such as 18 in a rack of GB200 NVL72."""


@config_section
class Gpu:
    """A GPU. Its position in the list is its number with CUDA_DEVICE_ORDER=PCI_BUS_ID."""

    bus_id: BusId
    """PCI address."""
    numa: NonNegative
    """NUMA node."""
    bridge: BusId | None = None
    """PCI bridge above it in the topology file; null if it is attached directly to the CPU."""


@config_section
class Nic:
    """A network adapter for traffic between GPUs of different nodes."""

    name: DeviceName
    """Name of the RDMA device, such as mlx5_ib0."""
    rate_gbit_s: PositiveFloat
    """Line rate in Gb/s."""
    bus_id: BusId | None = None
    """PCI address. Required for the topology file."""
    numa: NonNegative | None = None
    """NUMA node. Required for the topology file."""
    bridge: BusId | None = None
    """PCI bridge above it in the topology file; null if it is attached directly to the CPU."""


@config_section
class AllReduceThreshold(Threshold):
    """Bus bandwidth of all_reduce_perf for a healthy allocation under certain conditions."""

    message_gib: PositiveFloat
    """Message size of the measurement in GiB."""


@config_section
class Health:
    """Reference values for checks of a node. Null disables a check."""

    memory_mb: Count | None = None
    """MemTotal of the node in MB of 1024 x 1024 bytes."""
    memory_tolerance: Fraction = 0.05
    """Maximum relative deviation of MemTotal."""
    nvme_disks: NonNegative | None = None
    """Number of local NVMe disks."""
    host_device_gb_s: PositiveFloat | None = None
    """Minimum bandwidth between the host and a GPU in each direction, in GB/s."""
    peer_gb_s: PositiveFloat | None = None
    """Minimum bandwidth of a GPU reading from another GPU, in GB/s."""
    ib_gdr_gbit_s: PositiveFloat | None = None
    """Minimum bandwidth of a NIC with GPUDirect RDMA, in Gb/s."""
    all_reduce: tuple[AllReduceThreshold, ...] = ()
    """All-reduce bandwidths. The first entry with matching conditions applies."""


@config_section
class NodeType:
    """A kind of node. It can extend other node types and set only the facts that differ."""

    extends: tuple[Name, ...] = ()
    """Node type that provides facts not set here, or a list of node types, of which earlier ones win. Mappings are
    merged."""
    description: str
    """Description of the node type, in one line."""
    site: Name | None = None
    """Cloud or center with such machines; null for machines that exist anywhere. Facts of a profile of another site are
    doubted."""
    same_devices: bool = False
    """The machines have the devices, interfaces and files of those that this file extends, although it changes the
    hardware. Otherwise hpcgen doubts each of them."""
    tried: str | None = None
    """Runs of hpcgen's authors on such nodes, with the date; null if not stated."""
    vm_sizes: tuple[Name, ...] = ()
    """Cloud VM sizes of this node type."""
    device: Literal["cuda", "cpu"]
    """Device for training."""
    gpus_per_node: NonNegative
    """Number of GPUs per node; 0 for nodes without GPUs."""
    gpu_model: str | None = None
    """Name of the GPU."""
    compute_capability: ComputeCapability | None = None
    """CUDA's compute capability of the GPU, such as "9.0" for Hopper. Default: unknown."""
    gpu_memory_gib: PositiveFloat | None = None
    """Memory of a GPU in GiB."""
    gpu_memory_gb_s: PositiveFloat | None = None
    """Memory bandwidth of a GPU in GB/s."""
    peak_tflops: dict[Literal["bf16", "fp16", "fp8", "fp32"], PositiveFloat] = field(default_factory=dict)
    """Dense peak of a device in TFLOP/s, by precision. MFU is not reported for a missing precision."""
    cpus_per_node: Count | None = None
    """Number of CPUs as counted by Slurm; null if it differs between nodes."""
    cpu_masks: tuple[Mask, ...] = ()
    """CPU mask of each local rank. Used if every GPU has one task with as many CPUs as its mask, and the job has
    exclusive nodes. Otherwise Slurm decides the binding."""
    processor: Processor | None = None
    """CPU model. Required for the topology file, with all keys if its instruction set is x86_64."""
    numa_nodes: tuple[NumaNode, ...] = ()
    """NUMA nodes by number."""
    pci_link: PciLink | None = None
    """PCIe link of each GPU, NIC and bridge. Required for the topology file."""
    nvlink: NvLink | None = None
    """NVLink between the GPUs; null for none."""
    fabric: FabricName | None = None
    """Network between nodes. Its file in topologies/fabrics provides `environment`, `must_not_set`, `library_path` and
    `mounts` where the node type sets none."""
    gpus: tuple[Gpu, ...] = ()
    """GPUs in the order of their PCI addresses."""
    nics: tuple[Nic, ...] = ()
    """NICs, in the order of their GPUs. There may be several for each GPU, or one for several GPUs."""
    nics_per_node: Count | None = None
    """Number of NICs for traffic between GPUs, for node checks where `nics` does not name them."""
    topology_file: MountPath | None = None
    """Path of NCCL's topology XML on the host."""
    exclusive: bool = True
    """Jobs get exclusive nodes."""
    environment: dict[EnvironmentName, Variable] = field(default_factory=dict)
    """Environment variables of GPU jobs on these nodes."""
    environment_script: MountPath | None = None
    """Script of the nodes that sets more variables, such as that of a network plugin. Stages that use GPUs source it
    before their ranks start, after `environment`."""
    must_not_set: dict[VariablePattern, Exclusion] = field(default_factory=dict)
    """Environment variables that do harm on these nodes. A name can be a pattern, such as NCCL_IB_*."""
    library_path: tuple[MountPath, ...] = ()
    """Directories to prepend to LD_LIBRARY_PATH of GPU jobs, after those of the cluster profile."""
    mounts: tuple[MountPath, ...] = ()
    """Paths of the host that containers of GPU jobs need, such as devices and plugins of the network."""
    sharp: dict[EnvironmentName, Variable] = field(default_factory=dict)
    """Environment variables of jobs that use SHARP, in addition to `environment`."""
    health: Health | None = None
    """Reference values for node-health and nccl-test; null for none."""
    sources: dict[Name, str] = field(default_factory=dict)
    """Source of each fact, by its key in this file."""
