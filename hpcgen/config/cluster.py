"""A cluster profile: what an admin says once about a cluster, apart from any job."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from hpcgen.config.container import ContainerConfig, MountPath
from hpcgen.config.fields import EnvironmentName, FilePath, Name, SlurmWord, Text, TimeLimit
from hpcgen.config.slurm import StageSettings
from hpcgen.errors import Problem
from trainer.contract.config import FORBID_UNKNOWN_KEYS, Count, PositiveFloat

GpuRequest = Annotated[
    str,
    Text(
        r"gpus-per-node|none|gpu(:[A-Za-z0-9_.-]+)?:[1-9]\d{0,2}",
        '"gpus-per-node", "gpu:8", "gpu:h100:8" or "none"',
    ),
]
SlurmVersion = Annotated[str, Text(r"\d{2}\.\d{2}(\.\d+)*", 'a Slurm version such as "25.11"')]
HostName = Annotated[str, Text(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,252}[A-Za-z0-9])?", "the name of a host")]
Argument = Annotated[str, Text(r".{1,1000}", "a word of 1 to 1000 characters")]
GroupName = Annotated[str, Text(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}", "the name of a Unix group")]


@dataclass(frozen=True, kw_only=True)
class PartitionConfig:
    """Limits of one partition, checked before a job waits in its queue."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_UNKNOWN_KEYS

    max_time: TimeLimit | None = None
    """Longest time limit; null means none."""
    max_nodes: Count | None = None
    """Most nodes of one job; null means no limit."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """A cluster profile. It may extend another and say only what differs."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_UNKNOWN_KEYS

    extends: FilePath | None = None
    """Another profile (name or path) whose values hold where this one is silent; mappings are merged."""
    description: str = ""
    """One line for people."""
    node_type: Name
    """Facts about the nodes: a file of topologies/ (ndv5, cpu)."""
    slurm_version: SlurmVersion = "22.05"
    """Version of Slurm; one older than the scripts are written for is refused."""
    partitions: dict[SlurmWord, PartitionConfig] = field(default_factory=dict)
    """The partitions jobs may use; empty leaves partitions to Slurm."""
    slurm: StageSettings = field(default_factory=StageSettings)
    """Settings for every stage that the run file leaves open; `partition` here is the default one."""
    gres: GpuRequest = "gpus-per-node"
    """How a whole node's GPUs are asked for: "gpus-per-node", or a --gres value such as "gpu:8" or "gpu:h100:8"."""
    python: Annotated[
        str, Text(r"[A-Za-z0-9._/][A-Za-z0-9._/+@-]*", "a command or path of letters, digits and . _ / + @ -")
    ] = "python3"
    """Python of the jobs, in the container where there is one."""
    code_dir: MountPath | None = None
    """A directory of `hpcgen install-code`, mounted read-only and first on PYTHONPATH; null when the image has it."""
    container: ContainerConfig = field(default_factory=ContainerConfig)
    """Container defaults; the run file's values win and its mounts are added."""
    environment: dict[EnvironmentName, str] = field(default_factory=dict)
    """Environment variables of every job, over those of the node type."""
    library_path: tuple[MountPath, ...] = ()
    """Directories that the tasks of GPU stages have in LD_LIBRARY_PATH, in front of the image's own."""
    max_array_size: Count = 1001
    """MaxArraySize of slurm.conf: job arrays have at most this many tasks."""
    scratch: MountPath = "/tmp"
    """Node-local directory for caches and temporary files; it exists on every node."""
    login_host: HostName | None = None
    """Host that users log in to, for the ssh tunnel to TensorBoard; null prints a placeholder."""
    health_command: tuple[Argument, ...] = ()
    """The site's own check of a node, as words, the first an absolute path; its exit status counts on every node."""
    nccl_tests: MountPath | None = None
    """NVIDIA's all_reduce_perf, where the tasks see it; null measures with torch.distributed."""
    nccl_baseline: MountPath | None = None
    """File with the bandwidths that this cluster is known to reach, kept by the nccl-test stage."""
    storage_write_gb_s: PositiveFloat | None = None
    """Bandwidth at which a checkpoint is written (GB/s, all nodes together); null assumes 1."""
    startup_time_s: Count = 300
    """Seconds from the start of a job to its first step: container, imports, index building, loading."""
    trusted_groups: tuple[GroupName, ...] = ()
    """Groups that may write to a directory of site templates; none may write to a profile."""


def cluster_rule_problems(cluster: ClusterConfig) -> Iterator[Problem]:
    """What no type can say of a profile."""
    if cluster.health_command and not cluster.health_command[0].startswith("/"):
        reason = "is not an absolute path: a node that cannot find it would count as bad"
        yield Problem("health_command[0]", reason, "write where the program lies on the nodes")
