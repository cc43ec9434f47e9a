"""Measures training speed on the GPUs of this machine, compared with a bare Megatron-Core loop and Megatron-LM.

    python -m benchmarks.train CORPUS [--only PATTERN ...] [--megatron-lm CHECKOUT] [--steps N] [--json]

CORPUS is the path of a .bin/.idx pair without its extension (hpcgen data prepare makes one). Each case trains for some
warm-up steps and some timed steps, with data, schedule, checks and metrics as for users. Then the same shape runs in a
bare Megatron-Core loop (benchmarks.bare_loop), which has none of these, and with --megatron-lm in pretrain_gpt.py.
Results are medians over the timed steps. Compare the ratios, which are from one run. Cases that need more GPUs than are
available are left out. With --one-rank, one GPU does the work of rank 0 of every case, with its memory but without the
transfers between GPUs (benchmarks.one_rank). Exit status 1 if a run failed, 2 if there is nothing to run.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import runs
from benchmarks.train_cases import CASES, Case
from trainer.contract.config import TrainerConfig, TrainingConfig, from_dict
from trainer.contract.config.resolve import resolve
from trainer.contract.model.flops import FORMULA, flops_per_sample

WARM_STEPS = 8
PEERS = ("bare", "megatron_lm")
LR = 1e-4
ROUTING_FILE = Path(__file__).with_name("even_routing.py")
LONG_RUN = 10_000
"""Steps of the schedule. Runs are stopped after the timed steps, so that none waits for its last checkpoint."""

ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "4"}
"""Variables that a job script sets in addition to the user's."""

FAILURES = (runs.RunError, OSError, ValueError)
"""Errors after which the next case runs: a program failed, or its results are unreadable or missing."""

PEAK_TFLOPS = 989.0
"""Dense bf16 peak of an H100 or H200 (NVIDIA's data sheet). FP8 uses it too, so that MFU is comparable."""


def main() -> int:
    """Run the cases one after another."""
    options = parser()
    arguments = options.parse_args()
    runs.end_like_ctrl_c()
    gpus = runs.count_gpus(options)
    chosen = [case for case in CASES if any(fnmatch.fnmatch(case.name, only) for only in arguments.only)]
    cases = [case for case in chosen if arguments.one_rank or case.gpus <= gpus]
    if not cases:
        needs = ", ".join(f"{case.name} needs {case.gpus}" for case in chosen)
        options.exit(2, f"{options.prog}: no case for {gpus} GPUs: {needs or 'none has such a name'}\n")
    results: list[dict[str, Any]] = []
    for case in cases:
        with tempfile.TemporaryDirectory(dir=arguments.directory, ignore_cleanup_errors=True) as scratch:
            results.append(measure(case, arguments, Path(scratch).resolve()))
        results[-1] |= share_of_one_gpu(case, results)
        print(line(results[-1]) if not arguments.json else json.dumps(results[-1]), flush=True)
    if not arguments.json:
        print(f"\n{FORMULA}; peak {PEAK_TFLOPS:g} TFLOP/s")
    return int(any("error" in name for result in results for name in result))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("corpus", type=Path, help="prefix of a .bin/.idx pair")
    options.add_argument(
        "--only", nargs="+", default=["*"], metavar="PATTERN", help="patterns for names of cases"
    )
    options.add_argument("--steps", type=int, default=20, help="number of timed steps per case")
    options.add_argument("--no-peers", action="store_true", help="measure only the trainer")
    options.add_argument("--megatron-lm", type=Path, metavar="CHECKOUT", help="compare with pretrain_gpt.py")
    options.add_argument(
        "--one-rank", action="store_true", help="run only rank 0 of each case, without transfers between GPUs"
    )
    options.add_argument("--directory", type=Path, help="directory for the runs")
    options.add_argument("--json", action="store_true", help="print one JSON object per case")
    options.set_defaults(environment={})
    return options


