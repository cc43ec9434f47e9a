"""nccl-test and node-health on four real GPUs (make test-gpu): the rendered scripts, with stand-ins for Slurm.

    pytest -m gpu -s tests/trainer/health/test_gpu.py

prints what the jobs logged.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.standins import OF_NODE, Batch, batch
from tests.trainer.health.scripts import ROOT, render, tasks, write_site

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA devices"),
]

NODE_TYPE: dict[str, Any] = {
    "description": "four GPUs of this machine",
    "device": "cuda",
    "gpus_per_node": 4,
    "exclusive": False,
    "environment": {
        # what a machine with several users of one NVSwitch needs: without multicast groups, as in training
        "NCCL_NVLS_ENABLE": {"value": "0", "why": "Rings over NVLink.", "source": "Megatron-Bridge recipes"},
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": {"value": "1", "why": "As above.", "source": "PyTorch"},
        "NCCL_DEBUG": {"value": "WARN", "why": "Says what went wrong.", "source": "NCCL's documentation"},
    },
    "sources": {"device": "this machine", "gpus_per_node": "this machine", "environment": "Megatron-Bridge"},
}


@pytest.fixture(autouse=True)
def _in_its_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return write_site(tmp_path, NODE_TYPE, code_dir=str(ROOT), nccl_baseline=str(tmp_path / "baseline.json"))


def show(found: Batch) -> Batch:
    print(found.log)
    return found


def busbw(directory: Path, job_id: int) -> float:
    result = json.loads((directory / "run" / "jobs" / str(job_id) / "nccl-test.json").read_text())
    return float(result["samples"][-1]["busbw_gb_s"])


def test_four_gpus_pass_and_fail_by_name_when_nccl_is_crippled(site: Path, tmp_path: Path) -> None:
    first = show(batch(render("nccl-test", site), tmp_path, job_id=1))
    assert first.status == 0, first.log
    assert "recorded" in first.log
    second = show(batch(render("nccl-test", site), tmp_path, job_id=2))
    assert second.status == 0, second.log
    assert re.search(r"GB/s at 4 GiB: good \(expected \d+", second.log)
    crippled = render("nccl-test", site, ['environment.NCCL_MAX_NCHANNELS="2"'])
    third = show(batch(crippled, tmp_path, job_id=3))
    assert third.status == 1, third.log
    assert "FAIL, too low" in third.log
    assert (
        "POSSIBLE CAUSE: NCCL_MAX_NCHANNELS=2 (environment): few channels leave links idle; on every node"
        in third.log
    )
    print(
        f"4 GPUs: {busbw(tmp_path, 1):.1f} and {busbw(tmp_path, 2):.1f} GB/s; "
        f"with NCCL_MAX_NCHANNELS=2 {busbw(tmp_path, 3):.1f} GB/s"
    )
    assert busbw(tmp_path, 3) < 0.75 * busbw(tmp_path, 1)


def test_the_weak_one_of_two_nodes_is_named(tmp_path: Path) -> None:
    """Two GPUs each; NCCL takes the nodes for hosts, and one of them has lost NVLink."""
    limit = {"min_nodes": 2, "nvls": False, "collnet": False, "message_gib": 1, "fail_below_gb_s": 100000.0}
    node_type = NODE_TYPE | {
        "gpus_per_node": 2,
        "health": {"all_reduce": [{**limit, "source": "more than TCP on one machine gives"}]},
    }
    node_type["sources"] = {**NODE_TYPE["sources"], "health": "this test"}
    site = write_site(tmp_path, node_type, code_dir=str(ROOT))
    script = render("nccl-test", site, tasks("nccl-test", 2, 2))
    found = show(batch(script, tmp_path, ("n1", "n2"), environment={f"{OF_NODE}n2": "NCCL_P2P_DISABLE=1"}))
    assert found.status == 1, found.log
    assert re.search(r"WEAK NODE n2: [\d.]+ GB/s alone, compared with a median of [\d.]+", found.log), (
        found.log
    )
    assert (
        "POSSIBLE CAUSE: NCCL_P2P_DISABLE=1 (environment): GPUs of a node communicate through host memory"
        in found.log
    )
    assert "not NVLink; on n2" in found.log
    assert "--exclude=n2" in found.log


def test_a_node_of_four_gpus_is_checked(tmp_path: Path) -> None:
    node_type = NODE_TYPE | {"peak_tflops": {"bf16": 989}}
    node_type["sources"] = {**NODE_TYPE["sources"], "peak_tflops": "NVIDIA's data sheet"}
    site = write_site(tmp_path, node_type, code_dir=str(ROOT))
    found = show(batch(render("node-health", site), tmp_path))
    reports = tmp_path / "run" / "jobs" / "77" / "nodes-0"
    print((reports / "n1-host.json").read_text())
    assert "good" in found.log
    report = json.loads((reports / "n1-container.json").read_text())
    print(json.dumps(report, indent=1))
    assert report["ok"], found.log
    assert len(report["devices"]) == 4
    assert all(device["matmul_tflops"] > 500 and device["peer_gb_s"] > 100 for device in report["devices"])
    assert found.status == 0, found.log
