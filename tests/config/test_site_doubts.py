from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from hpcgen.config.node_type import FabricName
from hpcgen.config.node_types import load_with_files, node_type_names
from hpcgen.config.profiles import read_profile
from hpcgen.run_plan.profile import profile_mistakes
from tests.runs import big_run, planned, write_yaml

MACHINE = {
    "topology_file",
    "nics",
    *(f"health.{key}" for key in ("memory_mb", "nvme_disks", "ib_gdr_gbit_s", "all_reduce")),
    *(f"environment.{name}" for name in ("NCCL_TOPO_FILE", "UCX_NET_DEVICES")),
    *(f"environment.{name}" for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")),
    "sharp.SHARP_SMX_UCX_INTERFACE",
}
"""What ndv5 says about Azure's machines alone."""
OTHER_MACHINE = {"extends": "ndv5", "vm_sizes": ["p5.48xlarge"]}


def site(directory: Path, node_type: dict[str, Any], **profile: Any) -> Path:
    """The profile of a site with nodes of a type of its own."""
    write_yaml(directory / "topologies/own.yaml", {"description": "own", **node_type})
    return write_yaml(
        directory / "site.yaml", {"node_type": "own", "container": {"runtime": "none"}, **profile}
    )


def refusals(directory: Path, node_type: dict[str, Any], **profile: Any) -> list[str]:
    """What `hpcgen cluster check` says of a site."""
    return [
        str(problem) for problem in profile_mistakes(read_profile(str(site(directory, node_type, **profile))))
    ]


def inherited(directory: Path, node_type: dict[str, Any]) -> set[str]:
    """The items that a node type is told to inherit of another machine."""
    found = (re.search(r"node_type = own inherits (\S+)", line) for line in refusals(directory, node_type))
    return {match[1] for match in found if match}


def test_another_machine_inherits_nothing_in_silence(tmp_path: Path) -> None:
    assert inherited(tmp_path, OTHER_MACHINE) == MACHINE
    [line] = [line for line in refusals(tmp_path, OTHER_MACHINE) if "UCX_NET_DEVICES" in line]
    assert re.fullmatch(
        r"\S+site\.yaml:2: node_type = own inherits environment\.UCX_NET_DEVICES = mlx5_ib0:1 \(\S+/ndv5\.yaml:\d+\), "
        r"but topologies/own\.yaml:\d+ changes vm_sizes; set it, or remove it .*",
        line,
    )


def test_what_is_set_or_removed_is_no_longer_doubted(tmp_path: Path) -> None:
    changed = {
        **OTHER_MACHINE,
        "topology_file": None,
        "nics": [{"name": "mlx5_0", "rate_gbit_s": 400}],
        "health": None,
        "sharp": None,
        "environment": {
            "NCCL_TOPO_FILE": None,
            "UCX_NET_DEVICES": None,
            "NCCL_SOCKET_IFNAME": {"value": "=ens1"},
        },
    }
    assert inherited(tmp_path, changed) == {"environment.GLOO_SOCKET_IFNAME"}


def test_a_file_can_say_that_the_machines_have_the_same_devices(tmp_path: Path) -> None:
    same = {**OTHER_MACHINE, "same_devices": True}
    assert refusals(tmp_path, same) == []
    write_yaml(tmp_path / "topologies/middle.yaml", {"description": "middle", **same})
    assert inherited(tmp_path, {"extends": "middle", "gpu_memory_gib": 60}) == set()
    assert inherited(tmp_path, {"extends": "middle", "gpu_model": "H100 96 GB"}) == MACHINE


def test_a_run_is_only_warned(tmp_path: Path) -> None:
    profile = site(tmp_path, OTHER_MACHINE, container={"runtime": "none"}, slurm={"partition": "gpu"})
    plan = planned(tmp_path, big_run(cluster=str(profile), container={}))
    assert sum("node_type = own inherits" in warning for warning in plan.warnings) == len(MACHINE)


SLOW = {"environment": {"NCCL_NET": {"value": "Socket", "why": "a test", "source": "us"}}}
WRONG: dict[str, list[dict[str, Any]]] = {
    "infiniband": [
        {"nics": [{"name": "cxi0", "rate_gbit_s": 200}]},
        {"profile": {"NCCL_IB_DISABLE": "1"}},
        {"profile": {"FI_PROVIDER": "efa"}},
        SLOW,
    ],
    "roce": [
        {"nics": [{"name": "eth0", "rate_gbit_s": 100}]},
        {"profile": {"NCCL_IB_DISABLE": "1"}},
        {"profile": {"NCCL_FASTRAK_IFNAME": "eth1"}},
        SLOW,
    ],
    "efa": [
        {"nics": [{"name": "mlx5_0", "rate_gbit_s": 200}]},
        {"profile": {"NCCL_IB_HCA": "mlx5_0"}},
        {"profile": {"FI_EFA_USE_DEVICE_RDMA": "1"}},
        SLOW,
    ],
    "slingshot": [
        {"nics": [{"name": "mlx5_0", "rate_gbit_s": 200}]},
        {"profile": {"NCCL_IB_HCA": "cxi0"}},
        {"profile": {"FI_EFA_USE_HUGE_PAGE": "0"}},
        SLOW,
    ],
    "gib": [
        {"nics": [{"name": "enp6s0", "rate_gbit_s": 200}]},
        {"profile": {"NCCL_IB_DISABLE": "1"}},
        {"profile": {"NCCL_FASTRAK_CTRL_DEV": "enp0s12"}},
        SLOW,
    ],
    "tcpxo": [
        {"nics": [{"name": "mlx5_0", "rate_gbit_s": 200}]},
        {"profile": {"NCCL_IB_GID_INDEX": "3"}},
        {"profile": {"FI_PROVIDER": "tcp"}},
        SLOW,
    ],
    "ethernet": [
        {"nics": [{"name": "mlx5_0", "rate_gbit_s": 200}]},
        {"profile": {"NCCL_IB_HCA": "mlx5_0"}},
        {"profile": {"NCCL_NET_GDR_LEVEL": "PHB"}},
    ],
}
"""Wrong node types, or variables of a profile, for each fabric."""


@pytest.mark.parametrize("fabric", get_args(FabricName))
def test_cluster_check_refuses_what_contradicts_the_fabric(fabric: str, tmp_path: Path) -> None:
    right = {"extends": "h100-sxm", "fabric": fabric}
    assert refusals(tmp_path, right) == []
    for wrong in WRONG[fabric]:
        environment = wrong.get("profile", {})
        facts = {**right, **{key: value for key, value in wrong.items() if key != "profile"}}
        [refusal] = refusals(tmp_path, facts, environment=environment)
        assert re.search(rf"fabric:? {fabric}", refusal), refusal
        assert "node_type = own" in refusal or all(f"environment.{name} " in refusal for name in environment)


def test_a_variable_of_the_run_file_is_a_warning_with_reason_and_source(tmp_path: Path) -> None:
    profile = site(tmp_path, {"extends": "aws-p5"}, slurm={"partition": "gpu"})
    run = big_run(cluster=str(profile), container={}, environment={"FI_PROVIDER": "efa"})
    [warning] = [line for line in planned(tmp_path, run).warnings if "FI_PROVIDER" in line]
    assert re.match(
        r"\S+run\.yaml:\d+: environment\.FI_PROVIDER must not be set with fabric efa: Only ", warning
    )
    assert "[aws/aws-ofi-nccl 2daf7d30, doc/efa-env-var.md]; remove it" in warning
    site(tmp_path, {"extends": "aws-p5", "must_not_set": {"FI_PROVIDER": None}}, slurm={"partition": "gpu"})
    assert not any("FI_PROVIDER" in line for line in planned(tmp_path, run).warnings)


def test_a_profile_of_another_site_is_doubted_fact_by_fact(tmp_path: Path) -> None:
    def doubted(node_type: str, **profile: Any) -> set[str]:
        path = write_yaml(
            tmp_path / "site.yaml", {"extends": "azure-ndv5", "node_type": node_type, **profile}
        )
        return {problem.path for problem in read_profile(str(path)).doubts}

    facts = {"slurm_version", "container.image", "scratch", "storage_write_gb_s", "startup_time_s"}
    assert doubted("aws-p5en") == doubted("h100-sxm") == facts
    own = {"scratch": "/scratch", "container": {"image": "/images/gpt.sqsh"}, "slurm_version": None}
    assert doubted("aws-p5en", **own) == {"storage_write_gb_s", "startup_time_s"}
    for of_azure in ("ndv5", "ndv5-h200", "ndv4", "azure-ndv6-gb200", "cpu"):
        assert doubted(of_azure) == set()


@pytest.mark.parametrize("name", node_type_names())
def test_a_shipped_type_raises_no_doubt(name: str, tmp_path: Path) -> None:
    assert load_with_files(name).doubts == ()
    profile = write_yaml(tmp_path / "site.yaml", {"node_type": name, "container": {"runtime": "none"}})
    assert profile_mistakes(read_profile(str(profile))) == []
