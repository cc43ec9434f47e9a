"""The documents that training samples were cut from. Imports megatron.core, so `device.prepare` must come first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from trainer.contract.config import BlendConfig, Dataset, TrainerConfig
from trainer.contract.errors import TrainerError
from trainer.contract.files.run_directory import RunDirectory
from trainer.contract.resuming.sampling import Phase, Sampling
from trainer.data.blend import Blend, plan_blends, training_blend
from trainer.data.datasets import complete_indices, located, open_datasets
from trainer.data.kind import Source
from trainer.data.kinds import kind_of
from trainer.data.progress import Progress


def lines(
    config: TrainerConfig, progress: Progress, first: int, last: int, log: Callable[[str], None]
) -> Iterator[str]:
    """Yields a line for each sample: the prefix of the pair that it is cut from, and its documents in this pair.

    Raises:
        TrainerError: which samples were read before the checkpoint is not recorded.
    """
    cache, rows = RunDirectory.of(config).index_cache, config.model.num_rows
    stages = plan_blends(config, cache, rows, log, progress)["train"]
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
            log,
        )
        complete_indices([blend], as_of, cache, rows, log)
        dataset = open_datasets({"train": (blend,)}, as_of, cache, rows, is_needed=True)["train"]
        for sample in wanted:
            order, number = located(dataset, sample)
            documents = kind.documents(order, number)
            yield f"{sample}: {order.dataset_path}: {' '.join(map(str, documents))}"


def _phases(config: TrainerConfig, stages: Sequence[Blend]) -> Iterator[tuple[Blend, TrainerConfig]]:
    """Yields the blend of each phase and the configuration of its data. `stages` are the planned ones."""
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
