"""Trains one small model with every layout, and compares losses and gradient norms with a single process.

    python -m benchmarks.layouts [--device cpu|cuda] [--precision fp32|bf16] [--shape gpt|llama|moe] [--iterations N]
                                 [--at-once N] [--json]

Prints a Markdown table. Exit status 1 if a difference exceeds the tolerance of the precision. On GPUs the model is
larger, and layouts that need more GPUs than are available are left out.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import runs
from trainer.contract.wording import counted

TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}
"""Maximum relative difference of a loss or a gradient norm. In bf16, the order of sums depends on the layout."""

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
SHAPES["moe"] = SHAPES["llama"] | {
    "num_moe_experts": 8,
    "moe_ffn_hidden_size": 128,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.01,
    "moe_z_loss_coeff": 0.001,
    "moe_shared_expert_intermediate_size": 128,
}
SIZES: dict[str, dict[str, Any]] = {
    "cpu": {"num_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "seq_length": 64},
    "cuda": {"num_layers": 8, "hidden_size": 1024, "num_attention_heads": 16, "seq_length": 1024},
}


@dataclass(frozen=True)
class Layout:
    """A layout: its name, number of ranks and parallelism section."""

    name: str
    world_size: int
    parallelism: dict[str, Any] = field(default_factory=dict)


OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
VPP2 = PP2 | {"virtual_pipeline_model_parallel_size": 2}
LAYOUTS = (
    Layout("single", 1),
    Layout("TP2", 2, TP2),
    Layout("PP2", 2, PP2),
    Layout("DP2", 2),
    Layout("TP2 x PP2", 4, TP2 | PP2),
    Layout("TP2 + SP", 2, TP2 | {"sequence_parallel": True}),
    Layout("VPP2 (PP2)", 2, VPP2),
    Layout("PP2, uneven", 2, PP2 | {"num_layers_in_first_pipeline_stage": 1}),
    Layout(
        "TP2 x PP2 + SP, uneven",
        4,
        TP2 | PP2 | {"sequence_parallel": True, "num_layers_in_last_pipeline_stage": 1},
    ),
    Layout("CP2", 2, {"context_parallel_size": 2}),
    Layout("DP2 + overlap", 2, OVERLAP),
    Layout("TP2 x DP2 + SP + overlap", 4, TP2 | OVERLAP | {"sequence_parallel": True}),
    Layout("TP2 x PP2 + SP", 4, TP2 | PP2 | {"sequence_parallel": True}),
    Layout("VPP2 (PP2) x DP2 + overlap", 4, VPP2 | OVERLAP),
    Layout("TP2 x CP2", 4, TP2 | {"context_parallel_size": 2}),
    Layout("PP2 x CP2", 4, PP2 | {"context_parallel_size": 2}),
    Layout("TP4", 4, {"tensor_model_parallel_size": 4}),
    Layout("PP4", 4, {"pipeline_model_parallel_size": 4}),
    Layout("DP4 + overlap", 4, OVERLAP),
)
TP2_SP = TP2 | {"sequence_parallel": True}
EP2, EP4 = {"expert_model_parallel_size": 2}, {"expert_model_parallel_size": 4}
ETP1, ETP2 = {"expert_tensor_parallel_size": 1}, {"expert_tensor_parallel_size": 2}
EXPERT_LAYOUTS = (
    Layout("single", 1),
    Layout("DP2", 2),
    Layout("EP2", 2, EP2),
    Layout("EP2 + overlap", 2, EP2 | OVERLAP),
    Layout("EP2, allgather", 2, EP2 | {"moe_token_dispatcher_type": "allgather"}),
    Layout("EP4", 4, EP4),
    Layout("EP2 x DP2", 4, EP2),
    Layout("EP2 x DP2, 2 instances", 4, EP2 | {"num_distributed_optimizer_instances": 2}),
    Layout("ETP2", 2, ETP2),
    Layout("ETP2 x EP2", 4, ETP2 | EP2),
    Layout("TP2 + SP", 2, TP2_SP),
    Layout("TP2 x ETP1 + SP", 2, TP2_SP | ETP1),
    Layout("EP2 x TP2 + SP", 4, EP2 | TP2_SP),
    Layout("EP2 x TP2 x ETP1 + SP", 4, EP2 | TP2_SP | ETP1),
    Layout("EP4 x TP2 x ETP1 + SP", 4, EP4 | TP2_SP | ETP1),
    Layout("EP2 x PP2", 4, EP2 | PP2),
    Layout("EP2 x VPP2 (PP2)", 4, EP2 | VPP2),
    Layout("EP2 x CP2", 2, EP2 | {"context_parallel_size": 2}),
    Layout("EP4 x TP2 x CP2 x ETP1 + SP", 4, EP4 | TP2_SP | {"context_parallel_size": 2} | ETP1),
)
"""Layouts of a mixture of experts, which needs sequence parallelism with tensor parallelism."""


def main() -> int:
    """Train with each layout and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=sorted(SIZES), default="cpu")
    parser.add_argument("--precision", choices=sorted(TOLERANCE), default="fp32")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="gpt")
    parser.add_argument("--at-once", type=int, default=1, help="number of layouts to train at the same time")
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    arguments = parser.parse_args()
    runs.end_like_ctrl_c()
    most_ranks = runs.count_gpus(parser) if arguments.device == "cuda" else float("inf")
    of_shape = EXPERT_LAYOUTS if arguments.shape == "moe" else LAYOUTS
    layouts = [layout for layout in of_shape if layout.world_size <= most_ranks]
    with tempfile.TemporaryDirectory() as scratch:

        def curve(layout: Layout, _: int) -> list[tuple[float, float]]:
            return train(layout, Path(scratch), arguments)

        results = runs.side_by_side(curve, layouts, arguments.at_once)
    curves = dict(zip((layout.name for layout in layouts), results, strict=True))
    differences = {name: largest_difference(curve, curves["single"]) for name, curve in curves.items()}
    if arguments.json:
        print(json.dumps({"precision": arguments.precision, "curves": curves, "differences": differences}))
    else:
        print_table(curves, differences)
    return int(max(differences.values()) > TOLERANCE[arguments.precision])


