"""Compares the trainer with a bare Megatron-Core loop more exactly than benchmarks.train: they take turns.

    python -m benchmarks.in_turns [--case NAME] [--steps N] [--rounds N] [--json] [--cpu]

Two runs, one after the other, differ by a percent: in the clock of the GPUs, in where memory lies, in what else the
host does. Here the ranks have both models, and blocks of steps take turns. In each round, each program runs a block,
from one synchronization of the GPU to the next. The first round is not counted. The bare loop runs in two ways: as in
benchmarks.train, waiting for the GPU after each step, and without ever waiting. The trainer waits once, within a step,
to check its loss and its norm. The tokens are random. The GPUs must have room for both models. With --cpu, a tiny shape
shows that the benchmark works.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks import runs, train
from benchmarks.documents import write_corpus
from benchmarks.train_cases import CASES, GPT_1_3B, Case

NUM_TOKENS = 3_000_000
TINY = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64}


def main() -> int:
    """Run the rounds of one case, and print the times of both programs."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--case", default="gpt-1.3b-dp2", help="name of a case of benchmarks.train")
    options.add_argument("--steps", type=int, default=8, help="number of steps of a block")
    options.add_argument("--rounds", type=int, default=8, help="number of counted rounds")
    options.add_argument("--json", action="store_true", help="print the times of all rounds as JSON")
    options.add_argument("--cpu", action="store_true", help="run a tiny shape on CPUs")
    options.set_defaults(one_rank=False, environment={})
    arguments = options.parse_args()
    runs.end_like_ctrl_c()
    case = next((each for each in CASES if each.name == arguments.case and each.has_peers), None)
    if case is None:
        options.error(f"--case {arguments.case}: benchmarks.train has no such case with a bare loop")
    if not arguments.cpu and runs.count_gpus(options) < case.gpus:
        options.exit(2, f"{options.prog}: {case.name} needs {case.gpus} GPUs\n")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        times = seconds_per_step(case, arguments, Path(scratch).resolve())
    print(json.dumps({"case": case.name} | times) if arguments.json else summary(case.name, times))
    return 0


def seconds_per_step(case: Case, arguments: argparse.Namespace, scratch: Path) -> dict[str, list[float]]:
    """Seconds per step in each round, by program."""
    if arguments.cpu:
        case = dataclasses.replace(case, model=GPT_1_3B | TINY)
    config = train.configuration(case, write_corpus(scratch / "corpus", NUM_TOKENS), scratch / "run")
    if arguments.cpu:
        config["device"] = "cpu"
    file = runs.write_config(config)
    result = file.with_name("seconds.json")
    module = ["benchmarks.in_turns_loop", str(file), str(arguments.steps), str(arguments.rounds), str(result)]
    command, ranks, environment = train.launch(module, case, arguments)
    runs.run(command, file.with_name("log"), ranks, environment)
    times: dict[str, list[float]] = json.loads(result.read_text())
    return times


def summary(name: str, times: dict[str, list[float]]) -> str:
    """A line for each program: its median step, and the median and the extremes of its ratio to the trainer."""
    lines = [name]
    for program, seconds in times.items():
        ratios = sorted(other / own for own, other in zip(times["trainer"], seconds, strict=True))
        lines.append(
            f"  {program:16} {statistics.median(seconds) * 1e3:8.1f} ms per step, {statistics.median(ratios):.4f} "
            f"times the trainer's ({ratios[0]:.4f} to {ratios[-1]:.4f})"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
