"""`python -m trainer.data.samples`: prints the documents that training samples were cut from."""

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
from trainer.data.single_process import config_parser, single_process_group
from trainer.distributed import device
from trainer.metrics.console import quiet_libraries

if TYPE_CHECKING:
    import torch


def main() -> int:
    """Parse the arguments and print a line for each sample. Returns the exit status, which is 2 for mistakes."""
    parser = config_parser("trainer.data.samples", "Prints the documents of training samples, on a CPU.")
    parser.add_argument("first", type=int, metavar="FIRST", help="first sample")
    parser.add_argument("last", type=int, metavar="LAST", nargs="?", help="last sample; default: FIRST")
    arguments = parser.parse_args()
    quiet_libraries()
    try:
        config = _with_resumed_samples(resolve(configuration.read(arguments.config)))
        device.prepare("cpu")  # independent of the run's device
        dataset = _training_set(config)
    except (TrainerError, OSError) as error:
        print(f"samples: {error}", file=sys.stderr)
        return 2
    last = arguments.first if arguments.last is None else arguments.last
    end = total_samples(config.training)
    if not 0 <= arguments.first <= last < end:
        print(
            f"samples: {arguments.first} to {last} is outside of the run's samples, 0 to {end - 1}",
            file=sys.stderr,
        )
        return 2
    for sample in range(arguments.first, last + 1):
        prefix, documents = documents_of(dataset, sample)
        print(f"{sample}: {prefix}: {' '.join(map(str, documents))}")
    return 0


def documents_of(dataset: torch.utils.data.Dataset, sample: int) -> tuple[str, list[int]]:
    """The prefix of the pair that a sample is cut from, and the numbers of its documents in this pair, in order."""
    while hasattr(dataset, "dataset_index"):  # a blend
        dataset, sample = (
            dataset.datasets[dataset.dataset_index[sample]],
            int(dataset.dataset_sample_index[sample]),
        )
    shuffled = dataset.shuffle_index[sample]
    first, last = dataset.sample_index[shuffled][0], dataset.sample_index[shuffled + 1][0]
    return str(dataset.dataset_path), [int(document) for document in dataset.document_index[first : last + 1]]


def _with_resumed_samples(config: configuration.TrainerConfig) -> configuration.TrainerConfig:
    """`config` with train_iters adjusted to the samples that the run reads if it resumes from its newest checkpoint.

    Raises:
        TrainerError: the newest checkpoint is Megatron-LM's, which does not say this.
        OSError: the checkpoints cannot be read.
    """
    checkpoints = checkpoint_files.list_checkpoints(RunDirectory.of(config).checkpoints)
    if not checkpoints and config.checkpoint.load and not config.checkpoint.finetune:
        checkpoints = [
            checkpoint_files.describe(path)
            for path in checkpoint_files.paths_to_load(Path(config.checkpoint.load))
        ]
    newest = next((each for each in checkpoints if each.is_complete or each.is_foreign), None)
    if newest is None:
        return config
    if newest.record is None:
        raise TrainerError(
            f"{newest.path} is Megatron-LM's and does not say how many samples it has read. Wait for this run's first "
            "checkpoint"
        )
    record = newest.record
    training = covering(config.training, record["iteration"], record["consumed_samples"])
    return dataclasses.replace(config, training=training)


def _training_set(config: configuration.TrainerConfig) -> torch.utils.data.Dataset:
    # This imports megatron.core, so it must come after `device.prepare`.
    from trainer.data.datasets import build_datasets

    def log(line: str) -> None:
        print(line, file=sys.stderr)

    cache, rows = RunDirectory.of(config).index_cache, config.model.padded_vocab_size
    with single_process_group():
        return build_datasets(config, cache, rows, True, log)["train"]


if __name__ == "__main__":
    sys.exit(main())
