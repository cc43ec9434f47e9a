"""Configurations of nccl-test and node-health jobs for hpcgen's node types."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from hpcgen import api
from hpcgen.config.loader import load_cluster_run
from hpcgen.run_plan.stage import StagePlan
from trainer.contract.config import from_dict
from trainer.contract.health import NcclTestConfig, NodeHealthConfig

GIB = 2**30


def plan(stage: str, overrides: Sequence[str] = ()) -> StagePlan:
    run = load_cluster_run("azure-ndv5", "/shared/checks", overrides)
    return api.plan(run, [stage]).stages[stage]


def nccl_test(*overrides: str) -> NcclTestConfig:
    text = plan("nccl-test", overrides).files["nccl-test.config.json"]
    return from_dict(NcclTestConfig, json.loads(text), "plan")


def test_the_fabric_is_measured_up_to_the_message_that_thresholds_are_for() -> None:
    config = nccl_test("slurm.nccl_test.nodes=4")
    assert config.sizes_bytes == tuple(2**20 * 4**power for power in range(8))
    assert config.sizes_bytes[-1] == 16 * GIB
    assert (config.nodes, config.ranks_per_node, config.gpus_per_node) == (4, 8, 8)
    assert config.nics == tuple(f"mlx5_ib{index}" for index in range(8))
    assert config.baseline == "/shared/checks/nccl-baseline.json"
    assert {(each.nvls, each.collnet) for each in config.thresholds if each.min_nodes > 1} == {(True, True)}


def test_a_job_gets_the_node_types_values_even_if_they_are_overridden() -> None:
    config = nccl_test('environment.NCCL_MIN_NCHANNELS="4"')
    assert config.environment["NCCL_MIN_NCHANNELS"] == "32"
    assert config.environment["NCCL_TOPO_FILE"] == "/opt/microsoft/ndv5-topo.xml"
    assert not [name for name in config.environment if not name.startswith("NCCL_")]


def test_a_site_with_a_shared_baseline_has_its_directory_mounted(tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("extends: azure-ndv5\nnccl_baseline: /shared/hpcgen/baseline.json\n")
    stage = api.plan(load_cluster_run(str(site), "/shared/checks"), ["nccl-test"]).stages["nccl-test"]
    assert stage.container is not None
    assert "/shared/hpcgen" in [mount.source for mount in stage.container.mounts]
    assert "/shared/hpcgen" in stage.directories


def test_a_node_is_checked_against_its_type() -> None:
    stage = plan("node-health")
    assert stage.values["node_expectations"] == [
        "gpus=8",
        *(f"nic=mlx5_ib{index}:400" for index in range(8)),
        "memlock=unlimited",
        "memory_mb=1819317-2010825",
        "nvme=8",
        "scratch=10:/nvme",
    ]
    config = from_dict(NodeHealthConfig, json.loads(stage.files["node-health.config.json"]), "plan")
    assert (config.peak_tflops, config.host_device_gb_s, config.peer_gb_s) == (989.0, 48.0, 335.0)
    assert (config.all_reduce_bytes, config.ranks_per_node) == (16 * GIB, 8)


def test_a_node_without_gpus_needs_none() -> None:
    run = load_cluster_run("local", "/shared/checks")
    stage = api.plan(run, ["node-health"]).stages["node-health"]
    assert stage.values["node_expectations"] == ["scratch=10:/tmp"]
