"""The real Slurm that every test in this folder may use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.cluster import SlurmCluster, missing_slurm


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    """Two nodes with 8 GPUs each, started once for all tests; each test waits for the jobs it submits."""
    if (reason := missing_slurm()) is not None:
        pytest.skip(reason)
    with SlurmCluster() as cluster:
        yield cluster
