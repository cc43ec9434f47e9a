"""Estimates of checkpoint and step times, and the resulting lead of the signal before the time limit."""

from __future__ import annotations

import math

from trainer.contract.config import CheckpointConfig, TrainerConfig
from trainer.contract.model.adapters import adapter_parameter_count
from trainer.contract.model.flops import flops_per_iteration
from trainer.contract.model.frozen import frozen
from trainer.contract.model.model_size import layers_parameter_count, mtp_parameter_count, parameter_count
from trainer.contract.optimizers import optimizer_of
from trainer.contract.optimizers.kind import AVERAGE_BYTES
from trainer.contract.validation import batches_per_evaluation

ASSUMED_MFU = 0.2
"""MFU of a slow step: half of what typical layouts reach."""
ASSUMED_GPU_TFLOPS = 20.0
"""Throughput of a GPU whose peak is unknown, such as in fp32."""
ASSUMED_CPU_TFLOPS = 0.02
"""Throughput of one core in fp32."""
ASSUMED_FP8_MFU = 0.1
"""MFU of a slow step relative to the FP8 peak, which only the matrix products of the layers approach."""
ASSUMED_WRITE_GB_S = 1.0
ASSUMED_RANK_WRITE_GB_S = 1.0
"""Write bandwidth of one process."""
LEAD_MARGIN_S = 60
"""Safety margin (seconds). Slurm delivers the signal up to 10 s early, and kills the job 30 s after the limit."""


def checkpoint_bytes(trainer: TrainerConfig) -> int:
    """Size of a checkpoint of the resolved `trainer` in bytes.

    It has all weights, and the state of the optimizer and the average (training.ema_decay) of what is trained. Of a run
    with adapters, it has only the adapters.
    """
    model, optimizer = trainer.model, optimizer_of(trainer.optimizer)
    of_weight = 4 if trainer.training.precision == "fp32" else 2
    of_average = AVERAGE_BYTES if trainer.training.ema_decay else 0
    of_layer, of_table = (
        optimizer.state_bytes("layer") + of_average,
        optimizer.state_bytes("table") + of_average,
    )
    if trainer.lora.rank is not None:
        return adapter_parameter_count(trainer.lora, model) * (of_weight + of_layer)
    in_layers = layers_parameter_count(model) + (model.mtp_num_layers or 0) * mtp_parameter_count(model)
    in_tables = parameter_count(model) - in_layers
    weights = (in_layers + in_tables) * of_weight
    if trainer.training.freeze:
        has_engine = trainer.training.transformer_impl != "torch"
        kept = frozen(model, trainer.training.freeze, transformer_engine=has_engine)
        in_layers -= sum(kept.layers) + sum(kept.experts)
        in_tables -= kept.embedding + kept.positions + kept.output + kept.final_norm
    return weights + in_layers * of_layer + in_tables * of_table


def save_gb_s(trainer: TrainerConfig, write_gb_s: float | None) -> float:
    """The bandwidth of the storage (GB/s) or of all ranks, whichever is lower.

    Every rank writes an equal part, so with few ranks the ranks are the limit.
    """
    return min(write_gb_s or ASSUMED_WRITE_GB_S, trainer.world_size * ASSUMED_RANK_WRITE_GB_S)


def save_time_s(trainer: TrainerConfig, write_gb_s: float | None) -> float:
    """Seconds to write one checkpoint."""
    size = checkpoint_bytes(trainer)
    return size / (save_gb_s(trainer, write_gb_s) * 1e9)


def save_limit(gb_s: float, write_gb_s: float | None) -> str:
    """`save_gb_s`, and what limits it: the storage, an assumption about the storage, or an assumption about the
    processes."""
    if gb_s < (write_gb_s or ASSUMED_WRITE_GB_S):
        more = f"storage_write_gb_s = {write_gb_s:g} of the profile allows more"
        return f"{gb_s:g} GB/s (assumed {ASSUMED_RANK_WRITE_GB_S:g} GB/s per process; {more})"
    if write_gb_s is None:
        return f"{gb_s:g} GB/s (assumed; set storage_write_gb_s in the profile)"
    return f"{gb_s:g} GB/s (storage_write_gb_s of the profile)"


def staged_bytes(trainer: TrainerConfig) -> int:
    """Bytes of host memory for the copy of a rank's part of a checkpoint, used from the first save on.

    A synchronous save copies it as well, because the same thread writes it.
    """
    return checkpoint_bytes(trainer) // trainer.world_size


def slow_step_s(trainer: TrainerConfig) -> float:
    """Seconds of a slow step: the FLOPs of a global batch at ASSUMED_MFU of the devices' peak.

    An upper bound for devices of any kind, for times that must not be too short, such as the lead of the signal.
    `hpcgen.planning.step_time` predicts the likely time; a prediction above this bound results in a warning.
    """
    mfu = ASSUMED_FP8_MFU if trainer.training.fp8 else ASSUMED_MFU
    unknown = ASSUMED_GPU_TFLOPS if trainer.device == "cuda" else ASSUMED_CPU_TFLOPS
    tflops = mfu * trainer.peak_tflops if trainer.peak_tflops else unknown
    return flops_per_iteration(trainer) / (trainer.world_size * tflops * 1e12)


def evaluation_s(trainer: TrainerConfig, step_s: float) -> float:
    """Seconds of an evaluation, which may be running when the signal arrives. A forward pass is a third of a step."""
    if not trainer.training.eval_interval:
        return 0.0
    answers_s = trainer.answers.max_seconds if trainer.answers is not None else 0.0
    return answers_s + batches_per_evaluation(trainer) * step_s / 3


def num_saves(checkpoint: CheckpointConfig, num_steps: int, step_s: float) -> int:
    """The approximate number of checkpoints of `num_steps` steps: by steps, by the clock, and one at the end."""
    by_steps = num_steps / checkpoint.save_interval if checkpoint.save_interval else 0
    minutes = checkpoint.save_interval_minutes
    by_clock = num_steps * step_s / (60 * minutes) if minutes else 0
    return math.ceil(max(by_steps, by_clock, 1))


def signal_lead_s(step_s: float, save_s: float, evaluation_s: float) -> int:
    """Seconds from the signal to the time limit, rounded up to tens: a margin, two slow steps with their saves, and an
    evaluation between them. The second save accounts for an asynchronous save that must finish first."""
    return math.ceil((LEAD_MARGIN_S + 2 * (step_s + save_s) + evaluation_s) / 10) * 10


def shortest_time_s(lead_s: int, startup_s: int, step_s: float, save_s: float) -> int:
    """The shortest time limit in which an attempt makes progress, in full minutes: start-up, load, step and lead."""
    return math.ceil((startup_s + save_s + step_s + lead_s) / 60) * 60
