from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from hpcgen.config.node_type import FabricName
from hpcgen.config.node_types import load_with_files, node_type_names
from hpcgen.config.profiles import read_profile
from hpcgen.run_plan.profile import profile_mistakes, profile_warnings
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
    assert inherited(tmp_path, {"extends": "middle", "gpu_memory_gib": 79}) == set()
    assert inherited(tmp_path, {"extends": "middle", "gpu_model": "H100 96 GB"}) == {
        *MACHINE,
        "gpu_memory_gb_s",
    }


@pytest.mark.parametrize(
    "change",
    [{"site": "aws"}, {"site": None}, {"description": "p5en.48xlarge"}, {"description": "a node of OCI"}],
)
def test_another_site_is_another_machine(change: dict[str, Any], tmp_path: Path) -> None:
    assert inherited(tmp_path, {"extends": "ndv5-h200", **change}) == {*MACHINE, "fabric"}
    assert inherited(tmp_path, {"extends": "ndv5-h200", **change, "same_devices": True}) == set()


@pytest.mark.parametrize(
    ("change", "doubted"),
    [
        ({"gpu_memory_gib": 40, "gpus_per_node": 4}, {"gpu_model", "gpu_memory_gb_s", "nvlink.switches"}),
        ({"gpu_memory_gib": 40, "gpu_model": "A100 40 GB", "gpu_memory_gb_s": 1555}, set()),
        ({"gpu_memory_gib": 78}, set()),
    ],
)
def test_facts_that_go_with_a_changed_one_are_doubted(
    change: dict[str, Any], doubted: set[str], tmp_path: Path
) -> None:
    assert inherited(tmp_path, {"extends": "a100-sxm", "fabric": "infiniband", **change}) == doubted


RACK = {"extends": "gb200-nvl72", "description": "a rack"}


@pytest.mark.parametrize(
    ("facts", "variables", "sign"),
    [
        ({"nics_per_node": 4}, {}, "nics_per_node is 4"),
        (
            {"environment": {"NCCL_IB_HCA": {"value": "ibp", "why": "w", "source": "s"}}},
            {},
            "NCCL_IB_HCA is ibp",
        ),
        ({}, {"NCCL_NET": "AWS Libfabric"}, "NCCL_NET is AWS Libfabric"),
        ({}, {"UCX_NET_DEVICES": "mlx5_0:1"}, "UCX_NET_DEVICES is mlx5_0:1"),
        ({}, {"MELLANOX_VISIBLE_DEVICES": "all"}, "MELLANOX_VISIBLE_DEVICES is all"),
    ],
)
def test_rdma_without_a_fabric_is_refused(
    facts: dict[str, Any], variables: dict[str, str], sign: str, tmp_path: Path
) -> None:
    [refusal] = refusals(tmp_path, {**RACK, **facts}, environment=variables)
    assert f"node_type = own has no fabric, but {sign}. " in refusal
    assert all(name in refusal for name in get_args(FabricName))
    harmless = {"NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket", "UCX_NET_DEVICES": "eth0"}
    assert refusals(tmp_path, RACK, environment=harmless) == []


def test_several_nodes_without_a_fabric_are_a_warning(tmp_path: Path) -> None:
    def warnings(facts: dict[str, Any], max_nodes: int | None) -> list[str]:
        limits = {"gpu": {"max_nodes": max_nodes}}
        path = site(tmp_path, {**RACK, **facts}, partitions=limits, slurm={"partition": "gpu"})
        return [line for line in profile_warnings(str(path), tmp_path) if "has no fabric" in line]

    assert len(warnings({}, None)) == 1
    assert warnings({}, 1) == []
    assert warnings({"fabric": "ethernet"}, None) == []


@pytest.mark.parametrize(
    ("fabric", "name", "value"),
    [
        ("infiniband", "NCCL_NET", "AWS Libfabric"),
        ("roce", "NCCL_NET", "gIB"),
        ("tcpxo", "NCCL_NET", "IB"),
        ("ethernet", "NCCL_NET", "IB"),
        ("efa", "NCCL_NET_PLUGIN", "none"),
        ("gib", "NCCL_NET_PLUGIN", "none"),
        ("infiniband", "NCCL_NET_PLUGIN", "ofi"),
        ("ethernet", "NCCL_NET_PLUGIN", "/opt/lib/libnccl-net-ofi.so"),
    ],
)
def test_the_network_of_another_fabric_is_refused(fabric: str, name: str, value: str, tmp_path: Path) -> None:
    own = {"extends": "h100-sxm", "fabric": fabric}
    [refusal] = refusals(tmp_path, own, environment={name: value})
    assert f"environment.{name} is {value}, " in refusal
    assert f"fabric {fabric}" in refusal


