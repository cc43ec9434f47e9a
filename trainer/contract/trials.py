"""Trials of a training: which configurations train some steps, and the result of each."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainer.contract.config import Count, NonNegative, TrainerConfig
from trainer.contract.files.hashing import sha256
from trainer.contract.record import config_section

DIRECTORY = "tune"
"""Directory with the results, in the run directory. The result of a trial is KEY.json."""

Status = Literal["measured", "out of memory", "failed", "hung", "lost"]
"""The end of a trial. `failed`: a rank says why. `lost`: the ranks ended, and none says why."""


@config_section
class TrialConfig:
    """A configuration that trains some steps."""

    name: str
    """Name for people, such as "TP2 PP4 DP4 MBS1"."""
    key: str
    """Name of the result's file. It depends on everything that the result depends on."""
    overrides: tuple[str, ...] = ()
    """Differences from the run file, as assignments for --set. Empty for the run itself."""
    trainer: TrainerConfig
    """The training."""
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    """Variables of its ranks that differ from those of the job. Empty values are not set."""


@config_section
class TrialsConfig:
    """Configuration of `python -m trainer.trials`. hpcgen writes it as JSON, like `trainer.contract.config`."""

    warmup_steps: NonNegative
    """Steps before the measured ones."""
    steps: Count
    """Measured steps."""
    time_limit_s: Count
    """Time after which a trial without a result has hung (seconds)."""
    trials: tuple[TrialConfig, ...]
    """The trials, in their order."""


def trial_key(*parts: object) -> str:
    """The key of a trial that depends on `parts`, which JSON can express."""
    return sha256(json.dumps(parts, sort_keys=True).encode())[:16]


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of a rank (GiB)."""

    allocated_gib: float | None = None
    """Most memory of tensors at one time (torch.cuda.max_memory_allocated). None on a CPU."""
    reserved_gib: float | None = None
    """Most memory that torch has reserved. None on a CPU."""
    in_use_gib: float
    """Memory of the process, including what torch reserves, CUDA itself and libraries. On a CPU, its largest resident
    set."""
    device_gib: float | None = None
    """Memory of the device. None on a CPU."""


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """Measurements of a trial, or the reason why there are none."""

    status: Status
    name: str = ""
    """Name of the trial. Empty if no rank has written the result."""
    job: str = ""
    """ID of the job. Its directory has the log of the trial, KEY.log."""
    nodes: tuple[str, ...] = ()
    """Nodes of the ranks. For a failure that one rank reports, its node."""
    reason: str = ""
    """Why nothing was measured."""
    step_s: float | None = None
    """Median time of a step (seconds)."""
    all_step_s: tuple[float, ...] = ()
    """Time of each measured step (seconds)."""
    tokens_per_s: float | None = None
    """Tokens of all ranks per second, at the median time."""
    compute_s: float | None = None
    """Forward and backward passes of a step, on the rank that computes longest (seconds)."""
    communication_s: float | None = None
    """Reduction of gradients and gathering of parameters in a step on that rank, unless overlapped (seconds)."""
    update_s: float | None = None
    """The optimizer's computation in a step on that rank (seconds)."""
    idle_s: float | None = None
    """The rest of the step on that rank: waiting for other ranks, the host and data (seconds)."""
    fullest_rank: int | None = None
    """The rank with the most memory in use."""
    allocated_gib: float | None = None
    """See `Memory`, of the fullest rank, or of the rank that did not fit."""
    reserved_gib: float | None = None
    in_use_gib: float | None = None
    device_gib: float | None = None


def result_path(run_dir: str, key: str) -> Path:
    """The file with the result of a trial."""
    return Path(run_dir) / DIRECTORY / f"{key}.json"


def result_text(result: TrialResult) -> str:
    """Content of a result's file."""
    return json.dumps(dataclasses.asdict(result), indent=1) + "\n"
