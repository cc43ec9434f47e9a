"""A run's directory as the trainer leaves it, without the training: metrics, configuration, checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainer.contract.files import checkpoint_files

START = 1_760_000_000.0
STEP_S = 2.0

CONFIG: dict[str, Any] = {
    "device": "cuda",
    "world_size": 16,
    "peak_tflops": 989.0,
    "model": {"num_layers": 24, "hidden_size": 2048, "num_attention_heads": 16, "seq_length": 2048},
    "parallelism": {"tensor_model_parallel_size": 2},
    "training": {"micro_batch_size": 4, "global_batch_size": 256, "train_iters": 1000, "precision": "bf16"},
    "optimizer": {"lr": 3e-4, "lr_decay_style": "cosine", "weight_decay": 0.1},
    "checkpoint": {"save_interval": 100, "keep_last": 2, "keep_every": 500},
}


def write_run(directory: Path, events: Iterable[dict[str, Any]], name: str = "gpt", **config: Any) -> Path:
    """The directory, with its metrics and the configuration of one job."""
    job = directory / "jobs" / "4711"
    job.mkdir(parents=True)
    (job / "trainer.json").write_text(
        json.dumps({**CONFIG, **config, "name": name, "run_dir": str(directory)})
    )
    (directory / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return directory


def start(iteration: int = 0, time: float = START, **others: Any) -> dict[str, Any]:
    return {
        "event": "start",
        "iteration": iteration,
        "time": time,
        "name": "gpt",
        "world_size": 16,
        "device": "cuda",
        "hosts": ["ndv5-001", "ndv5-002"],
        "tp": 2,
        "pp": 1,
        "cp": 1,
        "dp": 8,
        "vpp": 1,
        "flop_formula": "megatron-lm: 3 x forward matrix products",
        "flops_per_sample": 1.6e13,
        "tokens_per_sample": 2048,
        "peak_tflops": 989.0,
        "precision": "bf16",
        "versions": {"torch": "2.13.0", "megatron-core": "0.16.1"},
        "train_iters": 1000,
        "checkpoint": None,
        "changed": [],
        "passed_over": [],
        "lost": None,
        **others,
    }


def step(iteration: int, **others: Any) -> dict[str, Any]:
    return {
        "event": "step",
        "iteration": iteration,
        "time": START + STEP_S * iteration,
        "steps": 1,
        "loss": 2.0 + 9.0 * math.exp(-iteration / 50),
        "grad_norm": 0.5 + 1 / iteration,
        "lr": 3e-4,
        "loss_scale": 1.0,
        "batch_size": 256,
        "consumed_samples": 256 * iteration,
        "step_time_s": STEP_S,
        "tokens_per_s": 262144.0,
        "model_tflops_per_device": 128.0,
        "mfu": 128 / 989,
        "peak_memory_gib": 61.5,
        "data_wait_s": 0.02,
        "communication_s": 0.2,
        "update_s": 0.1,
        "idle_s": 0.1,
        "compute_s": 1.58,
        "skipped": False,
        **others,
    }


def steps(first: int, last: int, **others: Any) -> list[dict[str, Any]]:
    return [step(iteration, **others) for iteration in range(first, last + 1)]


def write_checkpoint(directory: Path, iteration: int, payload: bytes = b"weights", **record: Any) -> Path:
    """A complete checkpoint of that iteration."""
    path = checkpoint_files.iteration_directory(directory, iteration)
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(payload)
    (path / checkpoint_files.METADATA).write_text("{}")
    (path / checkpoint_files.STARTED).write_text("2026-01-01 10:00:00+0000 on ndv5-001\n")
    content = {
        "format": checkpoint_files.FORMAT,
        "iteration": iteration,
        "consumed_samples": 256 * iteration,
        "time": START + STEP_S * iteration,
        "world_size": 16,
        "layout": {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 1,
            "context_parallel_size": 1,
        },
        "precision": "bf16",
        **{section: CONFIG[section] for section in ("model", "training", "optimizer")},
        "data": {"datasets": [{"prefix": "/data/corpus", "weight": None}]},
        "versions": {"torch": "2.13.0"},
        "files": {file.name: checkpoint_files.describe_file(file) for file in path.iterdir()},
        **record,
    }
    (path / checkpoint_files.COMPLETE).write_text(checkpoint_files.record_text(content))
    (directory / checkpoint_files.TRACKER).write_text(str(iteration))
    return path


def write_recorded_runs(directory: Path) -> None:
    """The runs that the documentation's commands look at: run-a with checkpoints, and run-b."""
    for name, lr in (("run-a", 3e-4), ("run-b", 1e-4)):
        events = [
            start(name=name),
            *steps(1, 300, lr=lr),
            {"event": "stop", "iteration": 300, "time": START + 601, "reason": "SIGUSR2"},
            start(300, START + 900, name=name, checkpoint="checkpoints/iter_0000300"),
            *steps(301, 600, lr=lr),
        ]
        run = write_run(directory / name, events, name, optimizer={"lr": lr})
        (run / "STOPPED").write_text("600\n")
        (run / "train-4711.log").write_text(
            "0: iteration 600/1000: loss 2.1\n1: kernels: torch's for the CPU\n"
        )
        for iteration in (100, 200, 300, 400, 500, 600):
            write_checkpoint(run / "checkpoints", iteration)