def measure(case: Case, arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Results of a case for the trainer and its peers. For a program that failed, its error."""
    config = configuration(case, arguments.corpus, scratch / "run")
    flops = flops_per_sample(resolve(from_dict(TrainerConfig, config, where=case.name)))
    result: dict[str, Any] = {
        "case": case.name,
        "gpus": case.gpus,
        "goal_tflops": case.goal_tflops,
        "one_rank": arguments.one_rank,
    }

    def tflops(step_s: float) -> float:
        return flops * case.global_batch_size / step_s / case.gpus / 1e12

    try:
        result |= run_trainer(case, config, arguments)
        result["tflops"] = tflops(result["step_s"])
    except FAILURES as error:
        return result | {"error": described(error)}
    peers: dict[str, Callable[[], float]] = {}
    if case.has_peers and not arguments.no_peers:
        peers["bare"] = lambda: run_bare_loop(case, arguments, scratch)
    if case.has_peers and arguments.megatron_lm:
        peers["megatron_lm"] = lambda: run_megatron_lm(case, arguments, scratch)
    for name, run in peers.items():
        try:
            step_s = run()
            result |= {f"{name}_step_s": step_s, f"{name}_tflops": tflops(step_s)}
        except FAILURES as error:
            result[f"{name}_error"] = described(error)
    return result


def described(error: BaseException) -> str:
    """Text of an error, with the type of the exception unless it is a RunError."""
    return str(error) if isinstance(error, runs.RunError) else f"{type(error).__name__}: {error}"


def share_of_one_gpu(case: Case, results: list[dict[str, Any]]) -> dict[str, float]:
    """Throughput per GPU of the last result, relative to its single-GPU case if that ran too."""
    single = next((result.get("tflops") for result in results if result["case"] == case.single), None)
    return {"of_one_gpu": results[-1]["tflops"] / single} if single and "tflops" in results[-1] else {}


def configuration(case: Case, corpus: Path, run_dir: Path) -> dict[str, Any]:
    """Configuration for `python -m trainer`, with the defaults of a user's run."""
    return runs.configuration(
        case.name,
        run_dir,
        "cuda",
        case.gpus,
        model=case.model
        | {"padded_vocab_size": -(-case.model["vocab_size"] // 128) * 128}
        | even_routing(case),
        parallelism=case.parallelism,
        training=training_section(case),
        optimizer={"lr": LR, "lr_warmup_iters": 5},
        data=runs.corpus_section(corpus) | case.data,
        checkpoint={"save_interval_minutes": 600} | case.checkpoint,
        logging={"tensorboard": True},
    ) | {"peak_tflops": PEAK_TFLOPS}


def use_cpu(config: dict[str, Any]) -> None:
    """Change a configuration to a training in fp32 on a CPU."""
    config["device"] = "cpu"
    config["training"]["precision"] = "fp32"


def even_routing(case: Case) -> dict[str, str]:
    """The key that makes the trainer's routers load the experts of a case evenly. The peers have an option for it."""
    is_mixture = "num_moe_experts" in case.model
    return {"layer_spec": f"{ROUTING_FILE}:evenly_routed"} if is_mixture else {}


def training_section(case: Case) -> dict[str, Any]:
    """The batch, the length and what the case itself says."""
    return {
        "micro_batch_size": case.micro_batch_size,
        "global_batch_size": case.global_batch_size,
        "train_iters": LONG_RUN,
    } | case.training


def run_trainer(case: Case, config: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Medians of the timed steps, and how long the first one took to come."""
    started = time.time()
    end = WARM_STEPS + arguments.steps
    lines = run_until(config, lambda lines: is_measured(lines, case, end), case, arguments)
    all_steps = runs.steps(lines)
    timed = all_steps[WARM_STEPS:end]

    def median(name: str) -> float:
        return statistics.median(each.get(name) or 0.0 for each in timed)

    step_s = median("step_time_s")
    return {
        "step_s": step_s,
        "tokens_per_s": median("tokens_per_s"),
        "data_wait_share": median("data_wait_s") / step_s,
        "communication_share": median("communication_s") / step_s,
        "peak_memory_gib": max(each["peak_memory_gib"] for each in timed),
        "peak_reserved_gib": max(each.get("peak_reserved_gib", 0.0) for each in timed),
        "first_step_s": all_steps[0]["time"] - started,
        "first_loss": all_steps[0]["loss"],
        "last_loss": all_steps[-1]["loss"],
        "max_expert_load": median("moe_max_load") or None,
    } | save_cost(lines, all_steps, step_s)


def is_measured(lines: list[dict[str, Any]], case: Case, steps: int) -> bool:
    """True if the record has all data that a case needs."""
    all_steps = runs.steps(lines)
    if "save_interval" in case.checkpoint:
        saves = background_saves(lines)
        return len(saves) >= 2 and all_steps[-1]["time"] > saves[1]["time"]
    return bool(all_steps) and all_steps[-1]["iteration"] >= steps


def run_until(
    config: dict[str, Any],
    is_enough: Callable[[list[dict[str, Any]]], bool],
    case: Case,
    arguments: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Run the trainer until its record is sufficient, then stop it. Returns the record.

    Raises:
        RunError: the trainer ended before that.
    """
    file = runs.write_config(config)
    log = file.with_name("log")
    command, ranks, environment = launch(["trainer", "--config", str(file)], case, arguments)
    with runs.started(command, log, ranks, environment) as processes:
        while (status := runs.status_of(processes)) is None:
            lines = runs.read_record(file.parent)
            if is_enough(lines):
                return lines
            runs.pause(0.2)
    raise runs.failure(log, status)


def launch(
    module: list[str], case: Case, arguments: argparse.Namespace
) -> tuple[list[str], int, dict[str, str]]:
    """Arguments for python, number of processes and environment with which a module runs a case."""
    environment = ENVIRONMENT | arguments.environment
    if not arguments.one_rank:
        return ["-m", *module], case.gpus, environment
    return ["-m", "benchmarks.one_rank", *module], 1, environment | {"WORLD_SIZE": str(case.gpus)}


def background_saves(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Saves that were completed while training continued."""
    return [each for each in lines if each["event"] == "checkpoint" and each["asynchronous"]]


def save_cost(lines: list[dict[str, Any]], steps: list[dict[str, Any]], step_s: float) -> dict[str, Any]:
    """Relative slowdown of the steps during a background save: the median of all saves. The stall is the longest."""
    saves = background_saves(lines)
    if not saves:
        return {}
    costs = []
    for save in saves:
        after = [each for each in steps if each["iteration"] >= save["iteration"]]
        end = next(n for n, each in enumerate(after) if each["time"] > save["time"])
        costs.append((after[end]["time"] - after[0]["time"]) / (step_s * end) - 1)
    return {
        "save_cost_share": statistics.median(costs),
        "save_stall_s": max(each["stall_s"] for each in saves),
        "save_write_s": statistics.median(each["write_s"] for each in saves),
        "save_gb": saves[-1]["bytes"] / 1e9,
    }


def run_bare_loop(case: Case, arguments: argparse.Namespace, scratch: Path) -> float:
    """Median step time of the bare loop with the trainer's configuration (seconds)."""
    config = scratch / "run" / "config.json"
    module = ["benchmarks.bare_loop", str(config), str(WARM_STEPS), str(arguments.steps)]
    command, ranks, environment = launch(module, case, arguments)
    output = runs.run(command, scratch / "bare.log", ranks, environment)
    times: list[float] = json.loads(output.strip().rpartition("\n")[2])
    return statistics.median(times)


def run_megatron_lm(case: Case, arguments: argparse.Namespace, scratch: Path) -> float:
    """Median step time of pretrain_gpt.py, from its log (seconds)."""
    module = ["benchmarks.megatron_lm", str(arguments.megatron_lm.resolve())]
    module += megatron_lm_flags(case, arguments, scratch)
    command, ranks, environment = launch(module, case, arguments)
    log = runs.run(command, scratch / "megatron-lm.log", ranks, environment)
    times = [float(ms) / 1e3 for ms in re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", log)]
    return statistics.median(times[WARM_STEPS:])


def megatron_lm_flags(case: Case, arguments: argparse.Namespace, scratch: Path) -> list[str]:
    """Megatron-LM's flags for the same shape, layout and batch, with its fastest options."""
    model, layout = case.model, case.parallelism
    flags: dict[str, Any] = {
        "num-layers": model["num_layers"],
        "hidden-size": model["hidden_size"],
        "num-attention-heads": model["num_attention_heads"],
        "seq-length": model["seq_length"],
        "max-position-embeddings": model["seq_length"],
        "vocab-size": model["vocab_size"] - 1,  # NullTokenizer adds its end of document
        "micro-batch-size": case.micro_batch_size,
        "global-batch-size": case.global_batch_size,
        "train-iters": WARM_STEPS + arguments.steps,
        "lr": LR,
        "lr-warmup-iters": 5,
        "weight-decay": 0.1,
        "tensor-model-parallel-size": layout.get("tensor_model_parallel_size", 1),
        "pipeline-model-parallel-size": layout.get("pipeline_model_parallel_size", 1),
        "data-path": arguments.corpus.resolve(),
        "data-cache-path": scratch / "megatron-lm-cache",
        "split": "1,0,0",
        "tokenizer-type": "NullTokenizer",
        "eval-iters": 0,
        "eval-interval": 10**6,  # it has no default, and is divided by all the same
        "log-interval": 1,
        "attention-dropout": 0,
        "hidden-dropout": 0,
        "cross-entropy-fusion-impl": "native",  # it refuses te
    }
    switches = {"bf16", "use-mcore-models", "use-distributed-optimizer", "cross-entropy-loss-fusion"}
    switches |= {name.replace("_", "-") for name, value in layout.items() if value is True}
    training = TrainingConfig(**training_section(case))
    if training.fp8:
        flags |= {
            "fp8-format": training.fp8,
            "fp8-recipe": training.fp8_recipe,
            "fp8-amax-history-len": training.fp8_amax_history_len,
            "fp8-amax-compute-algo": training.fp8_amax_compute_algo,
        }
    if model.get("position_embedding_type") == "rope":
        flags |= {
            "position-embedding-type": "rope",
            "rotary-base": model["rotary_base"],
            "normalization": model["normalization"],
            "ffn-hidden-size": model["ffn_hidden_size"],
            "num-query-groups": model["num_query_groups"],
        }
        switches |= {
            "swiglu",
            "disable-bias-linear",
            "untie-embeddings-and-output-weights",
            "group-query-attention",
        }
    if model.get("num_moe_experts"):
        expert_flags, expert_switches = megatron_lm_expert_flags(case)
        flags |= expert_flags
        switches |= expert_switches
    words = [f"--{name}={value}" for name, value in flags.items()]
    return words + [f"--{name}" for name in sorted(switches)]


def megatron_lm_expert_flags(case: Case) -> tuple[dict[str, Any], set[str]]:
    """Megatron-LM's flags for the experts of a case, and its switches."""
    model = case.model
    flags = {
        "num-experts": model["num_moe_experts"],
        "expert-model-parallel-size": case.parallelism["expert_model_parallel_size"],
        "moe-router-topk": model["moe_router_topk"],
        "moe-router-load-balancing-type": "aux_loss",
        "moe-aux-loss-coeff": model["moe_aux_loss_coeff"],
        "moe-router-dtype": "fp32",
        "moe-token-dispatcher-type": "alltoall",
    }
    return flags, {"moe-grouped-gemm", "moe-permute-fusion", "moe-router-force-load-balancing"}


def line(result: dict[str, Any]) -> str:
    """Results of one case as a line of text."""
    if "error" in result:
        return f"{result['case']}: {result['error']}"
    words = [
        f"{result['case']:28}",
        f"{result['step_s'] * 1e3:7.1f} ms/step",
        f"{result['tokens_per_s']:9,.0f} tokens/s",
        f"{result['tflops']:5.0f} TFLOP/s per GPU ({result['tflops'] / PEAK_TFLOPS:.1%})",
        f"{result['peak_memory_gib']:5.1f} GiB",
        *["only rank 0, no transfers"] * result["one_rank"],
        f"data wait {result['data_wait_share']:.2%}",
        f"first step after {result['first_step_s']:.0f} s",
    ]
    for peer in PEERS:
        if f"{peer}_tflops" in result:
            other = result[f"{peer}_tflops"]
            words.append(f"{peer} {other:.0f} ({result['tflops'] / other:.3f}x)")
    if result["max_expert_load"]:
        words.append(f"largest load of an expert {result['max_expert_load']:.2f} times the mean")
    if "of_one_gpu" in result:
        words.append(f"{result['of_one_gpu']:.1%} of one GPU's")
    if result["goal_tflops"]:
        words.append(f"goal {result['goal_tflops']:g}")
    if "save_stall_s" in result:
        words.append(
            f"save of {result['save_gb']:.1f} GB: {result['save_cost_share']:.1%} of the steps during it, "
            f"stall {result['save_stall_s']:.2f} s, written in {result['save_write_s']:.1f} s"
        )
    errors = [f"\n{peer}: {result[f'{peer}_error']}" for peer in PEERS if f"{peer}_error" in result]
    return ", ".join(words) + "".join(errors)


if __name__ == "__main__":
    sys.exit(main())