def train(layout: Layout, scratch: Path, arguments: argparse.Namespace) -> list[tuple[float, float]]:
    """Loss and gradient norm of each iteration."""
    print(f"{layout.name}: {counted(layout.world_size, 'rank')}", file=sys.stderr)
    run_dir = scratch / layout.name.replace(" ", "")
    steps = runs.train(configuration(layout, run_dir, arguments))
    return [(step["loss"], step["grad_norm"]) for step in steps]


def configuration(layout: Layout, run_dir: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Configuration of a small model on mock samples."""
    return runs.configuration(
        layout.name,
        run_dir,
        arguments.device,
        layout.world_size,
        model=SIZES[arguments.device] | SHAPES[arguments.shape] | {"vocab_size": 1000},
        parallelism=layout.parallelism,
        training={
            "micro_batch_size": 1,
            "global_batch_size": 8,
            "train_iters": arguments.iterations,
            "precision": arguments.precision,
        },
        # Steps that overshoot would amplify small differences.
        optimizer={"lr": 3e-4, "lr_warmup_iters": 5},
        data={"mock": True, "num_workers": 0},
    )


def largest_difference(curve: list[tuple[float, float]], reference: list[tuple[float, float]]) -> float:
    """Maximum relative difference of loss and gradient norm over all iterations. Infinite for incomplete curves."""
    if len(curve) != len(reference):
        return float("inf")
    pairs = (pair for steps in zip(curve, reference, strict=True) for pair in zip(*steps, strict=True))
    return max(abs(found / expected - 1) for found, expected in pairs)


def print_table(curves: dict[str, list[tuple[float, float]]], differences: dict[str, float]) -> None:
    """Print the first and last iteration of each layout, and its largest difference from the single process."""
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
