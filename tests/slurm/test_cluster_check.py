"""`hpcgen cluster check --run` on a real Slurm: one job measures, and its figures are written into the profile."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hpcgen.config import document as documents
from tests.patience import PATIENCE_S
from tests.slurm.cluster import SlurmCluster
from tests.slurm.conftest import HPCGEN, hpcgen

PROFILE = """\
# two machines
extends: local
python: PYTHON
startup_time_s: 1        # a guess
slurm: {partition: gpu}  # the only one
"""


@pytest.fixture
def profile(tmp_path: Path, stand_in: str) -> Path:
    """The file of the profile `uni`, which other users read."""
    file = tmp_path / "clusters" / "uni.yaml"
    file.parent.mkdir()
    file.write_text(PROFILE.replace("PYTHON", stand_in))
    file.chmod(0o644)
    return file


def test_a_job_measures_and_its_figures_are_written(slurm_cluster: SlurmCluster, profile: Path) -> None:
    before, directory = profile.read_text(), profile.parents[1]
    shown = hpcgen("cluster", "check", "uni", "--run", "--write", cwd=directory, env=slurm_cluster.env)
    for figure in ("start-up ", "all-reduce ", "run directory ", "scratch "):
        assert f"\n{figure}" in shown
    assert "not measured: GPUs and their network: node type cpu has no GPUs" in shown
    after = profile.read_text()
    written = documents.read(profile).values
    assert written["storage_write_gb_s"] > 0
    assert written["startup_time_s"] >= 1
    # nothing else has changed
    lines = [line for line in after.splitlines() if "storage_write_gb_s" not in line]
    kept = [
        line.replace(f"startup_time_s: {written['startup_time_s']} ", "startup_time_s: 1 ") for line in lines
    ]
    assert kept == before.splitlines()
    assert profile.stat().st_mode & 0o777 == 0o644


def test_an_interrupt_cancels_the_job_that_waits(slurm_cluster: SlurmCluster, profile: Path) -> None:
    """Three of two nodes: the job waits until it is canceled."""
    process = subprocess.Popen(
        [*HPCGEN, "cluster", "check", "uni", "--run", "--nodes=3"],
        cwd=profile.parents[1],
        env=slurm_cluster.env,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    submitted = next(line for line in process.stderr if line.startswith("submitted job "))
    job_id = submitted.split()[2].rstrip(";")
    assert f"job {job_id}: PENDING" in next(process.stderr)
    process.terminate()
    _, rest = process.communicate(timeout=PATIENCE_S)
    assert f"canceled job {job_id}" in rest
    assert slurm_cluster.wait(job_id) == "CANCELLED"
