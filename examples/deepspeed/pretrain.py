"""Pretrain a transformers model with DeepSpeed on tokens that `hpcgen submit prepare` wrote.

The model is the shape in a Hugging Face config.json, with random weights. The program saves complete checkpoints, stops
after SIGUSR1, and resumes at the same sample. One process per GPU; see README.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

LARGEST_INITIAL_EXCESS = 1.0
"""A new model predicts about uniformly, so its first loss is near ln(vocabulary). A larger difference is a defect."""

UNIVERSAL = "_universal"
"""Suffix of the directory that ds_to_universal writes for another number of GPUs."""


def main() -> None:
    """Train until --steps, or until the signal."""
    options = parse_options()
    stop = StopSignal()
    deepspeed.init_distributed()
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(options.seed)
    tag = newest_tag(options.checkpoints)
    ds_config = json.loads(options.deepspeed_config.read_text())
    ds_config.setdefault("checkpoint", {})["load_universal"] = tag.endswith(UNIVERSAL)
    engine = build_engine(options, ds_config)
    tokens = Tokens(options.data, options.seq_length, options.seed)
    start = load(engine, options.checkpoints, tag) if tag else 0
    say(f"resuming at step {start}" if start else "starting at step 0")
    for step in range(start + 1, options.steps + 1):
        began = time.perf_counter()
        loss = train_step(engine, tokens, step)
        if step == 1 and not options.from_pretrained:
            check_first_loss(loss, engine.module.config.vocab_size)
        tokens_per_s = engine.train_batch_size() * options.seq_length / (time.perf_counter() - began)
        say(f"step {step} of {options.steps}, loss {loss:.6f}, {tokens_per_s:,.0f} tokens/s")
        must_stop = is_true_anywhere(stop.received)
        if must_stop or step % options.save_every == 0 or step == options.steps:
            save(engine, options.checkpoints, step, options.keep)
            say(f"saved step {step}")
        if must_stop:
            say(f"stopping after step {step}, as the signal asked")
            break
    dist.barrier()
    dist.destroy_process_group()


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--deepspeed_config", type=Path, required=True, help="DeepSpeed's JSON file")
    parser.add_argument("--model", type=Path, required=True, help="config.json of a model, or its directory")
    parser.add_argument(
        "--from-pretrained", action="store_true", help="start with the weights in the directory --model"
    )
    parser.add_argument("--data", type=Path, required=True, help="prefix of a .bin/.idx pair")
    parser.add_argument("--checkpoints", type=Path, required=True, help="directory for checkpoints")
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--steps", type=int, required=True, help="number of optimizer steps")
    parser.add_argument("--save-every", type=int, default=500, help="steps between checkpoints")
    parser.add_argument("--keep", type=int, default=2, help="number of checkpoints to keep")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument(
        "--activation-checkpointing", action="store_true", help="recompute activations to save memory"
    )
    return parser.parse_args()


def build_engine(options: argparse.Namespace, ds_config: dict[str, Any]) -> deepspeed.DeepSpeedEngine:
    """The model in DeepSpeed's engine."""
    # While this object exists, transformers partitions parameters under ZeRO-3 as it creates them, and gathers each
    # module to initialize it. deepspeed.zero.Init around the model would skip transformers' initialization.
    keep = HfDeepSpeedConfig(ds_config)
    if options.from_pretrained:
        model = AutoModelForCausalLM.from_pretrained(options.model, attn_implementation="sdpa")
    else:
        config = AutoConfig.from_pretrained(options.model)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    if options.activation_checkpointing:
        model.gradient_checkpointing_enable()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
    del keep
    engine.train()
    return engine


