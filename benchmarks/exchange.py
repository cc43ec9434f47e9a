"""Compares losses after checkpoints change hands between the trainer and Megatron-LM's pretrain_gpt.py, both ways.

    python -m benchmarks.exchange CORPUS MEGATRON_LM DIRECTORY [--device cpu|cuda] [--precision bf16|fp32] [--json]

The trainer trains and saves at step 20. From there, pretrain_gpt.py trains to step 125 and saves at 120; the trainer
resumes from that. The trainer also resumes from step 20, which shows the noise of the precision. With a second GPU,
this runs at the same time as Megatron-LM. CORPUS is the path of a .bin/.idx pair without its extension. MEGATRON_LM is
a checkout of the version of the installed megatron-core. DIRECTORY is an empty directory for the runs (about 15 GB on a
GPU, whose model is larger). Exit status 1 if the first step after an exchange differs by more than 1e-3.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from benchmarks import runs

START, BACK, LAST = 20, 120, 125
LR, WARMUP, STD, SPLIT = 6e-4, 10, 0.02, "99,1,0"
TOLERANCE = 1e-3
DRIVERS = {
    "cpu": [str(Path(__file__).parents[1] / "tests" / "trainer" / "megatron_lm_driver.py")],
    "cuda": ["-m", "benchmarks.megatron_lm"],
}
"""Arguments of Python that run pretrain_gpt.py."""

Losses = dict[int, float]
"""Loss by step."""


@dataclass(frozen=True)
class Size:
    """A GPT and its batches."""

    layers: int
    width: int
    heads: int
    seq_length: int
    vocab_size: int
    micro_batch_size: int
    global_batch_size: int


SIZES = {"cpu": Size(4, 64, 4, 64, 1000, 1, 4), "cuda": Size(12, 768, 12, 1024, 50257, 16, 32)}


def main() -> int:
    """Run both programs and print their differences."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("corpus", type=Path)
    options.add_argument("megatron_lm", type=Path)
    options.add_argument("directory", type=Path)
    options.add_argument("--device", choices=sorted(SIZES), default="cuda")
    options.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    options.add_argument("--json", action="store_true", help="print the losses as JSON")
    arguments = options.parse_args()
    runs.end_like_ctrl_c()
    places = 1 if arguments.device == "cpu" else min(2, runs.count_gpus(options))
    directory = arguments.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        options.error(f"{directory} is not empty")
    table = sys.stderr if arguments.json else sys.stdout
    straight = train(arguments, "ours")
    source = alone(directory / "ours" / "checkpoints", START, directory / "from-ours")
    print(
        f"losses: {straight[1]:.4f} at 1, {straight[START]:.4f} at {START}, {straight[LAST]:.4f} at {LAST}\n"
        "| absolute difference of the losses | first step | largest | mean | steps |\n"
        "| --- | --- | --- | --- | --- |",
        file=table,
        flush=True,
    )
    from_source: list[Callable[[int], Losses]] = [
        lambda gpu: pretrain_gpt(arguments, source, gpu),
        lambda gpu: train(arguments, "ours-again", source, gpu),
    ]
    theirs, again = runs.side_by_side(lambda losses, gpu: losses(gpu), from_source, places)
    print_row(f"Megatron-LM from {START} vs. trainer without interruption", theirs, straight, table)
    print_row(f"trainer from {START} vs. trainer without interruption (noise)", again, straight, table)
    back = train(
        arguments, "ours-back", alone(directory / "megatron-lm", BACK, directory / "from-megatron-lm")
    )
    print_row(f"trainer from Megatron-LM's {BACK} vs. Megatron-LM without interruption", back, theirs, table)
    if arguments.json:
        print(json.dumps({"ours": straight, "megatron-lm": theirs, "ours-back": back, "ours-again": again}))
    there, here = differences(theirs, straight)[0], differences(back, theirs)[0]
    return int(max(there, here) > TOLERANCE)


def train(arguments: argparse.Namespace, name: str, load: Path | None = None, gpu: int = 0) -> Losses:
    """Losses of the trainer up to step LAST, from random weights or from `load`."""
    size = SIZES[arguments.device]
    config = runs.configuration(
        name,
        arguments.directory / name,
        arguments.device,
        model={
            "num_layers": size.layers,
            "hidden_size": size.width,
            "num_attention_heads": size.heads,
            "seq_length": size.seq_length,
            "vocab_size": size.vocab_size,
            "init_method_std": STD,
            # On a CPU, pretrain_gpt.py runs without its fused kernel, which computes gelu_tanh.
            "activation_func": "gelu" if arguments.device == "cpu" else "gelu_tanh",
        },
        training={
            "micro_batch_size": size.micro_batch_size,
            "global_batch_size": size.global_batch_size,
            "train_iters": LAST,
            "precision": arguments.precision,
        },
        optimizer={"lr": LR, "min_lr": LR / 10, "lr_warmup_iters": WARMUP},
        data=runs.corpus_section(arguments.corpus, SPLIT),
        checkpoint={"load": load and str(load), "save_interval": LAST if load else START},
    )
    print(f"the trainer: {name}", file=sys.stderr)
    steps = runs.train(config, place(arguments, gpu))
    return {step["iteration"]: step["loss"] for step in steps}


