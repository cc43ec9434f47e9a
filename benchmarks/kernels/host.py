"""Time that the host needs to launch a layer, forward and backward, measured in runs of the real trainer.

Samples of 64 tokens leave the GPU almost nothing to do. Two runs differ in their number of layers only, so that the
difference of their steps is the time of these layers.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks import train
from benchmarks.train_cases import FP8, GRAPHS, TP2_SP, Case

MICROBATCHES = 8
LAYERS = (4, 12)
STEPS = 12
SMALL = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_query_groups": 8,
    "ffn_hidden_size": 2048,
    "seq_length": 64,
    "vocab_size": 50257,
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
}
KINDS = (
    # layer, tensor_parallel, graphs, precision
    ("dense", False, False, "bf16"),
    ("dense", False, True, "bf16"),
    ("dense", False, False, "fp8"),
    ("experts", False, False, "bf16"),
    ("dense", True, False, "bf16"),
    ("dense", True, True, "bf16"),
    ("experts", True, False, "bf16"),
)
EXPERTS = {"num_moe_experts": 8, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.01}


def jobs(gpus: int) -> list[dict[str, Any]]:
    """The rows to measure on `gpus` GPUs, without their times."""
    keys = ("layer", "tensor_parallel", "graphs", "precision")
    rows = [dict(zip(keys, kind, strict=True)) for kind in KINDS]
    return [row for row in rows if gpus_of(row) <= gpus]


def gpus_of(job: dict[str, Any]) -> int:
    """Number of GPUs of a row's runs."""
    return 2 if job["tensor_parallel"] else 1


def cases(job: dict[str, Any]) -> list[Case]:
    """The two runs of a row."""
    layout = (TP2_SP if job["tensor_parallel"] else {}) | (
        {"expert_model_parallel_size": 1} if job["layer"] == "experts" else {}
    )
    training = (GRAPHS if job["graphs"] else {}) | (FP8 if job["precision"] == "fp8" else {})
    return [
        Case(
            f"{job['layer']}-{layers}",
            SMALL | {"num_layers": layers} | (EXPERTS if job["layer"] == "experts" else {}),
            1,
            MICROBATCHES,
            gpus_of(job),
            layout,
            training,
        )
        for layers in LAYERS
    ]


def step_s(case: Case, corpus: Path, scratch: Path, environment: dict[str, str]) -> float:
    """Median time of the steps of a run."""
    arguments = argparse.Namespace(one_rank=False, steps=STEPS, environment=environment)
    result = train.run_trainer(case, train.configuration(case, corpus, scratch), arguments)
    return float(result["step_s"])


def row(job: dict[str, Any], steps: list[float]) -> dict[str, Any]:
    """The row with the time of one layer and microbatch."""
    fewer, more = steps
    return job | {"us": (more - fewer) / ((LAYERS[1] - LAYERS[0]) * MICROBATCHES) * 1e6}