def train_step(engine: deepspeed.DeepSpeedEngine, tokens: Tokens, step: int) -> float:
    """Run one optimizer step. Returns the loss, averaged over the microbatches of all ranks."""
    size, accumulation = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    ranks, rank = dist.get_world_size(), dist.get_rank()
    total = torch.zeros((), device=engine.device)
    for micro_step in range(accumulation):
        # Numbers of the samples depend on the step alone, so a resumed run continues with the next sample.
        first = (((step - 1) * accumulation + micro_step) * ranks + rank) * size
        inputs = tokens.batch(first, size).to(engine.device)
        loss = engine(input_ids=inputs, labels=inputs, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        total += loss.detach() / accumulation
    dist.all_reduce(total)
    return float(total) / ranks


def check_first_loss(loss: float, vocab_size: int) -> None:
    """Fail if the weights were not initialized.

    Raises:
        SystemExit: the loss is far from that of a uniform prediction.
    """
    expected = math.log(vocab_size)
    if not abs(loss - expected) < LARGEST_INITIAL_EXCESS:
        raise SystemExit(
            f"the first loss is {loss:.2f}, but a new model with {vocab_size} tokens starts near {expected:.2f}: its "
            "weights were not initialized; see 'Initialization under ZeRO-3' in the README.md of this example"
        )


class Tokens:
    """Samples of equal length, cut from the tokens of a .bin/.idx pair and shuffled in each epoch."""

    def __init__(self, prefix: Path, seq_length: int, seed: int) -> None:
        header = Path(f"{prefix}.idx").read_bytes()[:18]
        if header[:9] != b"MMIDIDX\x00\x00":
            raise SystemExit(f"{prefix}.idx is not the index of a .bin/.idx pair")
        # Megatron-Core's code of the token type
        dtype = {4: np.int32, 8: np.uint16}[header[17]]
        self._tokens = np.memmap(f"{prefix}.bin", dtype=dtype, mode="r")
        self._seq_length, self._seed, self._epoch = seq_length, seed, -1
        self._per_epoch = len(self._tokens) // seq_length
        if not self._per_epoch:
            raise SystemExit(
                f"{prefix}.bin has {len(self._tokens)} tokens, fewer than --seq-length {seq_length}"
            )

    def batch(self, first: int, size: int) -> torch.Tensor:
        """Samples `first` to `first + size`."""
        return torch.stack([self._sample(first + number) for number in range(size)])

    def _sample(self, number: int) -> torch.Tensor:
        epoch, number = divmod(number, self._per_epoch)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng((self._seed, epoch)).permutation(self._per_epoch)
        start = self._order[number] * self._seq_length
        return torch.from_numpy(self._tokens[start : start + self._seq_length].astype(np.int64))


class StopSignal:
    """Becomes `received` when hpcgen asks the program to save and stop."""

    def __init__(self) -> None:
        self.received = False
        signal.signal(signal.SIGUSR1, self._receive)

    def _receive(self, number: int, frame: object) -> None:
        self.received = True


def is_true_anywhere(value: bool) -> bool:
    """True on every rank if `value` is true on one: the signal does not reach all ranks in the same step."""
    flag = torch.tensor(int(value), device=get_accelerator().current_device_name())
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def save(engine: deepspeed.DeepSpeedEngine, directory: Path, step: int, keep: int) -> None:
    """Write a checkpoint whose tag is the step. The file `latest` names it once all ranks have written their part."""
    # DeepSpeed truncates the old file `latest` before it writes the new one, so a kill in between loses both.
    engine.save_checkpoint(str(directory), tag=str(step), client_state={"step": step}, save_latest=False)
    dist.barrier()
    if dist.get_rank() == 0:
        (directory / "latest.new").write_text(str(step))
        (directory / "latest.new").replace(directory / "latest")
        saved = sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal())
        for old in saved[:-keep]:
            shutil.rmtree(directory / str(old))


def newest_tag(directory: Path) -> str:
    """Tag of the newest checkpoint, or an empty string. The copy that ds_to_universal made of a step is preferred."""
    files = [directory / name for name in ("latest", f"latest{UNIVERSAL}")]
    tags = [file.read_text().strip() for file in files if file.exists()]
    return max(tags, key=lambda tag: (int(tag.removesuffix(UNIVERSAL)), len(tag)), default="")


def load(engine: deepspeed.DeepSpeedEngine, directory: Path, tag: str) -> int:
    """Load a checkpoint. Returns its step.

    Raises:
        SystemExit: the checkpoint cannot be loaded.
    """
    path, client_state = engine.load_checkpoint(str(directory), tag=tag)
    if path is None:
        raise SystemExit(f"checkpoint {directory / tag} cannot be loaded (see above)")
    return int(client_state["step"])


def say(message: str) -> None:
    """Print a message on rank 0."""
    if dist.get_rank() == 0:
        print(message, flush=True)


if __name__ == "__main__":
    main()