def test_the_usual_network_of_a_fabric_is_accepted(tmp_path: Path) -> None:
    for fabric, variables in {
        "infiniband": {"NCCL_NET": "ib", "NCCL_NET_PLUGIN": "none"},
        "roce": {"NCCL_NET": "IBext_v8", "NCCL_NET_PLUGIN": "spcx"},
        "ethernet": {"NCCL_NET": "Socket", "NCCL_NET_PLUGIN": "none"},
        "efa": {"NCCL_NET": "AWS Libfabric", "NCCL_NET_PLUGIN": "ofi"},
    }.items():
        assert refusals(tmp_path, {"extends": "h100-sxm", "fabric": fabric}, environment=variables) == []


@pytest.mark.parametrize("name", ["NCCL_MNNVL_ENABLE", "NCCL_CUMEM_ENABLE"])
def test_a_domain_without_its_nvlink_is_refused(name: str, tmp_path: Path) -> None:
    own = {**RACK, "fabric": "infiniband"}
    [refusal] = refusals(tmp_path, own, environment={name: "0"})
    assert f"environment.{name} is 0, so NCCL does not use NVLink between nodes" in refusal
    assert refusals(tmp_path, {**own, "nvlink": {"domain_nodes": 1}}, environment={name: "0"}) == []


def test_a_segment_that_no_domain_holds_is_a_warning(tmp_path: Path) -> None:
    def segment(nodes: int) -> list[str]:
        path = site(tmp_path, {**RACK, "fabric": "infiniband"}, slurm={"partition": "gpu", "segment": nodes})
        return [line for line in profile_warnings(str(path), tmp_path) if "slurm.segment" in line]

    [warning] = segment(19)
    assert "slurm.segment = 19 is more than the 18 nodes that NVLink connects" in warning
    assert segment(18) == []


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


def test_a_variable_that_the_network_excludes_gets_no_other_name(tmp_path: Path) -> None:
    """FI_PROVIDER, which it resembles, must not be set either."""
    run = big_run(environment={"FI_PROVIDR": "efa"})
    [warning] = [line for line in planned(tmp_path, run).warnings if "FI_PROVIDR" in line]
    assert "must not be set with fabric infiniband" in warning


def test_a_profile_of_another_site_is_doubted_fact_by_fact(tmp_path: Path) -> None:
    def doubted(node_type: str, **profile: Any) -> set[str]:
        path = write_yaml(
            tmp_path / "site.yaml", {"extends": "azure-ndv5", "node_type": node_type, **profile}
        )
        return {problem.path for problem in read_profile(str(path)).doubts}

    facts = {
        *("slurm_version", "container.image", "scratch", "storage_write_gb_s", "startup_time_s"),
        *("slurm.partition", "partitions"),
    }
    assert doubted("aws-p5en") == doubted("h100-sxm") == facts
    own = {
        "scratch": "/scratch",
        "container": {"image": "/images/gpt.sqsh"},
        "slurm_version": None,
        "partitions": {"gpu": {}, "hpc": None},
        "slurm": {"partition": "gpu"},
    }
    assert doubted("aws-p5en", **own) == {"storage_write_gb_s", "startup_time_s"}
    for of_azure in ("ndv5", "ndv5-h200", "ndv4", "azure-ndv6-gb200", "cpu"):
        assert doubted(of_azure) == set()
    assert doubted("ndv5-h200", description="AWS p5en.48xlarge") == facts
    assert doubted("ndv5-h200", description="Azure, moved from AWS") == set()


@pytest.mark.parametrize("name", node_type_names())
def test_a_shipped_type_raises_no_doubt(name: str, tmp_path: Path) -> None:
    assert load_with_files(name).doubts == ()
    profile = write_yaml(tmp_path / "site.yaml", {"node_type": name, "container": {"runtime": "none"}})
    assert profile_mistakes(read_profile(str(profile))) == []
