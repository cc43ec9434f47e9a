"""How long before the time limit a job must be warned, so that its checkpoint is written in time."""

from __future__ import annotations

import math

from hpcgen.planning.model_size import checkpoint_bytes
from trainer.contract.config import TrainerConfig
from trainer.contract.flops import flops_per_iteration

ASSUMED_MFU = 0.2
"""A slow step: half of what these layouts reach."""
ASSUMED_GPU_TFLOPS = 20.0
"""One GPU whose peak nobody names, as in fp32."""
ASSUMED_CPU_TFLOPS = 0.02
"""One core, fp32."""
ASSUMED_FP8_MFU = 0.1
"""The same of the FP8 peak, which only the matrix products of the layers come near."""
ASSUMED_WRITE_GB_S = 1.0
ASSUMED_RANK_WRITE_GB_S = 1.0
"""One process that writes its part."""
LEAD_MARGIN_S = 60
"""Slurm delivers the signal up to 10 s early, and 30 s after the limit it kills."""


def save_time_s(trainer: TrainerConfig, write_gb_s: float | None) -> float:
    """Seconds to write one checkpoint: its bytes over the bandwidth of the storage (GB/s), or of all ranks.

    Every rank writes an equal part, so that few ranks are slower than fast storage.
    """
    ranks_gb_s = trainer.world_size * ASSUMED_RANK_WRITE_GB_S
    gb_s = min(write_gb_s or ASSUMED_WRITE_GB_S, ranks_gb_s)
    return checkpoint_bytes(trainer.model, trainer.training.precision) / (gb_s * 1e9)


def staged_bytes(trainer: TrainerConfig) -> int:
    """Bytes of host memory that hold a copy of a rank's part of a save, from the first save on.

    A save that is waited for copies it as well: the thread that writes is the same.
    """
    return checkpoint_bytes(trainer.model, trainer.training.precision) // trainer.world_size


def slow_step_s(trainer: TrainerConfig) -> float:
    """Seconds of a slow step of global_batch_size: its FLOPs at ASSUMED_MFU of the devices' peak."""
    mfu = ASSUMED_FP8_MFU if trainer.training.fp8 else ASSUMED_MFU
    unknown = ASSUMED_GPU_TFLOPS if trainer.device == "cuda" else ASSUMED_CPU_TFLOPS
    tflops = mfu * trainer.peak_tflops if trainer.peak_tflops else unknown
    return flops_per_iteration(trainer) / (trainer.world_size * tflops * 1e12)


def evaluation_s(trainer: TrainerConfig, step_s: float) -> float:
    """Seconds of an evaluation, which a warning may find running: forward passes, a third of a step each."""
    return trainer.training.eval_iters * step_s / 3 if trainer.training.eval_interval else 0.0


def num_saves(trainer: TrainerConfig) -> int:
    """Checkpoints of the whole run, about: by steps and by the clock, and one at the end.

    The usual step takes half as long as a slow one.
    """
    steps, checkpoint = trainer.training.train_iters, trainer.checkpoint
    by_steps = steps / checkpoint.save_interval if checkpoint.save_interval else 0
    by_clock = 0.0
    if checkpoint.save_interval_minutes:
        by_clock = steps * slow_step_s(trainer) / 2 / (60 * checkpoint.save_interval_minutes)
    return math.ceil(max(by_steps, by_clock, 1))


def signal_lead_s(step_s: float, save_s: float, evaluation_s: float) -> int:
    """Seconds from the warning to the time limit, in tens: a margin, twice the slowest step with its save, and an
    evaluation that may stand between them. An asynchronous save may be under way, which the last one waits for."""
    return math.ceil((LEAD_MARGIN_S + 2 * (step_s + save_s) + evaluation_s) / 10) * 10


def shortest_time_s(lead_s: int, startup_s: int, step_s: float, save_s: float) -> int:
    """The least time limit in which a life gets anywhere: start up, load, take a step, be warned; whole minutes."""
    return math.ceil((startup_s + save_s + step_s + lead_s) / 60) * 60
