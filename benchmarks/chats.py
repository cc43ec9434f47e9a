"""Compares training on packed chats with one chat per sample, in real tokens per second on one GPU.

    python -m benchmarks.chats [--steps N] [--layers N] [--json] [--cpu]

Trains a Llama of a few layers on chats of random lengths in samples of 4,096 tokens: with data.sft_packing, and
without. With two GPUs, both run at the same time, else one after the other. With --cpu, a tiny shape shows that the
benchmark works.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy

from benchmarks import runs, train
from benchmarks.documents import TINY
from benchmarks.train_cases import LLAMA_8_LAYERS, Case
from hpcgen.data.indexed_dataset import IndexedDatasetWriter, token_dtype
from trainer.contract.files.index_header import bin_path, idx_path
from trainer.contract.files.loss_mask import mask_path

LENGTH = 4096
MEDIAN_LENGTH = 400
"""Median number of tokens of a chat. The mean is about 640."""


def main() -> int:
    """Train on both kinds of samples, and print a line for each."""
    options = runs.comparison_options(__doc__)
    options.add_argument("--layers", type=int, default=4, help="number of layers")
    options.set_defaults(one_rank=False)
    arguments = options.parse_args()
    runs.end_like_ctrl_c()
    gpus = 1 if arguments.cpu else runs.count_gpus(options)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        directory = Path(scratch).resolve()
        chats = write_chats(directory / "chats", 2_000 if arguments.cpu else 20_000)
        results = runs.side_by_side(
            lambda packing, place: measured(packing, place, chats, directory, arguments), (True, False), gpus
        )
    runs.print_comparison(results, results[1], line, arguments.json)
    return 0


def write_chats(prefix: Path, number: int) -> Path:
    """A pair of chats with random tokens and lengths. The second half of each chat is an answer."""
    vocab_size = LLAMA_8_LAYERS["vocab_size"]
    generator = numpy.random.default_rng(0)
    lengths = generator.lognormal(numpy.log(MEDIAN_LENGTH), 1.0, number).astype(numpy.int64) + 8
    lengths = lengths.clip(max=LENGTH)
    dtype = token_dtype(vocab_size)
    with bin_path(prefix).open("wb") as bin_file, IndexedDatasetWriter(bin_file, dtype) as writer:
        writer.add_documents(generator.integers(0, vocab_size, lengths.sum()).astype(dtype), lengths)
        with idx_path(prefix).open("wb") as idx_file:
            writer.write_index(idx_file)
    begins = numpy.repeat(lengths.cumsum() - lengths, lengths)
    is_answer = numpy.arange(lengths.sum()) - begins >= numpy.repeat(lengths // 2, lengths)
    Path(mask_path(prefix)).write_bytes(is_answer.astype(numpy.uint8).tobytes())
    return prefix


def measured(
    packing: bool, place: int, chats: Path, directory: Path, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Times and real tokens per second of a training with or without packing."""
    name = "packed" if packing else "one chat per sample"
    model = LLAMA_8_LAYERS | {"num_layers": arguments.layers, "seq_length": LENGTH}
    if arguments.cpu:
        model = TINY | {"num_layers": 2, "seq_length": LENGTH, "vocab_size": LLAMA_8_LAYERS["vocab_size"]}
    case = Case(name, model, micro_batch_size=2, global_batch_size=8)
    if arguments.cpu:
        case = dataclasses.replace(case, micro_batch_size=1, global_batch_size=1)
    config = train.configuration(case, chats, directory / name.replace(" ", "-"))
    config["data"] |= {"sft": True, "sft_packing": packing}
    if arguments.cpu:
        train.use_cpu(config)
    environment = {} if arguments.cpu else runs.one_gpu(place)
    options = argparse.Namespace(**vars(arguments), environment=environment)
    result = train.run_trainer(case, config, options)
    return {"name": name, **{key: result[key] for key in ("step_s", "tokens_per_s", "peak_memory_gib")}}


def line(result: dict[str, Any], unpacked: dict[str, Any]) -> str:
    """A result, and its speed relative to that of one chat per sample."""
    return (
        f"{result['name']:20} {result['step_s'] * 1e3:8.1f} ms per step, {result['tokens_per_s']:9,.0f} real tokens/s "
        f"({result['tokens_per_s'] / unpacked['tokens_per_s']:.2f}), {result['peak_memory_gib']:.1f} GiB"
    )


if __name__ == "__main__":
    sys.exit(main())