def pretrain_gpt(arguments: argparse.Namespace, load: Path, gpu: int = 0) -> Losses:
    """Losses of Megatron-LM from `load` up to step LAST. Saves at BACK."""
    directory = arguments.directory.resolve()
    words = [*DRIVERS[arguments.device], str(arguments.megatron_lm.resolve()), *flags(arguments, load)]
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} | place(arguments, gpu)
    print("Megatron-LM: pretrain_gpt.py", file=sys.stderr)
    text = runs.run(words, directory / "megatron-lm.log", environment=environment)
    found = [
        (int(step), float(loss)) for step, loss in re.findall(r"iteration +(\d+)/.* lm loss: (\S+) ", text)
    ]
    # The second line that a process prints is the mean of its first two steps.
    (_, first), (second, mean) = found[:2]
    return dict(found) | {second: 2 * mean - first}


def flags(arguments: argparse.Namespace, load: Path) -> list[str]:
    """Megatron-LM's flags for the same run."""
    size, directory = SIZES[arguments.device], arguments.directory.resolve()
    values: dict[str, Any] = {
        "load": load,
        "save": directory / "megatron-lm",
        "save-interval": BACK,
        "train-iters": LAST,
        "micro-batch-size": size.micro_batch_size,
        "global-batch-size": size.global_batch_size,
        "seq-length": size.seq_length,
        "max-position-embeddings": size.seq_length,
        "num-layers": size.layers,
        "hidden-size": size.width,
        "num-attention-heads": size.heads,
        "lr": LR,
        "min-lr": LR / 10,
        "lr-decay-style": "cosine",
        "lr-warmup-iters": WARMUP,
        "weight-decay": 0.1,
        "adam-beta1": 0.9,
        "adam-beta2": 0.95,
        "clip-grad": 1.0,
        "seed": 1234,
        "attention-dropout": 0,
        "hidden-dropout": 0,
        "init-method-std": STD,
        "tokenizer-type": "NullTokenizer",
        "vocab-size": size.vocab_size - 1,
        "data-path": arguments.corpus.resolve(),
        "split": SPLIT,
        "data-cache-path": directory / "megatron-lm-cache",
        "eval-iters": 0,
        "eval-interval": 10**6,
        "log-interval": 1,
        "ckpt-format": "torch_dist",
    }
    switches = [
        "exit-on-missing-checkpoint",
        "use-distributed-optimizer",
        "dist-ckpt-optim-fully-reshardable",
        "calculate-per-token-loss",
        "no-gradient-accumulation-fusion",
    ]
    if arguments.precision == "bf16":
        switches.append("bf16")
    if arguments.device == "cpu":
        values |= {"distributed-backend": "gloo", "transformer-impl": "local", "num-workers": 0}
        switches += ["use-cpu-initialization", "no-bias-gelu-fusion", "no-bias-dropout-fusion"]
        switches += ["no-masked-softmax-fusion", "no-persist-layer-norm"]
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    return words + [f"--{name}" for name in switches]


def place(arguments: argparse.Namespace, gpu: int) -> dict[str, str]:
    """Environment of a run on this GPU."""
    return {} if arguments.device == "cpu" else runs.one_gpu(gpu)


def alone(checkpoints: Path, iteration: int, target: Path) -> Path:
    """Make a checkpoint directory that contains only this checkpoint."""
    name = f"iter_{iteration:07d}"
    target.mkdir()
    (target / name).symlink_to(checkpoints / name)
    (target / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return target


def differences(one: Losses, other: Losses) -> list[float]:
    """Absolute differences in the steps that both have, in order."""
    return [abs(one[step] - other[step]) for step in sorted(one.keys() & other.keys())]


def print_row(title: str, one: Losses, other: Losses, table: TextIO) -> None:
    """Print a row of the table and flush it."""
    found = differences(one, other)
    figures = f"{found[0]:.1e} | {max(found):.1e} | {statistics.fmean(found):.1e}"
    print(f"| {title} | {figures} | {len(found)} |", file=table, flush=True)


if __name__ == "__main__":
    sys.exit(main())
