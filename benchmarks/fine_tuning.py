"""Compares ways of fine-tuning with training all weights on GPUs: time of a step, and memory next to its estimate.

    python -m benchmarks.fine_tuning [--only NAME ...] [--steps N] [--rank N] [--json] [--cpu]

On one GPU, they train the shape of Llama 3 8B with 8 layers from random weights: all weights (full), adapters (lora),
the upper half (frozen), and all weights with a moving average (ema). On two GPUs, they train Mixtral's width with 4
layers and experts on both: all weights (experts) and adapters of everything (experts-lora). Each is a trial of
`hpcgen tune`. Those on one GPU run side by side if there are several. With --cpu, a tiny shape shows that the benchmark
works.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import runs, train
from benchmarks.documents import TINY
from benchmarks.train_cases import EP2, LLAMA_8_LAYERS, MIXTRAL_4_LAYERS, Case
from hpcgen.planning.memory.stages import estimate_memory
from hpcgen.planning.setup import Setup
from trainer.contract.config import TrainerConfig, from_dict
from trainer.contract.config.document import to_dict
from trainer.contract.config.resolve import resolve
from trainer.contract.model.layout import Layout
from trainer.contract.trials import TrialConfig, TrialsConfig, result_path

WARM_STEPS = 5
TIME_LIMIT_S = 300


@dataclass(frozen=True)
class Way:
    """A way of fine-tuning."""

    name: str
    case: Case
    baseline: str
    """Name of the way with which it is compared."""
    training: dict[str, Any] = field(default_factory=dict)
    parallelism: dict[str, Any] = field(default_factory=dict)
    has_adapters: bool = False


ONE_GPU = Case("llama-8l", LLAMA_8_LAYERS, micro_batch_size=1, global_batch_size=4)
TWO_GPUS = Case(
    "mixtral-4l-ep2",
    MIXTRAL_4_LAYERS,
    micro_batch_size=1,
    global_batch_size=8,
    gpus=2,
    parallelism=EP2,
)
WAYS = (
    Way("full", ONE_GPU, "full"),
    Way("lora", ONE_GPU, "full", has_adapters=True),
    Way("frozen", ONE_GPU, "full", {"freeze": ["embedding.*", "decoder.layers.[0-3].*"]}),
    Way("ema", ONE_GPU, "full", {"ema_decay": 0.999}),
    Way("experts", TWO_GPUS, "experts"),
    Way("experts-lora", TWO_GPUS, "experts", parallelism={"moe_grouped_gemm": False}, has_adapters=True),
)


def main() -> int:
    """Measure the ways that fit the GPUs, and print a line for each."""
    options = runs.comparison_options(__doc__)
    names = [way.name for way in WAYS]
    options.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    options.add_argument("--rank", type=int, default=16, help="rank of the adapters")
    arguments = options.parse_args()
    runs.end_like_ctrl_c()
    gpus = 2 if arguments.cpu else runs.count_gpus(options)
    chosen = [way for way in WAYS if way.name in arguments.only and way.case.gpus <= gpus]
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        for size in (1, 2):
            ways = [way for way in chosen if way.case.gpus == size]
            if not ways:
                continue
            found = runs.side_by_side(
                lambda way, place: measured(
                    way,
                    configuration(way, Path(scratch).resolve(), arguments),
                    {} if arguments.cpu else runs.gpus_at(place, way.case.gpus),
                    arguments.steps,
                ),
                ways,
                1 if arguments.cpu else gpus // size,
            )
            results |= {result["name"]: result for result in found}
    for way in chosen:
        result = results[way.name]
        print(json.dumps(result) if arguments.json else line(result, results.get(way.baseline)), flush=True)
    return 0


def configuration(way: Way, directory: Path, arguments: argparse.Namespace) -> TrainerConfig:
    """The training of a way. Trials load no checkpoint, so its path is that of none."""
    case = way.case
    if arguments.cpu:
        experts = {"num_moe_experts": 4, "moe_router_topk": 2} if "num_moe_experts" in case.model else {}
        rope = {"position_embedding_type": "rope", "add_bias_linear": False, "normalization": "RMSNorm"}
        model = TINY | rope | experts | {"num_layers": case.model["num_layers"]}
        case = dataclasses.replace(case, model=model, parallelism=EP2 if experts else {})
    config = train.configuration(case, directory / "corpus", directory / way.name)
    config["data"] = {"mock": True}
    config["training"] |= way.training
    config["parallelism"] |= way.parallelism
    config["model"].pop("layer_spec", None)  # the router of benchmarks.train, with which adapters are refused
    if way.has_adapters:
        config["lora"] = {"rank": arguments.rank}
        config["checkpoint"] |= {"load": str(directory / "base"), "finetune": True}
    if arguments.cpu:
        train.use_cpu(config)
    return from_dict(TrainerConfig, config, where=way.name)


def measured(way: Way, config: TrainerConfig, environment: dict[str, str], steps: int) -> dict[str, Any]:
    """Time and memory of a way, and its estimated memory in GiB.

    Raises:
        RunError: it failed.
    """
    trial = TrialConfig(name=way.name, key=way.name, trainer=config)
    trials = TrialsConfig(warmup_steps=WARM_STEPS, steps=steps, time_limit_s=TIME_LIMIT_S, trials=(trial,))
    run_dir = Path(config.run_dir)
    run_dir.mkdir()
    file = run_dir / "trials.json"
    file.write_text(json.dumps(to_dict(trials)))
    command = ["-m", "trainer.trials", "--config", str(file), "--trial", way.name]
    runs.run(command, file.with_name("log"), way.case.gpus, train.ENVIRONMENT | environment)
    result = json.loads(result_path(config.run_dir, way.name).read_text())
    columns = ("step_s", "tokens_per_s", "allocated_gib", "reserved_gib", "in_use_gib")
    return {"name": way.name, **{column: result[column] for column in columns}} | {
        "estimated_gib": estimated_gib(config)
    }


def estimated_gib(config: TrainerConfig) -> float:
    """Memory that torch allocates, as `hpcgen validate` estimates it."""
    resolved = resolve(config)
    layout = Layout.make(resolved.model, resolved.parallelism, resolved.training, config.world_size)
    assert layout is not None
    return estimate_memory(Setup.of(resolved, layout)).total_gib


def line(result: dict[str, Any], baseline: dict[str, Any] | None) -> str:
    """A result, and its share of the time and the memory of training all weights."""

    def share(column: str) -> str:
        return "" if baseline is None else f" ({result[column] / baseline[column]:.3f})"

    text = f"{result['name']:12} {result['step_s'] * 1e3:8.1f} ms per step{share('step_s')}"
    if result["allocated_gib"] is None:  # on a CPU
        return text
    return (
        f"{text}, {result['tokens_per_s']:9,.0f} tokens/s, {result['allocated_gib']:6.2f} GiB"
        f"{share('allocated_gib')}, estimated {result['estimated_gib']:.2f}"
    )


if __name__ == "__main__":
    sys.exit(main())
