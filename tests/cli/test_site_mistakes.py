"""Mistakes of an administrator: each is noticed by the earliest command that can know it.

The table changes one value of a valid site: a profile, its node type, and a run file.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import hpcgen
from tests.runs import big_run, write_yaml

COMMANDS = CHECK, VALIDATE = "cluster check", "validate"
VARIABLE = {"why": "a test", "source": "a test"}
NODE_TYPE = {
    "description": "4 x A100",
    "device": "cuda",
    "gpus_per_node": 4,
    "gpu_model": "A100 SXM 80 GB",
    "gpu_memory_gib": 80,
    "gpu_memory_gb_s": 2039,
    "peak_tflops": {"bf16": 312, "fp16": 312},
    "cpus_per_node": 64,
    "numa_nodes": [{"cpus": f"{first}-{first + 15}"} for first in (0, 16, 32, 48)],
    "cpu_masks": [f"0x{0xFFFF << first:x}" for first in (0, 16, 32, 48)],
    "fabric": "infiniband",
    "nics": [
        {"name": f"mlx5_{index}", "bus_id": f"0000:{index + 1}1:00.0", "numa": index, "rate_gbit_s": 200}
        for index in range(4)
    ],
    "health": {"memory_mb": 515_000},
    "environment": {
        "NCCL_SOCKET_IFNAME": {"value": "=eth0", **VARIABLE},
        "GLOO_SOCKET_IFNAME": {"value": "eth0", **VARIABLE},
        "NCCL_IB_HCA": {"value": "=mlx5_0,mlx5_1,mlx5_2,mlx5_3", **VARIABLE},
    },
}
PROFILE = {
    "node_type": "a100x4",
    "slurm_version": "22.05",
    "partitions": {"gpu": {"max_time": "1-00:00:00", "max_nodes": 16}},
    "qos": {"normal": {}},
    "slurm": {"partition": "gpu", "time": "12:00:00", "account": "physics"},
    "gres": "gpu:a100:4",
    "container": {"runtime": "none"},
    "scratch": "/local",
    "storage_write_gb_s": 5,
    "startup_time_s": 120,
}
RUN = {
    **big_run(preset="1.3b", cluster="uni", container={}),
    "slurm": {"train": {"nodes": 2}},
    "training": {"global_batch_size": 512},
}


def changed(values: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of nested values with one of them changed, or with several at the top.

    A list's index is a part of the path.
    """
    result = copy.deepcopy(values)
    if not path:
        return {**result, **value}
    section: Any = result
    *above, last = path.split(".")
    for key in above:
        section = section[int(key)] if isinstance(section, list) else section.setdefault(key, {})
    section[int(last) if isinstance(section, list) else last] = value
    return result


def noticed(
    workplace: Path, file: str = "", path: str = "", value: object = None, commands: Sequence[str] = COMMANDS
) -> dict[str, str]:
    """What commands say about the site with one change."""
    files = {"profile": PROFILE, "node type": NODE_TYPE, "run": RUN}
    if file:
        files[file] = changed(files[file], path, value)
    write_yaml(workplace / "clusters/uni.yaml", files["profile"])
    write_yaml(workplace / "topologies/a100x4.yaml", files["node type"])
    run = write_yaml(workplace / "run.yaml", files["run"])
    arguments = {CHECK: ("cluster", "check", "uni"), VALIDATE: ("validate", "-c", run)}
    return {command: hpcgen(*arguments[command]).stderr for command in commands}


def facts(name: str, value: str, **keys: object) -> tuple[str, str, object]:
    """A variable of the node type."""
    return "node type", f"environment.{name}", {"value": value, **VARIABLE, **keys}


