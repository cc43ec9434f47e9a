"""A cluster profile: the facts about a cluster that do not depend on a job."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import Annotated

from hpcgen.config.container import ContainerConfig, MountPath
from hpcgen.config.fields import EnvironmentName, Name, ProfileName, SlurmWord, Text, TimeLimit, seconds
from hpcgen.config.slurm import SETTING_NAMES, ClusterSlurmConfig, StageSettings
from trainer.contract.config import Count, NonNegativeFloat, PositiveFloat, Range
from trainer.contract.record import config_section

GpuRequest = Annotated[
    str,
    Text(
        r"gpus-per-node|none|gpu(:[A-Za-z0-9_.-]+)?:[1-9]\d{0,2}",
        '"gpus-per-node", "gpu:8", "gpu:h100:8" or "none"',
    ),
]
SlurmVersion = Annotated[str, Text(r"\d{2}\.\d{2}(\.\d+)*", 'a Slurm version such as "25.11"')]
HostName = Annotated[str, Text(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,252}[A-Za-z0-9])?", "the name of a host")]
HostSuffix = Annotated[str, Text(r"[A-Za-z0-9.-]{1,63}", "the end of the name of a host")]
InterfaceName = Annotated[
    str, Text(r"[A-Za-z0-9][A-Za-z0-9_.:@-]{0,14}", "the name of a network interface such as ib0")
]
Argument = Annotated[str, Text(r".{1,1000}", "a word of 1 to 1000 characters")]
SettingName = Annotated[str, Text("|".join(SETTING_NAMES), f"a key of slurm: {', '.join(SETTING_NAMES)}")]
MpiType = Annotated[str, Text(r"[a-z][a-z0-9_]{0,31}", "a name that `srun --mpi=list` prints, such as pmix")]
ModuleName = Annotated[
    str,
    Text(r"[A-Za-z0-9_][A-Za-z0-9._+/@:-]{0,199}", "the name of an environment module, such as cuda/12.4"),
]
StripeSize = Annotated[
    str, Text(r"(64|128|256|512)[kK]|[1-9]\d{0,3}[mM]|[1-4][gG]", "a size of 64K or more, such as 1M or 16M")
]
Currency = Annotated[str, Text(r"[A-Z]{3}", 'the three letters of a currency, such as "USD" or "EUR"')]
GroupName = Annotated[str, Text(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}", "the name of a Unix group")]


@config_section
class JobLimits:
    """Limits of one QOS, checked before a job is submitted."""

    max_time: TimeLimit | None = None
    """Maximum time limit; null for no limit."""
    max_nodes: Count | None = None
    """Maximum number of nodes per job; null for no limit."""


@config_section
class PartitionConfig(JobLimits):
    """Limits of one partition, checked before a job is submitted, and its price."""

    price_per_gpu_hour: NonNegativeFloat | None = None
    """Price of one GPU for one hour in this partition. Default: the profile's `price_per_gpu_hour`."""


@config_section
class Rendezvous:
    """Where the ranks meet, if that is not the address of the first node that Slurm knows. One key is set."""

    suffix: HostSuffix | None = None
    """Text after the name of the first node, such as "i". The name with it must resolve."""
    interface: InterfaceName | None = None
    """Network interface of the first node, such as ib0. Its first address is used."""


@config_section
class StripeConfig:
    """Stripes on Lustre, for new directories with checkpoints and .bin/.idx pairs."""

    count: Annotated[int, Range(at_least=-1)] = -1
    """Number of storage targets (OSTs) over which each file is spread; -1 for all, 0 for the file system's default."""
    size: StripeSize = "1M"
    """Size of a stripe."""


