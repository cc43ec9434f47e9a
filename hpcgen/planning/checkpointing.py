"""How long before the time limit a job must be warned, so that its checkpoint is written in time."""

from __future__ import annotations

import math

from hpcgen.planning.model_size import checkpoint_bytes
from trainer.config import TrainerConfig
from trainer.flops import flops_per_iteration

ASSUMED_MFU = 0.2
"""A slow step: half of what these layouts reach."""
ASSUMED_CPU_TFLOPS = 0.02
"""One core, fp32."""
ASSUMED_WRITE_GB_S = 1.0
SAVE_EVERY_S = 30 * 60
"""What a failure may cost."""
MOST_STEPS_UNSAVED = 1000
LEAD_MARGIN_S = 60
"""Slurm delivers the signal up to 10 s early, and 30 s after the limit it kills."""


def save_time_s(trainer: TrainerConfig, write_gb_s: float | None) -> float:
    """Seconds to write one checkpoint: its bytes over the bandwidth of the storage (GB/s)."""
    return checkpoint_bytes(trainer.model, trainer.training.precision) / (
        (write_gb_s or ASSUMED_WRITE_GB_S) * 1e9
    )


def slow_step_s(trainer: TrainerConfig) -> float:
    """Seconds of a slow step: its FLOPs at ASSUMED_MFU of the devices' peak."""
    tflops = ASSUMED_MFU * trainer.peak_tflops if trainer.peak_tflops else ASSUMED_CPU_TFLOPS
    return flops_per_iteration(trainer) / (trainer.world_size * tflops * 1e12)


def evaluation_s(trainer: TrainerConfig, step_s: float) -> float:
    """Seconds of an evaluation, which a warning may find running: forward passes, a third of a step each."""
    return trainer.training.eval_iters * step_s / 3 if trainer.training.eval_interval else 0.0


def save_interval(step_s: float) -> int:
    """Steps between checkpoints so that one is written about every SAVE_EVERY_S, when nobody says otherwise.

    `step_s` is a slow step's time; the usual one takes half as long.
    """
    return max(1, min(MOST_STEPS_UNSAVED, round(SAVE_EVERY_S / (step_s / 2))))


def signal_lead_s(step_s: float, save_s: float, evaluation_s: float) -> int:
    """Seconds from the warning to the time limit, in tens: a margin, twice the slowest step with its save, and an
    evaluation that may stand between them."""
    return math.ceil((LEAD_MARGIN_S + 2 * (step_s + save_s) + evaluation_s) / 10) * 10


def shortest_time_s(lead_s: int, startup_s: int, step_s: float, save_s: float) -> int:
    """The least time limit in which a life gets anywhere: start up, load, take a step, be warned; whole minutes."""
    return math.ceil((startup_s + save_s + step_s + lead_s) / 60) * 60