PYXIS = {"runtime": "pyxis", "image": "/shared/images/gpt.sqsh"}
MISTAKES = {
    # ---- noticed by 0.2.0 ----
    "more CPUs than numa_nodes": ("node type", "cpus_per_node", 128, CHECK, "cpus_per_node = 128"),
    "NUMA nodes that overlap": ("node type", "numa_nodes.1.cpus", "15-31", CHECK, "numa_nodes[1].cpus = 15-31 shares"),
    "masks that share CPUs": ("node type", "cpu_masks.1", "0xffff", CHECK, "cpu_masks[1] = 0xffff shares CPUs 0-15"),
    "an unknown stage": (*facts("X", "1", stages=["training"]), CHECK, "environment.X.stages[0] must be"),
    "a partition that is not listed": ("profile", "slurm.partition", "gpuq", CHECK, "slurm.partition = gpuq is not"),
    "a limit without a unit": ("profile", "partitions.gpu.max_time", "24", CHECK, "max_time = "),
    "no nodes": ("profile", "partitions.gpu.max_nodes", 0, CHECK, "max_nodes = 0"),
    "gres of another number": ("profile", "gres", "gpu:8", CHECK, "gres = gpu:8 requests 8 GPUs"),
    "gres of another form": ("profile", "gres", "gpus:a100:4", CHECK, "gres = "),
    "scratch with a variable": ("profile", "scratch", "/scratch/$USER", CHECK, "scratch = "),
    "a version that is no text": ("profile", "slurm_version", 22.5, CHECK, "slurm_version = 22.5"),
    "an old version": ("profile", "slurm_version", "20.02", CHECK, "slurm_version = "),
    **{
        f"the option {option}": ("profile", "slurm.extra_directives", [option], CHECK, "slurm.extra_directives[0] = ")
        for option in ("mem=0", "--nodes=2", "--export=NONE", "--no-requeue", "--gpus=8")
    },
    "a relative health command": ("profile", "health_command", ["check.sh"], CHECK, "health_command[0] = check.sh"),
    "a relative library path": ("profile", "library_path", ["lib"], CHECK, "library_path[0] = lib"),
    "an account of two words": ("profile", "slurm.account", "a b", CHECK, "slurm.account = "),
    "a time above the limit": ("profile", "slurm.time", "2-00:00:00", CHECK, "slurm.time = 2-00:00:00 is more than"),
    "nodes above the limit": ("profile", "slurm.nodes", 64, CHECK, "slurm.nodes = 64 is more than"),
    "more tasks than GPUs": ("profile", "slurm.ntasks_per_node", 8, CHECK, "slurm.ntasks_per_node = 8 is more than"),
    "a variable of Slurm": ("profile", "environment.SLURM_CPUS_PER_TASK", "8", CHECK, "SLURM_CPUS_PER_TASK would"),
    "a number for a variable": ("profile", "environment.OMP_NUM_THREADS", 8, CHECK, "OMP_NUM_THREADS"),
    "a key for a variable": ("profile", "environment.WANDB_API_KEY", "0" * 40, CHECK, "looks like a secret"),
    "enroot with a registry": (
        "profile", "container", {"runtime": "enroot", "image": "nvcr.io#nvidia/pytorch:25.03-py3"}, CHECK,
        "needs a .sqsh file",
    ),
    "an image of Docker": ("profile", "container", {**PYXIS, "image": "docker://a/b"}, CHECK, "container.image = "),
    "an image of Apptainer": ("profile", "container", {**PYXIS, "image": "/a.sif"}, CHECK, "container.image = "),
    "an unknown runtime": ("profile", "container", {**PYXIS, "runtime": "podman"}, CHECK, "container.runtime = podman"),
    "a relative mount": ("profile", "container", {**PYXIS, "mounts": [{"source": "data"}]}, CHECK, "mounts[0].source"),
    "a misspelled key": ("profile", "partitions.gpu.max_tiem", "1:00:00", CHECK, "did you mean max_time?"),
    "a relative path of nccl-tests": ("profile", "nccl_tests", "bin/all_reduce_perf", CHECK, "nccl_tests = "),
    "a list of QOS": ("profile", "slurm.qos", ["normal"], CHECK, "slurm.qos = "),
    "a misspelled variable": ("profile", "environment.NCCL_SOCKET_IFNAMES", "eth0", CHECK, "nothing reads it"),
    "an unknown level of messages": ("profile", "environment.NCCL_DEBUG", "verbose", CHECK, "which is not a level"),
    "a search path for libraries": ("profile", "environment.LD_LIBRARY_PATH", "/opt/lib", CHECK, "library_path"),
    "no code": ("profile", "code_dir", "/tmp/no-such-code", CHECK, "code_dir = /tmp/no-such-code does not exist"),
    "an image without code": (
        "profile", "container", {**PYXIS, "image": "nvcr.io#nvidia/pytorch:25.03-py3"}, CHECK, "neither Megatron-Core",
    ),
    "a lead longer than the limit": ("run", "slurm.train.signal_lead_s", 65000, VALIDATE, "signal_lead_s = 65000"),
    # ---- devices ----
    "a fabric without RDMA": ("node type", "fabric", "ethernet", CHECK, "a100x4 has fabric ethernet, but its NIC"),
    "a NIC that the nodes do not have": (*facts("NCCL_IB_HCA", "=mlx5_0,mlx5_9"), CHECK, "names mlx5_9"),
    "a blank in a list of devices": (*facts("NCCL_IB_HCA", "=mlx5_0, mlx5_3"), CHECK, "contains a blank"),
    "an idle NIC": ("profile", "environment.NCCL_IB_HCA", "=mlx5_0,mlx5_1,mlx5_2", CHECK, "leaves 1 NIC idle: mlx5_3"),
    "a prefix within a list": ("profile", "environment.NCCL_IB_HCA", "mlx5_0,=mlx5_1", CHECK, "within the list"),
    "devices in a run file": ("run", "environment.NCCL_IB_HCA", "mlx5_7", VALIDATE, "names mlx5_7"),
    "UCX without a port": ("profile", "environment.UCX_NET_DEVICES", "mlx5_0", CHECK, "write mlx5_0:1"),
    "UCX with another NIC": ("profile", "environment.UCX_NET_DEVICES", "mlx5_4:1", CHECK, "names mlx5_4"),
    "an interface as a NIC": ("node type", "nics.0.name", "ib0", CHECK, "nics[0].name = ib0 is the name of a network"),
    "a NIC as an interface": (*facts("NCCL_SOCKET_IFNAME", "mlx5_0"), CHECK, "which is an RDMA device"),
    "gloo with a prefix": (*facts("GLOO_SOCKET_IFNAME", "=eth0"), CHECK, "which gloo takes as part of the name"),
    "a tenth of a rate": ("node type", "nics.2.rate_gbit_s", 20, CHECK, "nics[2].rate_gbit_s = 20"),
    "a rate in GB/s": ("node type", "nics.0.rate_gbit_s", 25, CHECK, "write 200"),
    "no device for NCCL": ("node type", "environment", {}, CHECK, 'set NCCL_IB_HCA to "=mlx5_0,mlx5_1,'),
    "no NIC": ("node type", "nics", [], CHECK, "nics_per_node is missing, so node-health"),
    "GPUs counted as nodes": (
        "node type", "nvlink", {"links": 18, "bandwidth_gb_s": 1800, "domain_nodes": 72}, CHECK,
        "makes a domain of 288 GPUs",
    ),
    "ranks that meet on another network": (
        "profile", "rendezvous", {"interface": "ib0"}, CHECK, "rendezvous.interface = ib0 is not the interface of",
    ),
    # ---- names and values of variables ----
    "a provider misspelled": ("profile", "environment.FI_PROVIDR", "efa", CHECK, "FI_PROVIDR"),
    "an allocator misspelled": ("profile", "environment.PYTORCH_CUDA_ALOC_CONF", "x", CHECK, "mean PYTORCH_CUDA_ALLOC"),
    "a variable of UCX misspelled": ("profile", "environment.UCX_NET_DEVCES", "all", CHECK, "mean UCX_NET_DEVICES?"),
    "a timeout of more than five bits": ("profile", "environment.NCCL_IB_TIMEOUT", "200", CHECK, "from 1 to 31"),
    "too many retries": ("profile", "environment.NCCL_IB_RETRY_CNT", "13", CHECK, "from 0 to 7"),
    "no level of PCI": ("profile", "environment.NCCL_NET_GDR_LEVEL", "PXI", CHECK, "which is not a level"),
    "a level in lower case": ("run", "environment.NCCL_P2P_LEVEL", "nvl", VALIDATE, "use NVL"),
    "a size with a unit": ("profile", "environment.NCCL_BUFFSIZE", "8M", CHECK, "write 8388608"),
    "a word for a number": ("profile", "environment.NCCL_CROSS_NIC", "true", CHECK, "is no number"),
    "an unknown transport": ("profile", "environment.UCX_TLS", "rc,cuda_cpy", CHECK, "use cuda_copy"),
    "a variable in a value": ("profile", "environment.MY_DIR", "$HOME/x", CHECK, "contains $HOME, which is not"),
    # ---- units and figures ----
    "memory in MiB": ("node type", "gpu_memory_gib", 40960, CHECK, "It looks like MiB; write 40"),
    "memory of another GPU": ("node type", "gpu_memory_gib", 40, CHECK, "does not fit gpu_model"),
    "bandwidth in TB/s": ("node type", "gpu_memory_gb_s", 2.039, CHECK, "It looks like TB/s"),
    "a peak with sparsity": ("node type", "peak_tflops.bf16", 624, CHECK, "use the dense peak, 312"),
    "a peak in PFLOP/s": ("node type", "peak_tflops.bf16", 0.312, CHECK, "It looks like PFLOP/s; write 312"),
    "no peak": ("node type", "peak_tflops", {}, CHECK, "so MFU is not reported"),
    "memory in bytes": ("node type", "health.memory_mb", 540_016_640_000, CHECK, "It looks like bytes"),
    "memory in GiB": ("node type", "health.memory_mb", 512, CHECK, "It looks like GiB"),
    "storage in MB/s": ("profile", "storage_write_gb_s", 2000, CHECK, "It looks like MB/s; write 2"),
    "a start in minutes": ("profile", "startup_time_s", 2, CHECK, "It looks like minutes; write 120"),
    "an impossible array": ("profile", "max_array_size", 10_000_000, CHECK, "max_array_size = 10000000"),
    "a topology file of other nodes": (
        "node type", "topology_file", "/opt/microsoft/ndv4-topo.xml", CHECK, "is the topology file of node type ndv4",
    ),
    "two topology files": (
        "node type", "",
        {"topology_file": "/a.xml", "environment": {"NCCL_TOPO_FILE": {"value": "/b.xml", **VARIABLE}}}, CHECK,
        "topology_file = /a.xml is not the file that NCCL reads",
    ),
    "gres of another GPU": ("profile", "gres", "gpu:a10:4", CHECK, "gres = gpu:a10:4 requests a10"),
    # ---- places ----
    "a relative Python": ("profile", "python", "venv/bin/python", CHECK, "python = venv/bin/python is a relative path"),
    "a misspelled Python": ("profile", "python", "pyhton3", CHECK, "python = pyhton3 is not the usual name"),
    "no Python": ("profile", "python", "/tmp/no/python", CHECK, "python = /tmp/no/python does not exist"),
    "scratch with shared code": (
        "profile", "", {"scratch": "/data", "code_dir": "/data/code"}, CHECK, "contains code_dir, which all nodes",
    ),
    "shared scratch": ("profile", "scratch", "/lustre/tmp", CHECK, "is below /lustre"),
    "a run in scratch": ("run", "paths.run_dir", "/local/runs/a", VALIDATE, "run_dir = /local/runs/a is in /local"),
    "an unknown group": ("profile", "trusted_groups", ["no-such-group"], CHECK, "trusted_groups[0] = no-such-group"),
    "a mount over programs": (
        "profile", "container", {**PYXIS, "mounts": [{"source": "/apps", "target": "/usr"}]}, CHECK,
        "mounts[0].target = /usr would hide",
    ),
    "a mount over files of the image": (
        "profile", "container", {**PYXIS, "mounts": [{"source": "/opt"}]}, CHECK, "hides the image's own files",
    ),
    # ---- Slurm ----
    "more memory than a node has": ("profile", "slurm.mem", "6400G", CHECK, "is more than the 515,000 MB"),
    "memory without a unit": ("run", "slurm.train.mem", "64", VALIDATE, "slurm.train.mem = "),
    "hours as minutes": ("profile", "slurm.time", "24:00", CHECK, "means 24 minutes to Slurm"),
    "hours of a limit as minutes": ("profile", "partitions.gpu.max_time", "24:00", CHECK, "means 24 minutes to Slurm"),
    "masks that are dropped": ("run", "slurm.train.cpus_per_task", 4, VALIDATE, "is not the number of CPUs"),
    "masks of a shared node": ("node type", "exclusive", False, CHECK, "so the masks are not used"),
    "a hint next to masks": ("profile", "slurm.extra_directives", ["--hint=nomultithread"], CHECK, "cpu_masks"),
    "an option that the step overrides": (
        "profile",
        "slurm.extra_directives",
        ["--distribution=cyclic"],
        CHECK,
        "their step has --distribution=block",
    ),
    "an unknown event": ("profile", "slurm.extra_directives", ["--mail-type=FAILED"], CHECK, "use FAIL"),
    "an unknown hint": ("run", "slurm.train.extra_directives", ["--hint=nomt"], VALIDATE, "sbatch refuses"),
    "a newer option": ("profile", "slurm.extra_directives", ["--segment=16"], CHECK, "requires Slurm 24.05"),
    "a misspelled option": ("profile", "slurm.extra_directives", ["--exclusve"], CHECK, "did you mean --exclusive?"),
}  # fmt: skip
"""Mistake -> the changed file, the path and the value, the first command that notices it, and a part of its message."""


@pytest.mark.parametrize(("file", "path", "value", "command", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_noticed(workplace, file, path, value, command, message):
    assert message in noticed(workplace, file, path, value, commands=(command,))[command]


def test_the_site_without_mistakes_has_no_warnings(workplace):
    said = noticed(workplace)
    assert said[CHECK] == ""
    assert all(
        "was not checked, because this machine has no /shared" in line for line in said[VALIDATE].splitlines()
    )
