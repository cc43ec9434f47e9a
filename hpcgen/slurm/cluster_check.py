"""The job of `hpcgen cluster check --run`: stage nccl-test, which also measures the figures of a cluster profile."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hpcgen.config.node_type import NodeType
from hpcgen.config.profiles import Profile
from hpcgen.errors import JobFailed
from hpcgen.run_plan.plan import Plan
from hpcgen.slurm.job_files import job_directory
from hpcgen.text import harmless
from trainer.contract.record import record

STAGE = "nccl-test"
ARGUMENTS = ("--profile-figures",)
"""Options of the job's command."""
TIME_LIMIT = "15:00"
NUM_LINES = 20
"""Lines of the log that are shown if the job has no result."""
RESULT_DELAY_S = 10.0
"""Longest time after a job's end at which its files are visible here, as on NFS."""


def overrides(node_type: NodeType, nodes: int, partition: str | None) -> list[str]:
    """Settings of the job, as assignments."""
    section = "slurm.nccl_test"
    found = [f"{section}.nodes={nodes}", f"{section}.time={TIME_LIMIT}"]
    if partition is not None:
        found.append(f"{section}.partition={partition}")
    if nodes == 1 and node_type.gpus_per_node == 0:
        found.append(f"{section}.ntasks_per_node=2")  # one rank alone has nobody to send to
    return found


@record
class Measured:
    """Figures that the job has measured."""

    ok: bool
    """False if the bandwidth is too low or sums are wrong."""
    nodes: tuple[str, ...]
    tool: str
    software: str
    bandwidth_gb_s: float
    size_bytes: int
    storage_gb_s: float
    """Write rate to the run directory, of all nodes together."""
    scratch_gb_s: float
    """Write rate to scratch, of the slowest node."""
    startup_s: float | None
    """Time until all ranks had imported the trainer and met. None if a site's `main` does not measure it."""


def read_measured(plan: Plan, job_id: str) -> Measured:
    """The result of the job.

    Raises:
        JobFailed: it has none. The message contains the end of the log.
    """
    run_dir = Path(plan.config.paths.run_dir)
    result = job_directory(run_dir, job_id) / f"{STAGE}.json"
    deadline = time.monotonic() + RESULT_DELAY_S
    while not result.exists() and time.monotonic() < deadline:
        time.sleep(0.5)
    log = run_dir / f"{STAGE}-{job_id}.log"
    try:
        return _measured(json.loads(result.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise JobFailed(f"{end_of(log)}\njob {job_id} has no result; log: {log}") from error


def _measured(result: dict[str, Any]) -> Measured:
    figures, last = result["profile_figures"], result["samples"][-1]
    return Measured(
        ok=result["ok"],
        nodes=tuple(result["nodes"]),
        tool=result["tool"],
        software=result["software"],
        bandwidth_gb_s=last["busbw_gb_s"],
        size_bytes=last["size_bytes"],
        storage_gb_s=figures["storage_write_gb_s"],
        scratch_gb_s=figures["scratch_write_gb_s"],
        startup_s=figures["startup_s"],
    )


def end_of(log: Path) -> str:
    """The last lines of a log, or why it cannot be read."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError as error:
        return f"{log}: {error.strerror}"
    return harmless("\n".join(lines[-NUM_LINES:]), keep="\n\t")


def new_values(measured: Measured, profile: Profile) -> Iterator[tuple[str, float]]:
    """Yields the keys of the profile that the figures change, with their values.

    A training job also builds indices and a model, and loads a checkpoint, before its first step. So the measured
    start-up can only show that the profile's value is too short.
    """
    config = profile.config
    if (storage := _two_digits(measured.storage_gb_s)) != config.storage_write_gb_s:
        yield "storage_write_gb_s", storage
    if measured.startup_s is not None and measured.startup_s > config.startup_time_s:
        yield "startup_time_s", math.ceil(measured.startup_s)


def _two_digits(rate: float) -> float:
    """A rate rounded down to two significant digits."""
    scale: float = 10.0 ** (1 - math.floor(math.log10(rate)))
    return math.floor(rate * scale) / scale


def unmeasured(plan: Plan, nodes: Sequence[str]) -> Iterator[str]:
    """Yields what the job did not measure, with the reason."""
    node_type = plan.run.node_type
    if node_type.gpus_per_node == 0:
        yield f"GPUs and their network: node type {plan.run.cluster.node_type} has no GPUs"
    if plan.stages[STAGE].container is None:
        yield "a container: container.runtime is none"
    if len(nodes) == 1:
        yield "the network between nodes: the job had one node"
