"""`python -m trainer.samples`: which documents training samples were cut from."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trainer import config as configuration
from trainer import device
from trainer.batch_size import total_samples
from trainer.errors import TrainerError
from trainer.logging import quiet_libraries
from trainer.resolve import resolve
from trainer.run_directory import RunDirectory

if TYPE_CHECKING:
    import torch


def main() -> int:
    """Reads the arguments and prints a line for each sample. Returns the exit status: 2 for mistakes."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.samples",
        description="Names the documents of training samples, on a CPU.",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        required=True,
        help="the training run's resolved configuration (JSON)",
    )
    parser.add_argument("first", type=int, metavar="FIRST", help="the first sample")
    parser.add_argument("last", type=int, metavar="LAST", nargs="?", help="the last one; left out: the first")
    arguments = parser.parse_args()
    quiet_libraries()
    try:
        config = resolve(configuration.read(arguments.config))
        device.prepare("cpu")  # whatever the run computes on
        dataset = _training_set(config)
    except (configuration.ConfigError, TrainerError, OSError) as error:
        print(f"samples: {error}", file=sys.stderr)
        return 2
    last = arguments.first if arguments.last is None else arguments.last
    end = total_samples(config.training)
    if not 0 <= arguments.first <= last < end:
        print(f"samples: {arguments.first} to {last} is not within 0 to {end - 1}", file=sys.stderr)
        return 2
    for sample in range(arguments.first, last + 1):
        prefix, documents = documents_of(dataset, sample)
        print(f"{sample}: {prefix}: {' '.join(map(str, documents))}")
    return 0


def documents_of(dataset: torch.utils.data.Dataset, sample: int) -> tuple[str, list[int]]:
    """The prefix of the pair that a sample is cut from, and the numbers of its documents there, in their order."""
    while hasattr(dataset, "dataset_index"):  # a blend
        dataset, sample = (
            dataset.datasets[dataset.dataset_index[sample]],
            int(dataset.dataset_sample_index[sample]),
        )
    shuffled = dataset.shuffle_index[sample]
    first, last = dataset.sample_index[shuffled][0], dataset.sample_index[shuffled + 1][0]
    return str(dataset.dataset_path), [int(document) for document in dataset.document_index[first : last + 1]]


def _training_set(config: configuration.TrainerConfig) -> torch.utils.data.Dataset:
    # These import megatron.core, which the stand-ins must precede.
    import torch

    from trainer.datasets import build_datasets

    def say(line: str) -> None:
        print(line, file=sys.stderr)

    # Alone it needs no network, and no name that resolves.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    cache, rows = RunDirectory.of(config).index_cache, config.model.padded_vocab_size
    datasets = build_datasets(config, cache, rows, True, say)
    torch.distributed.destroy_process_group()
    return datasets["train"]


if __name__ == "__main__":
    sys.exit(main())
