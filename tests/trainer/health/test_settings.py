"""Settings and host states that are reported as possible causes of a low bandwidth."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.health.settings import explain, explain_host, nccl_settings

NICS = tuple(f"mlx5_ib{index}" for index in range(8))


def explained(environ: dict[str, str], planned: dict[str, str] | None = None) -> list[str]:
    return list(explain(nccl_settings(environ, []), planned or {}, NICS))


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("NCCL_MAX_NCHANNELS=2", "few channels"),
        ("NCCL_MAX_CTAS=4", "few channels"),
        ("NCCL_P2P_DISABLE=1", "not NVLink"),
        ("NCCL_P2P_LEVEL=LOC", "not NVLink"),
        ("NCCL_SHM_DISABLE=1", "uses the network"),
        ("NCCL_IB_DISABLE=1", "not InfiniBand"),
        ("NCCL_NET=Socket", "not InfiniBand"),
        ("NCCL_NET_GDR_LEVEL=LOC", "without GPUDirect"),
        ("NCCL_IB_HCA=mlx5_ib0:1,mlx5_ib1:1", "uses 2 of 8 NICs"),
        ("NCCL_IB_HCA==mlx5_ib0", "uses 1 of 8 NICs"),
        ("NCCL_IB_HCA=^mlx5_ib7", "uses 7 of 8 NICs"),
        ("NCCL_IB_HCA=mlx5_0", "uses 0 of 8 NICs"),
        ("NCCL_ALGO=Tree", "forces an algorithm"),
        ("NCCL_PROTO=LL", "forces a protocol"),
        ("NCCL_BUFFSIZE=65536", "4 MiB"),
        ("NCCL_NTHREADS=64", "few threads"),
        ("CUDA_LAUNCH_BLOCKING=1", "host waits"),
    ],
)
def test_a_setting_that_costs_bandwidth_is_named_with_its_reason(setting: str, reason: str) -> None:
    name, _, value = setting.partition("=")
    [line] = explained({name: value})
    assert line.startswith(f"{setting} (environment): ")
    assert reason in line


@pytest.mark.parametrize(
    "setting",
    [
        "NCCL_MAX_NCHANNELS=32",
        "NCCL_P2P_DISABLE=0",
        "NCCL_NET=IB",
        "NCCL_IB_HCA=mlx5_ib",
        "NCCL_IB_HCA=^docker0",
        "NCCL_ALGO=",
        "NCCL_DEBUG=WARN",
        "NCCL_NVLS_ENABLE=0",
        "PATH=/bin",
    ],
)
def test_other_settings_are_not_reported(setting: str) -> None:
    name, _, value = setting.partition("=")
    assert explained({name: value}) == []


def test_what_the_node_type_sets_is_right_there() -> None:
    """GB200 nodes need NCCL_SHM_DISABLE=1."""
    assert explained({"NCCL_SHM_DISABLE": "1"}, {"NCCL_SHM_DISABLE": "1"}) == []


def test_other_values_than_the_node_types_are_named() -> None:
    planned = {"NCCL_IB_QPS_PER_CONNECTION": "4", "NCCL_TOPO_FILE": "/opt/topo.xml"}
    assert explained({"NCCL_IB_QPS_PER_CONNECTION": "1"}, planned) == [
        "NCCL_IB_QPS_PER_CONNECTION=1 (environment), but the node type sets 4",
        "NCCL_TOPO_FILE is not set in the task, but the node type sets /opt/topo.xml",
    ]


def test_the_environment_wins_over_files_and_the_first_file_over_the_next() -> None:
    files = [
        ("~/.nccl.conf", "NCCL_ALGO=Ring\n# NCCL_PROTO=LL\n"),
        ("/etc/nccl.conf", "NCCL_ALGO=Tree\nNCCL_MAX_NCHANNELS=4\nNCCL_IB_DISABLE=1\nnonsense\n"),
    ]
    settings = nccl_settings({"NCCL_IB_DISABLE": "0"}, files)
    assert {name: (each.value, each.origin) for name, each in settings.items()} == {
        "NCCL_IB_DISABLE": ("0", "environment"),
        "NCCL_ALGO": ("Ring", "~/.nccl.conf"),
        "NCCL_MAX_NCHANNELS": ("4", "/etc/nccl.conf"),
    }
    assert list(explain(settings, {}, NICS)) == [
        "NCCL_ALGO=Ring (~/.nccl.conf): forces an algorithm that NCCL would otherwise choose",
        "NCCL_MAX_NCHANNELS=4 (/etc/nccl.conf): few channels leave links idle",
    ]


def test_nics_that_are_down_or_gone_and_a_topology_file_that_is_missing(tmp_path: Path) -> None:
    for name, state in (("mlx5_ib0", "4: ACTIVE"), ("mlx5_ib1", "1: DOWN")):
        port = tmp_path / "sys/class/infiniband" / name / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "phys_state").write_text("5: LinkUp\n" if "ACTIVE" in state else "3: Disabled\n")
    settings = nccl_settings({"NCCL_TOPO_FILE": str(tmp_path / "none.xml")}, [])
    found = list(explain_host(settings, NICS[:3], tmp_path))
    assert (
        f"NCCL_TOPO_FILE={tmp_path}/none.xml cannot be read, so NCCL pairs GPUs with the wrong NICs" in found
    )
    assert [line for line in found if line.startswith("NIC")] == [
        "NIC mlx5_ib1 is DOWN, Disabled",
        "NIC mlx5_ib2 is missing",
    ]


def test_a_machine_without_nics_is_not_checked() -> None:
    assert list(explain_host({}, ())) == []
