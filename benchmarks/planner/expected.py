"""A table of expected performance from a public guide to Megatron-LM, next to what its layouts would do.

The guide gives layouts of GPT models from 7B to 1T on H100s, with MFU and throughput.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass

from benchmarks.planner.predictions import predict
from benchmarks.planner.published import DATA, configurations
from hpcgen.planning.memory import estimate_memory
from trainer.contract.model.flops import flops_per_iteration


@dataclass(frozen=True)
class Expected:
    """A row of the guide, and the prediction for its layout."""

    configuration: str
    layout: str
    mfu: float
    tokens_s: float
    """Throughput of the guide. It does not say whether of a GPU or of all."""
    implied_mfu: float
    """MFU if tokens_s is of all GPUs."""
    implied_mfu_per_gpu: float
    """MFU if tokens_s is of each GPU."""
    predicted_mfu: float
    predicted_tokens_s: float
    """Sum over all GPUs."""
    memory_gib: float


def expected() -> list[Expected]:
    """The rows of the guide."""
    with (DATA / "expected.csv").open(encoding="utf-8", newline="") as file:
        return [
            _row(row["configuration"], float(row["mfu"]), float(row["tokens_s"]))
            for row in csv.DictReader(file)
        ]


def _row(name: str, mfu: float, tokens_s: float) -> Expected:
    configuration = configurations()[name]
    planned = configuration.planned
    trainer, layout = planned.trainer, planned.setup.layout
    tokens = trainer.training.global_batch_size * trainer.model.seq_length
    peak = layout.world_size * planned.machine.peak_flops[trainer.training.precision]
    share_per_token = flops_per_iteration(trainer) / tokens / peak  # MFU of one token per second
    predicted_tokens_s = tokens / predict(configuration).step_s
    return Expected(
        name,
        str(layout),
        mfu,
        tokens_s,
        share_per_token * tokens_s,
        share_per_token * tokens_s * layout.world_size,
        share_per_token * predicted_tokens_s,
        predicted_tokens_s,
        estimate_memory(planned.setup).total_gib,
    )
