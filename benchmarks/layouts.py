"""Trains one small model at every layout and compares losses and gradient norms with the single process.

    python -m benchmarks.layouts [--device cpu|cuda] [--precision fp32|bf16] [--shape gpt|llama] [--iterations N]
                                 [--at-once N] [--json]

Prints a Markdown table. Exit status 1 when a difference exceeds the tolerance of the precision. On GPUs the model is
larger, and layouts that need more of them than there are are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2}
"""Largest difference of a loss or a gradient norm; in bf16 each layout sums in another order."""

SHAPES: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {
        "num_query_groups": 4,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
    },
}
SIZES: dict[str, dict[str, Any]] = {
    "cpu": {"num_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "seq_length": 64},
    "cuda": {"num_layers": 8, "hidden_size": 1024, "num_attention_heads": 16, "seq_length": 1024},
}


@dataclass(frozen=True)
class Layout:
    """A name, how many ranks it takes, and the keys of the parallelism section."""

    name: str
    world_size: int
    parallelism: dict[str, Any] = field(default_factory=dict)


OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
LAYOUTS = (
    Layout("single", 1),
    Layout("TP2", 2, TP2),
    Layout("PP2", 2, PP2),
    Layout("DP2", 2),
    Layout("TP2 x PP2", 4, TP2 | PP2),
    Layout("TP2 + SP", 2, TP2 | {"sequence_parallel": True}),
    Layout("VPP2 (PP2)", 2, PP2 | {"virtual_pipeline_model_parallel_size": 2}),
    Layout("CP2", 2, {"context_parallel_size": 2}),
    Layout("DP2 + overlap", 2, OVERLAP),
    Layout("TP2 x DP2 + SP + overlap", 4, TP2 | OVERLAP | {"sequence_parallel": True}),
    Layout("TP2 x PP2 + SP", 4, TP2 | PP2 | {"sequence_parallel": True}),
    Layout("VPP2 (PP2) x DP2 + overlap", 4, PP2 | OVERLAP | {"virtual_pipeline_model_parallel_size": 2}),
    Layout("TP2 x CP2", 4, TP2 | {"context_parallel_size": 2}),
    Layout("PP2 x CP2", 4, PP2 | {"context_parallel_size": 2}),
    Layout("TP4", 4, {"tensor_model_parallel_size": 4}),
    Layout("PP4", 4, {"pipeline_model_parallel_size": 4}),
    Layout("DP4 + overlap", 4, OVERLAP),
)


def main() -> int:
    """Runs the layouts one after another."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=sorted(SIZES), default="cpu")
    parser.add_argument("--precision", choices=sorted(TOLERANCE), default="fp32")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="gpt")
    parser.add_argument("--at-once", type=int, default=1, help="layouts that train at the same time")
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    arguments = parser.parse_args()
    layouts = [layout for layout in LAYOUTS if layout.world_size <= most_ranks(arguments.device)]
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(arguments.at_once) as pool:
        results = pool.map(lambda layout: train(layout, Path(scratch), arguments), layouts)
        curves = dict(zip((layout.name for layout in layouts), results, strict=True))
    differences = {name: largest_difference(curve, curves["single"]) for name, curve in curves.items()}
    if arguments.json:
        print(json.dumps({"precision": arguments.precision, "curves": curves, "differences": differences}))
    else:
        print_table(curves, differences)
    return int(max(differences.values()) > TOLERANCE[arguments.precision])


def most_ranks(device: str) -> float:
    """Processes that can train together here."""
    if device == "cpu":
        return float("inf")
    import torch

    return torch.cuda.device_count()


def train(layout: Layout, scratch: Path, arguments: argparse.Namespace) -> list[tuple[float, float]]:
    """Loss and gradient norm of each iteration."""
    print(f"{layout.name}: {layout.world_size} ranks", file=sys.stderr)
    run_dir = scratch / layout.name.replace(" ", "")
    run_dir.mkdir()
    (run_dir / "config.json").write_text(json.dumps(configuration(layout, run_dir, arguments)))
    run_ranks(run_dir, layout.world_size)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(line["loss"], line["grad_norm"]) for line in lines if line["event"] == "step"]


def configuration(layout: Layout, run_dir: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """A small model on made-up samples."""
    return {
        "name": layout.name,
        "run_dir": str(run_dir),
        "device": arguments.device,
        "world_size": layout.world_size,
        "model": SIZES[arguments.device] | SHAPES[arguments.shape] | {"vocab_size": 1000},
        "parallelism": layout.parallelism,
        "training": {
            "micro_batch_size": 1,
            "global_batch_size": 8,
            "train_iters": arguments.iterations,
            "precision": arguments.precision,
            "eval_iters": 0,
        },
        "optimizer": {"lr": 1e-3, "lr_warmup_iters": 0},
        "data": {"mock": True, "num_workers": 0},
        "logging": {"tensorboard": False},
    }


def run_ranks(run_dir: Path, world_size: int) -> None:
    """Starts the ranks and waits for them; their output goes to a log that is shown when one fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = max(1, (os.cpu_count() or 1) // world_size)
    log = run_dir / "log"
    with log.open("w") as output:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "trainer", "--config", str(run_dir / "config.json")],
                cwd=Path(__file__).parent.parent,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ
                | {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(world_size),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "OMP_NUM_THREADS": str(threads),
                },
            )
            for rank in range(world_size)
        ]
        try:
            statuses = [rank.wait() for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(statuses):
            raise SystemExit(f"{run_dir.name} failed:\n{log.read_text()}")


def largest_difference(curve: list[tuple[float, float]], reference: list[tuple[float, float]]) -> float:
    """Over all iterations, in loss and in gradient norm; a curve that is cut short is infinitely far."""
    if len(curve) != len(reference):
        return float("inf")
    return max(abs(a - b) for pair in zip(curve, reference, strict=True) for a, b in zip(*pair, strict=True))


def print_table(curves: dict[str, list[tuple[float, float]]], differences: dict[str, float]) -> None:
    """First and last iteration of each layout, and its largest difference from the single process."""
    print("| layout | loss, first | grad norm, first | loss, last | grad norm, last | largest difference |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, curve in curves.items():
        (first_loss, first_norm), (last_loss, last_norm) = curve[0], curve[-1]
        print(
            f"| {name} | {first_loss:.6f} | {first_norm:.6f} | {last_loss:.6f} | {last_norm:.6f} "
            f"| {differences[name]:.1e} |"
        )


if __name__ == "__main__":
    sys.exit(main())
