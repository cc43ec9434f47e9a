"""Compares the trainer's speed and memory with DeepSpeed's ZeRO-2 and ZeRO-3 on the GPUs of this machine.

    python -m benchmarks.deepspeed CORPUS [--gpus N] [--rounds N] [--steps N] [--json]

All three train the Llama of benchmarks.train (8 layers of Llama 3 8B) in bf16 with data parallelism on all GPUs, the
same microbatch and the same global batch. The trainer uses the distributed optimizer (ZeRO-1), with data, schedule,
checks and metrics as for users. DeepSpeed runs transformers' model with SDPA attention in a bare loop
(benchmarks.deepspeed_loop), which has none of these. The programs alternate in each round; results are medians over
the timed steps of all rounds. Needs deepspeed and transformers; CORPUS is the prefix of a .bin/.idx pair. `--cpu`
runs a tiny model with two processes on the CPU instead, to test the benchmark itself: its figures mean nothing. Exit
status 1 if a run failed, 2 if there is nothing to run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import runs
from benchmarks.train import FAILURES, WARM_STEPS, configuration, described, run_until
from benchmarks.train_cases import LLAMA_8_LAYERS, OVERLAP, Case

ZERO_STAGES = (2, 3)
MICRO_BATCHES = 2
"""Microbatches per GPU in each step."""
TINY = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 172,
}
CPU = {"DS_ACCELERATOR": "cpu"}


def main() -> int:
    """Run the three programs in turn."""
    options = parser()
    options.set_defaults(one_rank=False, environment={})
    arguments = options.parse_args()
    runs.end_like_ctrl_c()
    gpus = 2 if arguments.cpu else arguments.gpus or runs.count_gpus(options)
    case = llama(gpus, is_tiny=arguments.cpu)
    results: dict[str, list[dict[str, Any]]] = {}
    for _ in range(arguments.rounds):
        for name in ("trainer", *(f"zero{stage}" for stage in ZERO_STAGES)):
            with tempfile.TemporaryDirectory(dir=arguments.directory, ignore_cleanup_errors=True) as scratch:
                try:
                    result = measure(name, case, arguments, Path(scratch).resolve())
                except FAILURES as error:
                    result = {"error": described(error)}
            results.setdefault(name, []).append(result)
            print(json.dumps({"program": name, **result}), flush=True)
    if not arguments.json:
        print("\n".join(summary(case, results)))
    return int(any("error" in result for each in results.values() for result in each))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("corpus", type=Path, help="prefix of a .bin/.idx pair")
    options.add_argument("--gpus", type=int, help="number of GPUs to use (default: all)")
    options.add_argument("--rounds", type=int, default=2, help="number of runs of each program")
    options.add_argument("--steps", type=int, default=20, help="number of timed steps per run")
    options.add_argument("--cpu", action="store_true", help="test the benchmark with a tiny model on the CPU")
    options.add_argument("--directory", type=Path, help="directory for the runs")
    options.add_argument("--json", action="store_true", help="print one JSON object per run, and no summary")
    return options


def llama(gpus: int, is_tiny: bool) -> Case:
    """The shape and batch that all programs train."""
    model = LLAMA_8_LAYERS | (TINY | {"seq_length": 64, "vocab_size": 257} if is_tiny else {})
    return Case(f"llama-8l-dp{gpus}", model, 2, 2 * MICRO_BATCHES * gpus, gpus, {} if is_tiny else OVERLAP)


def measure(name: str, case: Case, arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Results of one run of the trainer or of DeepSpeed.

    Raises:
        RunError: the program failed.
    """
    config = configuration(case, arguments.corpus, scratch / "run")
    if arguments.cpu:
        config["device"] = "cpu"
    if name == "trainer":
        return of_trainer(config, case, arguments)
    file = runs.write_config(config)
    command = ["-m", "benchmarks.deepspeed_loop", str(file), name[-1], str(WARM_STEPS), str(arguments.steps)]
    output = runs.run(command, file.with_name("log"), case.gpus, CPU if arguments.cpu else None)
    found = json.loads(next(line for line in reversed(output.splitlines()) if line.startswith("{")))
    return {
        "times": found["times"],
        "peak_gib": found["peak_gib"],
        "first_loss": found["losses"][0],
        "last_loss": found["losses"][-1],
    }


def of_trainer(config: dict[str, Any], case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    """Results of the trainer, from its record."""
    end = WARM_STEPS + arguments.steps
    record = run_until(config, lambda lines: len(runs.steps(lines)) >= end, case, arguments)
    timed = runs.steps(record)[WARM_STEPS:end]
    return {
        "times": [each["step_time_s"] for each in timed],
        "peak_gib": max(each["peak_memory_gib"] for each in timed),
        "first_loss": runs.steps(record)[0]["loss"],
        "last_loss": timed[-1]["loss"],
    }


def summary(case: Case, results: dict[str, list[dict[str, Any]]]) -> list[str]:
    """A line for each program, with ratios to the trainer. `1.25x` means that the trainer is 1.25 times as fast."""
    tokens = case.global_batch_size * case.model["seq_length"] / case.gpus
    lines, trainer_s = [f"{case.name}: {case.global_batch_size} sequences per step on {case.gpus} GPUs"], None
    for name, rounds in results.items():
        good = [result for result in rounds if "error" not in result]
        if not good:
            lines.append(f"{name:8} {rounds[-1]['error']}")
            continue
        medians = [statistics.median(result["times"]) for result in good]
        step_s = statistics.median(time_s for result in good for time_s in result["times"])
        trainer_s = step_s if name == "trainer" else trainer_s
        words = [
            f"{name:8} {step_s * 1e3:8.1f} ms/step (rounds {', '.join(f'{m * 1e3:.1f}' for m in medians)})",
            f"{tokens / step_s:9,.0f} tokens/s per GPU",
            f"peak {max(result['peak_gib'] for result in good):.1f} GiB",
        ]
        if name != "trainer" and trainer_s is not None:
            words.append(f"trainer {step_s / trainer_s:.2f}x")
        lines.append(", ".join(words))
    return lines


if __name__ == "__main__":
    sys.exit(main())
