"""Compares LoRA with full fine-tuning on one GPU: time of a step, and memory next to what hpcgen estimates.

    python -m benchmarks.lora [--steps N] [--rank N] [--json] [--cpu]

Both train the shape of Llama 3 8B with 8 layers from random weights, as trials of `hpcgen tune`: with two GPUs at the
same time, else one after the other. With --cpu, a tiny shape shows that the benchmark works.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import runs, train
from benchmarks.documents import TINY
from benchmarks.train_cases import LLAMA_8_LAYERS, Case
from hpcgen.planning.memory.stages import estimate_memory
from hpcgen.planning.setup import Setup
from trainer.contract.config import TrainerConfig, from_dict
from trainer.contract.config.document import to_dict
from trainer.contract.config.resolve import resolve
from trainer.contract.model.layout import Layout
from trainer.contract.trials import TrialConfig, TrialsConfig, result_path

WARM_STEPS = 5
TIME_LIMIT_S = 300


def main() -> int:
    """Measure both, and print a line for each."""
    options = runs.comparison_options(__doc__)
    options.add_argument("--rank", type=int, default=16, help="rank of the adapters")
    arguments = options.parse_args()
    runs.end_like_ctrl_c()
    gpus = 1 if arguments.cpu else runs.count_gpus(options)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        trainings = [
            training(name, lora, Path(scratch).resolve(), arguments)
            for name, lora in (("full", {}), ("lora", {"rank": arguments.rank}))
        ]
        results = runs.side_by_side(
            lambda each, place: measured(each, {} if arguments.cpu else runs.one_gpu(place), arguments.steps),
            trainings,
            gpus,
        )
    runs.print_comparison(results, results[0], line, arguments.json)
    return 0


def training(
    name: str, lora: dict[str, Any], directory: Path, arguments: argparse.Namespace
) -> TrainerConfig:
    """The training of all weights, or of adapters. Trials load no checkpoint, so its path is that of none."""
    case = Case(name, LLAMA_8_LAYERS, micro_batch_size=1, global_batch_size=4)
    if arguments.cpu:
        case = dataclasses.replace(case, model=TINY | {"num_layers": 2})
    config = train.configuration(case, directory / "corpus", directory / name)
    config["data"] = {"mock": True}
    if lora:
        config["lora"] = lora
        config["checkpoint"] |= {"load": str(directory / "base"), "finetune": True}
    if arguments.cpu:
        train.use_cpu(config)
    return from_dict(TrainerConfig, config, where=name)


def measured(config: TrainerConfig, environment: dict[str, str], steps: int) -> dict[str, Any]:
    """Time and memory of a training, and its estimated memory in GiB.

    Raises:
        RunError: it failed.
    """
    trial = TrialConfig(name=config.name, key=config.name, trainer=config)
    trials = TrialsConfig(warmup_steps=WARM_STEPS, steps=steps, time_limit_s=TIME_LIMIT_S, trials=(trial,))
    run_dir = Path(config.run_dir)
    run_dir.mkdir()
    file = run_dir / "trials.json"
    file.write_text(json.dumps(to_dict(trials)))
    command = ["-m", "trainer.trials", "--config", str(file), "--trial", config.name]
    runs.run(command, file.with_name("log"), 1, train.ENVIRONMENT | environment)
    result = json.loads(result_path(config.run_dir, config.name).read_text())
    columns = ("step_s", "tokens_per_s", "allocated_gib", "reserved_gib", "in_use_gib")
    return {"name": config.name, **{column: result[column] for column in columns}} | {
        "estimated_gib": estimated_gib(config)
    }


def estimated_gib(config: TrainerConfig) -> float:
    """Memory that torch allocates, as `hpcgen validate` estimates it."""
    resolved = resolve(config)
    layout = Layout.make(resolved.model, resolved.parallelism, resolved.training, config.world_size)
    assert layout is not None
    return estimate_memory(Setup.of(resolved, layout)).total_gib


def line(result: dict[str, Any], full: dict[str, Any]) -> str:
    """A result, and its share of the time and the memory of full fine-tuning."""
    if result["allocated_gib"] is None:  # on a CPU
        return f"{result['name']:4} {result['step_s'] * 1e3:8.1f} ms per step"
    return (
        f"{result['name']:4} {result['step_s'] * 1e3:8.1f} ms per step ({result['step_s'] / full['step_s']:.3f}), "
        f"{result['tokens_per_s']:9,.0f} tokens/s, {result['allocated_gib']:6.2f} GiB "
        f"({result['allocated_gib'] / full['allocated_gib']:.3f}; estimated {result['estimated_gib']:.2f})"
    )


if __name__ == "__main__":
    sys.exit(main())
