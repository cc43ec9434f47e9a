"""`hpcgen doctor` on a real Slurm: what the login node can tell, and a job that compares the nodes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.patience import PATIENCE_S, wait_until
from tests.slurm.cluster import SlurmCluster
from tests.slurm.conftest import HPCGEN, profile_text

FI_INFO = """\
#!/bin/bash
echo "libfabric: 1.2${SLURMD_NODENAME#ndv5-}"
"""
"""A libfabric of another version on each node."""


@pytest.fixture
def site(slurm_cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_in: str) -> Path:
    """A directory with a profile whose containers are stand-ins, on nodes with different libfabric."""
    programs = tmp_path / "programs"
    programs.mkdir()
    container_program = (Path(__file__).parent / "stand_in_container.py").read_text().partition("\n")[2]
    for name, text in (("fi_info", FI_INFO), ("apptainer", f"#!{sys.executable} -IS\n{container_program}")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setitem(slurm_cluster.env, "PATH", f"{programs}:{slurm_cluster.env['PATH']}")
    monkeypatch.setitem(slurm_cluster.env, "STAND_IN_LOG", str(tmp_path / "noted"))
    (tmp_path / "gpt.sif").write_text("image")
    container = {"runtime": "apptainer", "image": str(tmp_path / "gpt.sif")}
    profile = profile_text(stand_in) + yaml.safe_dump({"slurm": {"partition": "gpu"}, "container": container})
    (tmp_path / "uni.yaml").write_text(profile)
    return tmp_path


def doctor(cluster: SlurmCluster, site: Path, *options: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit status, and the checks by name."""
    done = subprocess.run(
        [*HPCGEN, "doctor", "--cluster", "./uni.yaml", *options, "--json"],
        cwd=site,
        env=cluster.env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, {check["name"]: check for check in json.loads(done.stdout)["checks"]}


def test_the_login_node_and_a_job_tell_what_a_run_would_meet(slurm_cluster: SlurmCluster, site: Path) -> None:
    status, checks = doctor(slurm_cluster, site, "--nodes=2")
    assert checks["Slurm"]["state"] == "ok"
    assert checks["Slurm KillWait"]["found"].startswith("5 s between TERM and KILL")
    assert checks["partition gpu: nodes"]["found"].startswith("2 usable nodes of any kind of 2")
    assert checks["sbatch --test-only node-health"]["state"] == "ok"
    assert [checks[node]["state"] for node in ("ndv5-1", "ndv5-2")] == ["ok", "ok"]
    assert checks["container step"]["state"] == "ok"
    assert checks["clocks"]["state"] == "ok"
    assert "kernel" in checks["same versions"]["found"]
    assert checks["same libfabric"]["state"] == "failed"
    assert "ndv5-2 has 1.22; 1 other node: 1.21" in checks["same libfabric"]["found"]
    assert status == 1


def test_a_partition_that_slurm_lacks_is_named_before_any_job(
    slurm_cluster: SlurmCluster, site: Path
) -> None:
    status, checks = doctor(slurm_cluster, site, "--set", "slurm.node_health.partition=h100")
    assert (status, checks["partition h100"]["fix"]) == (1, "Use gpu.")
    assert "invalid partition" in checks["sbatch --test-only node-health"]["found"]


def test_states_of_nodes_are_told_apart(slurm_cluster: SlurmCluster, site: Path) -> None:
    def nodes() -> str:
        return str(doctor(slurm_cluster, site)[1]["partition gpu: nodes"]["found"])

    slurm_cluster.run("scontrol", "update", "NodeName=ndv5-1", "State=DRAIN", "Reason=test")
    reserve = (
        "StartTime=now Duration=10 User=root Nodes=ndv5-2 Flags=MAINT,IGNORE_JOBS ReservationName=repair"
    )
    slurm_cluster.run("scontrol", "create", "reservation", *reserve.split())
    try:
        wait_until(lambda: "in maintenance" in nodes(), nodes, timeout_s=PATIENCE_S, interval_s=0.5)
        assert nodes() == "0 usable nodes of any kind of 2 (1 drained, 1 in maintenance); the job needs 1"
        _, checks = doctor(slurm_cluster, site, "--set", "slurm.node_health.reservation=repair")
        found = checks["partition gpu: nodes"]["found"]
        assert found == "1 usable node of any kind of 2 (1 drained); the job needs 1"
    finally:
        slurm_cluster.run("scontrol", "delete", "ReservationName=repair")
        slurm_cluster.run("scontrol", "update", "NodeName=ndv5-1", "State=RESUME")
