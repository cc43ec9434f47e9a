"""`python -m trainer.data.samples`: which documents training samples were cut from."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.contract import checkpoint_files
from trainer.contract import config as configuration
from trainer.contract.batch_size import covering, total_samples
from trainer.contract.errors import TrainerError
from trainer.contract.resolve import resolve
from trainer.contract.run_directory import RunDirectory
from trainer.data.single_process import alone, parser_of
from trainer.distributed import device
from trainer.metrics.console import quiet_libraries

if TYPE_CHECKING:
    import torch


def main() -> int:
    """Reads the arguments and prints a line for each sample. Returns the exit status: 2 for mistakes."""
    parser = parser_of("trainer.data.samples", "Names the documents of training samples, on a CPU.")
    parser.add_argument("first", type=int, metavar="FIRST", help="the first sample")
    parser.add_argument("last", type=int, metavar="LAST", nargs="?", help="the last one; left out: the first")
    arguments = parser.parse_args()
    quiet_libraries()
    try:
        config = _as_read(resolve(configuration.read(arguments.config)))
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


def _as_read(config: configuration.TrainerConfig) -> configuration.TrainerConfig:
    """`config` with as many samples as the run asks for, which goes on from its newest checkpoint.

    Raises:
        TrainerError: only Megatron-LM's checkpoint says where that is.
        OSError: the checkpoints cannot be read.
    """
    checkpoints = checkpoint_files.list_checkpoints(RunDirectory.of(config).checkpoints)
    if not checkpoints and config.checkpoint.load and not config.checkpoint.finetune:
        checkpoints = checkpoint_files.list_checkpoints(Path(config.checkpoint.load))
    newest = next((each for each in checkpoints if each.is_complete or each.is_foreign), None)
    if newest is None:
        return config
    if newest.record is None:
        raise TrainerError(
            f"{newest.path} is Megatron-LM's: how many samples it had read, a checkpoint of this run's own will say"
        )
    record = newest.record
    reading = covering(config.training, record["iteration"], record["consumed_samples"])
    return dataclasses.replace(config, training=reading)


def _training_set(config: configuration.TrainerConfig) -> torch.utils.data.Dataset:
    # This imports megatron.core, which the stand-ins must precede.
    from trainer.data.datasets import build_datasets

    def say(line: str) -> None:
        print(line, file=sys.stderr)

    cache, rows = RunDirectory.of(config).index_cache, config.model.padded_vocab_size
    with alone():
        return build_datasets(config, cache, rows, True, say)["train"]


if __name__ == "__main__":
    sys.exit(main())
