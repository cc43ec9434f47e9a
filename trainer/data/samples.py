"""`python -m trainer.data.samples`: prints the documents that training samples were cut from."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from trainer.contract import config as configuration
from trainer.contract.config import BlendConfig, Dataset, TrainerConfig
from trainer.contract.config.resolve import resolve
from trainer.contract.errors import TrainerError
from trainer.contract.files.run_directory import RunDirectory
from trainer.contract.resuming.sampling import Phase, Sampling
from trainer.contract.rules.engine import SAMPLES, require
from trainer.data.progress import Progress, newest_checkpoint, of_next_attempt
from trainer.data.single_process import config_parser
from trainer.distributed import device
from trainer.distributed.loopback import single_process_group
from trainer.metrics.console import quiet_libraries

if TYPE_CHECKING:
    from trainer.data.blend import Blend


def main() -> int:
    """Parse the arguments and print a line for each sample. Returns the exit status, which is 2 for mistakes."""
    parser = config_parser("trainer.data.samples", "Prints the documents of training samples, on a CPU.")
    parser.add_argument("first", type=int, metavar="FIRST", help="first sample")
    parser.add_argument("last", type=int, metavar="LAST", nargs="?", help="last sample; default: FIRST")
    arguments = parser.parse_args()
    quiet_libraries()
    try:
        config = configuration.read(arguments.config)
        require(config, SAMPLES)
        if config.data.dataset is not None:
            raise TrainerError(
                f"data.dataset = {config.data.dataset!r} makes the samples, which have no documents"
            )
        config = resolve(config)
        progress = _progress(config)
        last = arguments.first if arguments.last is None else arguments.last
        if not 0 <= arguments.first <= last < progress.end:
            raise TrainerError(
                f"{arguments.first} to {last} is outside of the run's samples, 0 to {progress.end - 1}"
            )
        device.prepare("cpu")  # independent of the run's device
        with single_process_group():
            for line in _lines(config, progress, arguments.first, last):
                print(line)
    except (TrainerError, OSError) as error:
        print(f"samples: {error}", file=sys.stderr)
        return 2
    return 0


def _progress(config: TrainerConfig) -> Progress:
    """The progress of the run's next attempt.

    Raises:
        TrainerError: the newest checkpoint is Megatron-LM's.
        OSError: the checkpoints or the pairs cannot be read.
    """
    if progress := of_next_attempt(config):
        return progress
    newest = newest_checkpoint(config)
    raise TrainerError(
        f"{newest and newest.path} is Megatron-LM's and does not say how many samples it has read. Wait for this run's "
        "first checkpoint"
    )


def _lines(config: TrainerConfig, progress: Progress, first: int, last: int) -> Iterator[str]:
    """Yields a line for each sample: the prefix of the pair that it is cut from, and its documents in this pair."""
    # These import megatron.core, so they must come after `device.prepare`.
    from trainer.data.blend import plan_blends
    from trainer.data.datasets import complete_indices, located, open_datasets
    from trainer.data.kind import Source
    from trainer.data.kinds import kind_of

    cache, rows = RunDirectory.of(config).index_cache, config.model.padded_vocab_size
    stages = plan_blends(config, cache, rows, _log, progress)["train"]
    phases = [*_phases(config, stages)]
    if first < (earliest := phases[0][0].first):
        raise TrainerError(f"which samples were read before sample {earliest} is not recorded")
    for blend, as_of in phases:
        wanted = range(max(first, blend.first), min(last + 1, blend.end))
        if not wanted:
            continue
        first = wanted.stop
        kind = kind_of(as_of.data)
        kind.pack(
            "train",
            {part.stream.prefix: part.documents for part in blend.parts},
            Source(as_of, cache, rows),
            _log,
        )
        complete_indices([blend], as_of, cache, rows, _log)
        dataset = open_datasets({"train": (blend,)}, as_of, cache, rows, is_needed=True)["train"]
        for sample in wanted:
            order, number = located(dataset, sample)
            documents = kind.documents(order, number)
            yield f"{sample}: {order.dataset_path}: {' '.join(map(str, documents))}"


def _phases(config: TrainerConfig, stages: Sequence[Blend]) -> Iterator[tuple[Blend, TrainerConfig]]:
    """Yields the blend of each phase and the configuration of its data. `stages` are the planned ones."""
    from trainer.data.blend import training_blend

    planned = stages[0].sampling
    phases = planned.phases if planned is not None else ()
    for number, phase in enumerate(phases[:-1]):
        assert planned is not None
        blend = training_blend(planned, number, phases[number + 1].first)
        yield blend, _as_of(config, planned, phase)
    for stage in stages:
        yield stage, config


def _as_of(config: TrainerConfig, planned: Sampling, phase: Phase) -> TrainerConfig:
    """The configuration with the data of an earlier phase."""
    streams = [planned.streams[portion.stream] for portion in phase.portions]
    datasets = tuple(Dataset(prefix=stream.prefix) for stream in streams)
    data = (
        BlendConfig(train=datasets)
        if phase.split is None
        else BlendConfig(datasets=datasets, split=phase.split)
    )
    if (packing := streams[0].packing) is not None:
        data = dataclasses.replace(data, sft=True, sft_packing=packing.packed)
    model = dataclasses.replace(config.model, seq_length=streams[0].seq_length)
    return dataclasses.replace(config, data=data, model=model)


def _log(line: str) -> None:
    print(line, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
