"""A real sbatch takes every kind of golden script: it judges the directives without queueing a job."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcgen.stages import STAGES
from tests.rendering.golden import CASES, rendered
from tests.slurm.cluster import SlurmCluster, missing_slurm

EVERY_STAGE = ("azure-ndv5-pyxis", "local-none")
"""A case of each shipped profile. The runtime decides no directive, so of the others the largest job is enough."""
PLAIN = [
    pytest.param(
        case,
        stage,
        id=f"{case}-{stage}",
        marks=[]
        if case == EVERY_STAGE[0] or (case, stage) == (EVERY_STAGE[1], "train")
        else [pytest.mark.slow],
    )
    for case in CASES
    if case in EVERY_STAGE or case.startswith("azure")  # jobs of other sites need nodes like theirs
    for stage in (STAGES if case in EVERY_STAGE else ("train",))
]
LARGEST = 16
"""Nodes of the largest golden job."""


@pytest.fixture(scope="module")
def large_cluster() -> Iterator[SlurmCluster]:
    """As many nodes as the golden jobs ask for, all of them known to slurmctld alone, and Azure's partition."""
    if (reason := missing_slurm()) is not None:
        pytest.skip(reason)
    with SlurmCluster(num_nodes=0, num_cloud_nodes=LARGEST, partitions=("gpu", "hpc")) as cluster:
        yield cluster


@pytest.mark.parametrize(("case", "stage"), PLAIN)
def test_sbatch_accepts_it(case: str, stage: str, large_cluster: SlurmCluster, tmp_path: Path) -> None:
    script = rendered(case, stage)
    judged = large_cluster.run("sbatch", "--test-only", input=script, cwd=tmp_path)
    assert re.search(r"Job \d+ to start at ", judged.stderr)
    partition = re.search(r"^#SBATCH --partition=(.*)$", script, re.MULTILINE)
    assert f" in partition {partition[1] if partition else 'gpu'}" in judged.stderr
    nodes = re.search(r"^#SBATCH --nodes=(\d+)$", script, re.MULTILINE)
    assert nodes is not None
    assert num_hosts(judged.stderr) == int(nodes[1])


def num_hosts(judgement: str) -> int:
    """Number of nodes in a list of sbatch: cloud-3, cloud-[1-16]."""
    found = re.search(r" on nodes cloud-(?:\[(\d+)-(\d+)\]|\d+) ", judgement)
    assert found is not None
    return int(found[2]) - int(found[1]) + 1 if found[1] else 1


def test_sbatch_would_refuse_a_job_that_is_too_large(large_cluster: SlurmCluster, tmp_path: Path) -> None:
    """So being accepted says something."""
    script = rendered("azure-ndv5-pyxis", "train")
    for asked, wrong in ((f"--nodes={LARGEST}", f"--nodes={LARGEST + 1}"), ("per-node=8", "per-node=9")):
        changed = script.replace(asked, wrong)
        assert changed != script
        assert (
            large_cluster.run("sbatch", "--test-only", input=changed, cwd=tmp_path, check=False).returncode
            != 0
        )
