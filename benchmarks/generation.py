"""Generates with the trainer and with transformers from the same random weights, and compares tokens per second.

    python -m benchmarks.generation [--model llama|gpt2] [--batch-sizes N ...] [--new-tokens N] [--device cuda|cpu]

Both take the most likely token, with a cache of keys and values, in bf16 on a GPU and in fp32 on a CPU. On a CPU, the
models are smaller. Prints a Markdown table. Exit status 1 if the trainer is slower than transformers.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPT = "Once upon a time, in a land of many words, "
ROUNDS = 3
"""Rounds of which the fastest counts. The first one also loads kernels."""

GPU_SIZES: dict[str, dict[str, Any]] = {
    "llama": {
        **{"num_hidden_layers": 8, "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 32000},
        **{"num_attention_heads": 32, "num_key_value_heads": 8},
    },
    "gpt2": {"n_layer": 24, "n_embd": 1024, "n_head": 16},
}
CPU_SIZES: dict[str, dict[str, Any]] = {
    "llama": {
        **{"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 896, "vocab_size": 8000},
        **{"num_attention_heads": 4, "num_key_value_heads": 2},
    },
    "gpt2": {"n_layer": 4, "n_embd": 256, "n_head": 4},
}


def main() -> int:
    """Time both for each batch size. Returns the exit status."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--model", choices=list(GPU_SIZES), default="llama")
    options.add_argument("--batch-sizes", type=int, nargs="+", metavar="N", default=[1, 8, 32])
    options.add_argument("--new-tokens", type=int, metavar="N", help="default: 256 on a GPU, 32 on a CPU")
    options.add_argument("--device", choices=["cuda", "cpu"], help="default: a GPU if there is one")
    arguments = options.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    count = arguments.new_tokens or (256 if device == "cuda" else 32)
    reference = build(arguments.model, device)
    with tempfile.TemporaryDirectory() as scratch:
        model, tokenizer = imported(reference, Path(scratch), device)
    print(f"{arguments.model}, {count} new tokens, {device}\n")
    print("| batch size | trainer (tokens/s) | transformers (tokens/s) | ratio |\n| --- | --- | --- | --- |")
    is_slower = False
    for size in arguments.batch_sizes:
        ours, theirs = rates(model, tokenizer, reference, size, count)
        is_slower |= ours < theirs
        print(f"| {size} | {ours:,.0f} | {theirs:,.0f} | {ours / theirs:.2f} |", flush=True)
    return int(is_slower)


def build(name: str, device: str) -> Any:
    """A model of transformers with random weights."""
    import torch
    import transformers

    size = (GPU_SIZES if device == "cuda" else CPU_SIZES)[name]
    torch.manual_seed(0)
    with torch.device(device):
        if name == "gpt2":
            model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size))
        else:
            config = transformers.LlamaConfig(**size, max_position_embeddings=4096)
            model = transformers.LlamaForCausalLM(config)
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return model.to(torch.bfloat16 if device == "cuda" else torch.float32).eval()


def imported(reference: Any, scratch: Path, device: Any) -> tuple[Any, Any]:
    """The trainer's model with the weights of `reference`, and a tokenizer."""
    reference.save_pretrained(scratch / "transformers")
    command = [sys.executable, "-m", "trainer.huggingface", "import", str(scratch / "transformers")]
    subprocess.run([*command, "--to", str(scratch / "imported")], check=True, stdout=sys.stderr)
    from trainer.inference import load_model

    precision: Any = "bf16" if device == "cuda" else "fp32"
    return load_model(scratch / "imported", tokenizer="bytes", device=device, precision=precision)


def rates(model: Any, tokenizer: Any, reference: Any, size: int, count: int) -> tuple[float, float]:
    """Tokens per second of the trainer and of transformers."""
    import dataclasses

    import torch

    from trainer.inference import Options, generate

    endless = dataclasses.replace(tokenizer, eod_id=None)
    options = Options(max_new_tokens=count, batch_size=size)
    inputs = torch.tensor([tokenizer.encode(PROMPT)] * size, device=reference.device)

    def ours() -> None:
        for _ in generate(model, endless, [PROMPT] * size, options):
            pass

    def theirs() -> None:
        reference.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=count, do_sample=False
        )

    best = [float("inf"), float("inf")]
    for _ in range(ROUNDS):  # in turn, since a shared machine changes its speed
        best = [min(known, seconds(function)) for known, function in zip(best, (ours, theirs), strict=True)]
    return size * count / best[0], size * count / best[1]


def seconds(function: Callable[[], None]) -> float:
    """Duration of a call. Both functions return after their last token has reached the host."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