@config_section
class ClusterConfig:
    """A cluster profile. It can extend another profile and set only the values that differ."""

    extends: ProfileName | None = None
    """Profile (name or path) that provides values not set here. Mappings are merged."""
    description: str = ""
    """Description of the cluster, in one line."""
    node_type: Name
    """Node type: the name of a file in topologies/, such as ndv5 or cpu."""
    slurm_version: SlurmVersion | None = None
    """Slurm version of the cluster. Default: unknown. Versions older than the scripts support are refused, and so are
    options in `extra_directives` that newer versions added."""
    partitions: dict[SlurmWord, PartitionConfig] = field(default_factory=dict)
    """Partitions that jobs may use. Empty accepts any partition."""
    qos: dict[SlurmWord, JobLimits] = field(default_factory=dict)
    """QOS (quality of service) that jobs may use. Empty accepts any QOS."""
    slurm: ClusterSlurmConfig = field(default_factory=ClusterSlurmConfig)
    """Slurm settings for all stages, and for single stages in their sections, such as `slurm.prepare.partition`. Used
    where the run file sets none."""
    required_settings: tuple[SettingName, ...] = ()
    """Keys of `slurm` that each stage needs, such as account. A run without them is refused."""
    price_per_gpu_hour: NonNegativeFloat | None = None
    """Price of one GPU for one hour, in `currency`; 0 if it is free. Default: unknown."""
    currency: Currency = "USD"
    """Currency of the prices."""
    modules: tuple[ModuleName, ...] = ()
    """Environment modules that each job loads in its own shell. The nodes need environment-modules 4 or Lmod."""
    mpi: MpiType | None = None
    """srun's --mpi for the tasks. Default: MpiDefault of slurm.conf."""
    gres: GpuRequest = "gpus-per-node"
    """Request for all GPUs of a node: "gpus-per-node", "none", or a --gres value such as "gpu:h100:8"."""
    python: Annotated[
        str, Text(r"[A-Za-z0-9._/][A-Za-z0-9._/+@-]*", "a command or path of letters, digits and . _ / + @ -")
    ] = "python3"
    """Python interpreter of the jobs, in the container if there is one."""
    code_dir: MountPath | None = None
    """Directory from `hpcgen install-code`, mounted read-only and first on PYTHONPATH; null if the image contains the
    code."""
    container: ContainerConfig = field(default_factory=ContainerConfig)
    """Container defaults. Values in the run file override them; its mounts are added."""
    environment: dict[EnvironmentName, str] = field(default_factory=dict)
    """Environment variables of all jobs. They override the node type's."""
    secrets: tuple[EnvironmentName, ...] = ()
    """Names of environment variables that all jobs inherit from the submitting shell, in addition to the run file's."""
    library_path: tuple[MountPath, ...] = ()
    """Directories to prepend to the image's LD_LIBRARY_PATH for tasks of GPU stages."""
    max_array_size: Count = 1001
    """MaxArraySize in slurm.conf: the maximum number of tasks in a job array."""
    scratch: MountPath = "/tmp"
    """Node-local directory for caches and temporary files. It must exist on every node."""
    rendezvous: Rendezvous | None = None
    """Rule for the address at which ranks meet. Default: the address of the first node that Slurm knows."""
    login_host: HostName | None = None
    """Login host for the SSH tunnel to TensorBoard; null prints a placeholder."""
    health_command: tuple[Argument, ...] = ()
    """The site's node check, as a list of words starting with an absolute path. A node is bad if it exits with a
    status other than 0."""
    nccl_tests: MountPath | None = None
    """Path of NVIDIA's all_reduce_perf as seen by the tasks; null measures with torch.distributed."""
    nccl_baseline: MountPath | None = None
    """File with the bandwidths that this cluster has reached, maintained by the nccl-test stage."""
    storage_write_gb_s: PositiveFloat | None = None
    """Bandwidth at which checkpoints are written, in GB/s for all nodes together. Default: 1."""
    gpu_hours_between_failures: PositiveFloat | None = None
    """Mean GPU-hours between failures that end a job, from which the best interval between checkpoints follows.
    Default: 50700, as in the training of Llama 3."""
    stripe: StripeConfig | None = field(default_factory=StripeConfig)
    """Stripes of new directories on Lustre; null for those of the directory above."""
    startup_time_s: Count = 300
    """Seconds from the start of a job to its first step, including container start, imports, index building and
    checkpoint loading."""
    gpu_idle_limit_s: Count | None = None
    """Seconds for which GPUs of a job may be idle before the site complains or cancels the job. `hpcgen ledger` warns
    of attempts whose GPUs waited longer for their first step. Default: no limit."""
    trusted_groups: tuple[GroupName, ...] = ()
    """Unix groups that may write to site template directories. No group may write to a profile."""


def limits_of(settings: StageSettings, cluster: ClusterConfig) -> Iterator[tuple[str, JobLimits]]:
    """Yields the limits of each partition and QOS of a job, with its name for messages, such as "partition gpu"."""
    for word, names, known in (
        ("partition", settings.partition, cluster.partitions),
        ("QOS", settings.qos, cluster.qos),
    ):
        yield from ((f"{word} {name}", known[name]) for name in (names or "").split(",") if name in known)


def price_per_gpu_hour(settings: StageSettings, cluster: ClusterConfig) -> float | None:
    """The price of one GPU for one hour; the highest of those of the job's partitions. None if it is unknown."""
    names = (settings.partition or "").split(",")
    own = [
        cluster.partitions[name].price_per_gpu_hour if name in cluster.partitions else None for name in names
    ]
    prices = [cluster.price_per_gpu_hour if price is None else price for price in own]
    return max((price for price in prices if price is not None), default=None)


def within_limit(time: str, settings: StageSettings, cluster: ClusterConfig) -> str:
    """The smallest of a time limit and the maxima of the job's partition and QOS."""
    limits = (limits.max_time for _, limits in limits_of(settings, cluster))
    return min((time, *filter(None, limits)), key=seconds)
