"""Measures what separate documents cost: the same training with and without data.reset_attention_mask.

    python -m benchmarks.documents [--steps N] [--layers N] [--cpu]

Trains a Llama of a few layers on samples of 8,192 tokens from documents of random lengths, first without the keys for
documents and then with all three. Prints the median step of each and the cost. Exit status 1 if documents cost more
than 5%. With --cpu, tiny shapes show that the benchmark works.
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
from benchmarks.train_cases import DOCUMENTS, EOD, LLAMA_8_LAYERS, Case
from hpcgen.data.indexed_dataset import IndexedDatasetWriter, token_dtype
from trainer.contract.files.index_header import bin_path, idx_path

MAX_COST = 0.05
MEDIAN_LENGTH = 400
"""Median number of tokens of a document. The mean is about 660, so a sample of 8,192 tokens has 12 documents."""

LLAMA = Case("llama", LLAMA_8_LAYERS, micro_batch_size=2, global_batch_size=4)
TINY = LLAMA_8_LAYERS | {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 96,
    "seq_length": 512,
    "vocab_size": 50257,
}


def main() -> int:
    """Run both configurations and compare them."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--steps", type=int, default=10, help="number of timed steps of each configuration")
    options.add_argument("--layers", type=int, default=4, help="number of layers")
    options.add_argument("--cpu", action="store_true", help="run tiny shapes on a CPU")
    options.set_defaults(one_rank=False, environment={})
    arguments = options.parse_args()
    runs.end_like_ctrl_c()
    if not arguments.cpu:
        runs.count_gpus(options)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        prefix = write_corpus(Path(scratch) / "corpus", num_tokens=200_000 if arguments.cpu else 10_000_000)
        plain, separate = (
            median_step(arguments, Path(scratch) / name, prefix, keys)
            for name, keys in (("plain", {}), ("separate", DOCUMENTS))
        )
    cost = separate / plain - 1
    print(
        f"one document per sample: {plain:.4f} s per step; separate documents: {separate:.4f} s ({cost:+.1%})"
    )
    return int(cost > MAX_COST)


def write_corpus(prefix: Path, num_tokens: int) -> Path:
    """Documents with lengths from a log-normal distribution, as those of texts on the web."""
    lengths = document_lengths(num_tokens // MEDIAN_LENGTH)
    tokens = numpy.random.default_rng(1).integers(0, EOD, lengths.sum())
    tokens[lengths.cumsum() - 1] = EOD
    with (
        bin_path(prefix).open("wb") as bin_file,
        IndexedDatasetWriter(bin_file, token_dtype(EOD + 1)) as writer,
    ):
        writer.add_documents(tokens.astype(token_dtype(EOD + 1)), lengths)
        with idx_path(prefix).open("wb") as idx_file:
            writer.write_index(idx_file)
    return prefix


def document_lengths(number: int) -> numpy.ndarray[Any, numpy.dtype[numpy.int64]]:
    """Tokens of some documents."""
    lengths = numpy.random.default_rng(0).lognormal(numpy.log(MEDIAN_LENGTH), 1.0, number)
    return lengths.astype(numpy.int64) + 2


def median_step(arguments: argparse.Namespace, run_dir: Path, prefix: Path, keys: dict[str, Any]) -> float:
    """Median time of a step in seconds, without the first ones."""
    model = (TINY if arguments.cpu else LLAMA_8_LAYERS) | {"num_layers": arguments.layers}
    case = dataclasses.replace(LLAMA, name=run_dir.name, model=model, data=keys)
    config = train.configuration(case, prefix, run_dir)
    if arguments.cpu:
        train.use_cpu(config)
        config["training"]["train_iters"] = 100
    result = train.run_trainer(case, config, arguments)
    return float(result["step_s"])


if __name__ == "__main__":
    sys.exit(main())
