"""Names in the lines of metrics.jsonl that describe steps and evaluations."""

from __future__ import annotations

import re

from trainer.contract.files.metrics_times import PAUSES

NUMBERS_OF_STEP = (
    "time",
    "steps",
    "loss",
    "grad_norm",
    "lr",
    "loss_scale",
    "batch_size",
    "consumed_samples",
    "consumed_tokens",
    "step_time_s",
    "tokens_per_s",
    "model_tflops_per_device",
    "mfu",
    "packing_efficiency",
    "peak_memory_gib",
    "data_wait_s",
    "communication_s",
    "update_s",
    "idle_s",
    "skipped",
    "moe_max_load",
    "moe_min_load",
    "moe_dropped",
    *PAUSES,
)
"""Numeric fields of a step that every reader knows."""

OBJECTIVE = "objective"
"""Column for what a step minimizes with `training.loss`."""
OUTPUT_Z_LOSS = "output_z_loss"
"""Column for `training.z_loss_coeff`. The z-loss of routers is `z_loss`, as in Megatron-LM."""

OF_OBJECTIVE = (OBJECTIVE, OUTPUT_Z_LOSS)

TAKEN = frozenset(
    (
        *NUMBERS_OF_STEP,
        *OF_OBJECTIVE,
        "event",
        "iteration",
        "split",
        "samples",
        "stage",
        "compute_s",
        "peak_reserved_gib",
        "moe_max_load_by_layer",
        "load_balancing_loss",
        "seq_load_balancing_loss",
        "z_loss",
    )
)
"""Names that the trainer itself writes, besides those of MTP layers."""


def own_name_problem(name: str) -> str:
    """Why the user's own loss or metric cannot be called `name`. Empty if it can be."""
    if re.fullmatch(r"[A-Za-z]\w{0,63}", name, re.ASCII) is None:
        return "must be 1 to 64 letters, digits or _, starting with a letter"
    return "is a column of the trainer itself" if name in TAKEN or is_mtp_loss(name) else ""


def is_mtp_loss(name: str) -> bool:
    """True for the column of a layer of multi-token prediction."""
    return re.fullmatch(r"mtp_\d+_loss", name, re.ASCII) is not None
