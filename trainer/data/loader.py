"""Divides the samples, which have a fixed global order, into the microbatches of this rank.

Each step reads the next samples of the shuffled training set, in every layout. So the number of consumed samples is all
that a resumed run needs to find its position in the data.
Shapes: b microbatch, s tokens of the sequence on this context-parallel rank.
"""

from __future__ import annotations

import functools
import itertools
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model

from trainer.contract.config import BlendConfig, TrainerConfig
from trainer.contract.errors import TrainerError
from trainer.contract.model.batch_size import Batch
from trainer.data import documents
from trainer.data.microbatch import IS_FIRST, OWN_POSITIONS, PADDING, MicroBatch
from trainer.data.own import Refused, StreamReader, StreamSamples
from trainer.data.own_samples import SampleError
from trainer.distributed.groups import this_rank
from trainer.distributed.sequence import zigzag_positions
from trainer.model import experts

MAX_PER_LOAD = 8
"""Maximum number of microbatches that a loader process hands over at once."""

LOAD_BYTES = 2**20
"""Maximum size of several microbatches that are handed over at once. They are in /dev/shm, which has 64 MiB in some
containers: eight ranks with two loader processes, and two loads ready in each, then take half of it."""

MAX_FIELDS = 4
"""Maximum number of integers for each token of a microbatch (`Packed.fields`)."""


class Packed(NamedTuple):
    """A collated microbatch."""

    fields: torch.Tensor
    """int64 [3 or 4, b, s]: tokens, labels, 1 where the loss counts, and positions if they start over."""
    boundaries: torch.Tensor | None
    """See MicroBatch."""
    padding: tuple[int, ...] | None
    """See MicroBatch."""
    largest_id: int


class Load(NamedTuple):
    """Successive microbatches, as a loader process hands them over: at most two tensors, since each costs 0.7 ms."""

    fields: torch.Tensor
    """int64 [m, 3 or 4, b, s], for m microbatches."""
    boundaries: torch.Tensor | None
    """The boundaries of all microbatches, one after the other."""
    num_boundaries: list[int]
    """Number of boundaries of each microbatch. Empty without boundaries."""
    padding: list[tuple[int, ...] | None]
    """Padding of each microbatch."""
    largest_id: int
    problem: str = ""
    """Why a sample of the user cannot be used. There are no microbatches then."""
    end: tuple[int, Any] | None = None
    """The end of a batch from a stream: number of samples that the run has read then, and the stream's state."""


class LoadSampler:
    """Sample indices of this data-parallel rank for all batches in order, one list for `per_load` microbatches."""

    def __init__(
        self, batches: Iterable[Batch], micro_batch_size: int, dp_rank: int, dp_size: int, per_load: int = 1
    ) -> None:
        self._batches, self._size, self._per_load = batches, micro_batch_size, per_load
        self._offset, self._stride = dp_rank * micro_batch_size, dp_size * micro_batch_size

    def __iter__(self) -> Iterator[list[int]]:
        starts = self._starts()
        while load := list(itertools.islice(starts, self._per_load)):
            yield [start + index for start in load for index in range(self._size)]

    def _starts(self) -> Iterator[int]:
        """The first sample of each microbatch."""
        for batch in self._batches:
            yield from range(batch.first + self._offset, batch.first + batch.size, self._stride)


class StreamLoads(torch.utils.data.IterableDataset[Load]):
    """This rank's part of a stream that all ranks read from its beginning or from its position."""

    def __init__(
        self,
        stream: StreamSamples,
        batches: Iterable[tuple[Batch, LoadSampler]],
        collate: Callable[[list[dict[str, torch.Tensor] | Refused]], Load],
    ) -> None:
        """`batches` has the sampler of each batch."""
        self._stream, self._batches, self._collate = stream, batches, collate

    def __iter__(self) -> Iterator[Load]:
        try:
            reader = self._stream.reader()
            for batch, sampler in self._batches:
                yield from self._of_batch(reader, batch, sampler)
        except SampleError as error:
            yield self._collate([Refused(str(error))])

    def _of_batch(self, reader: StreamReader, batch: Batch, sampler: LoadSampler) -> Iterator[Load]:
        load: Load | None = None
        for numbers in sampler:
            if load is not None:
                yield load
            load = self._collate([reader.read(number) for number in numbers])
        assert load is not None
        end = batch.first + batch.size
        state = None
        if self._stream.has_state:
            reader.skip_to(end)  # behind the samples of the other ranks
            state = reader.state()
        yield load._replace(end=(end, state))


def num_microbatches(batch_size: int, config: TrainerConfig, groups: ProcessGroupCollection) -> int:
    """Number of microbatches on each data-parallel rank in a step of `batch_size` samples."""
    return batch_size // (config.training.micro_batch_size * groups.dp.size())


def reads_samples(chunk: DistributedDataParallel, data: BlendConfig) -> bool:
    """True if the chunk embeds tokens, has MTP layers or computes the loss, if attention must know the documents, or
    if routers must know the learned tokens."""
    if data.separates_documents or experts.needs_mask(chunk, data):
        return True
    model = unwrap_model(chunk)
    return bool(model.pre_process or model.post_process or getattr(model, "mtp_process", False))


def data_iterators(
    model: list[DistributedDataParallel],
    dataset: torch.utils.data.Dataset | None,
    config: TrainerConfig,
    groups: ProcessGroupCollection,
    batches: Iterable[Batch],
) -> list[Iterator[MicroBatch] | None]:
    """Microbatches of `batches` for each chunk; None for chunks that read no samples.

    The chunks of a rank share a loader. An interleaved schedule reads the same microbatch for each chunk at a different
    time.
    """
    reading = [reads_samples(chunk, config.data) for chunk in model]
    copies = iter(itertools.tee(micro_batches(dataset, config, groups, batches), sum(reading)))
    return [next(copies) if reads else None for reads in reading]


def micro_batches(
    dataset: torch.utils.data.Dataset,
    config: TrainerConfig,
    groups: ProcessGroupCollection,
    batches: Iterable[Batch],
) -> Iterator[MicroBatch]:
    """This rank's microbatches of `batches`, in order."""
    size, workers = config.training.micro_batch_size, config.data.num_workers
    per_load = micro_batches_per_load(config) if workers else 1
    positions = zigzag_positions(config.model.seq_length, groups.cp.rank(), groups.cp.size())
    collate = functools.partial(
        _load, size=size, data=config.data, positions=positions if groups.cp.size() > 1 else None
    )
    stream = dataset if isinstance(dataset, StreamSamples) else None
    if stream is None:
        sampler = LoadSampler(batches, size, groups.dp.rank(), groups.dp.size(), per_load)
        reading = {"dataset": dataset, "batch_sampler": sampler, "collate_fn": collate}
    else:
        samplers = (
            (batch, LoadSampler([batch], size, groups.dp.rank(), groups.dp.size(), per_load))
            for batch in batches
        )
        reading = {"dataset": StreamLoads(stream, samplers, collate), "batch_size": None}
        workers = min(workers, 1)  # each would read all of the stream
    loader = torch.utils.data.DataLoader(
        **reading,
        num_workers=workers,
        pin_memory=config.device == "cuda",
        # A loader draws a random number when it starts. It must not use the generator that dropout uses on a CPU.
        generator=torch.Generator(),
        worker_init_fn=_ignore_stop_signals if workers else None,
        multiprocessing_context="fork" if workers else None,
    )
    device = torch.device("cpu")
    if config.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    in_sample = positions.to(device).expand(size, -1)
    for load in loader:
        if load.problem:
            raise TrainerError(f"{this_rank()}: {load.problem}")
        if stream is not None and load.end is not None:
            stream.note(*load.end)
        _check_ids(load.largest_id, config.model.num_rows)
        yield from _unpacked(load, device, in_sample)


def micro_batches_per_load(config: TrainerConfig) -> int:
    """Number of microbatches that a loader process hands over at once."""
    bytes_each = (
        MAX_FIELDS * config.training.micro_batch_size * config.model.seq_length * torch.int64.itemsize
    )
    return max(1, min(MAX_PER_LOAD, LOAD_BYTES // bytes_each))


def _unpacked(load: Load, device: torch.device, in_sample: torch.Tensor) -> Iterator[MicroBatch]:
    """The microbatches of `load` on `device`. `in_sample` are their positions [b, s] unless positions start over."""
    fields = load.fields.to(device, non_blocking=True)
    loss_masks = fields[:, 2].float()
    boundaries: Sequence[torch.Tensor | None] = [None] * len(fields)
    if load.boundaries is not None:
        boundaries = load.boundaries.split(load.num_boundaries)
    for each, loss_mask, own, padding in zip(fields, loss_masks, boundaries, load.padding, strict=True):
        tokens, labels, _, *reset = each
        yield MicroBatch(tokens, labels, loss_mask, reset[0] if reset else in_sample, own, padding)


def _load(
    samples: list[dict[str, torch.Tensor] | Refused],
    size: int,
    data: BlendConfig,
    positions: torch.Tensor | None,
) -> Load:
    """Collate the samples of successive microbatches of `size` samples, in a loader process."""
    usable = []
    for sample in samples:
        if isinstance(sample, Refused):
            return Load(torch.empty(0), None, [], [], 0, problem=sample.problem)
        usable.append(sample)
    packed = [_packed(usable[first : first + size], data, positions) for first in range(0, len(usable), size)]
    boundaries = [each.boundaries for each in packed if each.boundaries is not None]
    return Load(
        fields=torch.stack([each.fields for each in packed]),
        boundaries=torch.cat(boundaries) if boundaries else None,
        num_boundaries=[len(each) for each in boundaries],
        padding=[each.padding for each in packed],
        largest_id=max(each.largest_id for each in packed),
    )


def _packed(
    samples: list[dict[str, torch.Tensor]], data: BlendConfig, positions: torch.Tensor | None
) -> Packed:
    """Collate the samples of a microbatch. `positions` are the positions in the sequence that this rank holds."""
    names = ("tokens", "labels", "loss_mask")
    fields = torch.stack([torch.stack([sample[name].long() for sample in samples]) for name in names])
    largest_id = int(fields[:2].max())
    if OWN_POSITIONS in samples[0]:
        fields = torch.cat([fields, torch.stack([sample[OWN_POSITIONS] for sample in samples])[None]])
    boundaries = padding = None
    if IS_FIRST in samples[0]:
        is_first = torch.stack([sample[IS_FIRST] for sample in samples]).bool()
        fields = torch.cat([fields, documents.positions(is_first)[None]])
        boundaries = documents.boundaries(is_first)
        padding = tuple(int(sample[PADDING]) for sample in samples)
    elif data.needs_eod:  # samples of a stream of texts do not know where these begin
        assert data.eod_id is not None
        is_first = documents.first_tokens(fields[0], data.eod_id)
        if data.eod_mask_loss:
            fields[2].masked_fill_(fields[0] == data.eod_id, 0)
        if data.reset_position_ids:
            fields = torch.cat([fields, documents.positions(is_first)[None]])
        if data.reset_attention_mask:
            boundaries = documents.boundaries(is_first)
    return Packed(fields if positions is None else fields[:, :, positions], boundaries, padding, largest_id)


def _check_ids(largest: int, rows: int) -> None:
    """Refuse token IDs that have no row in the embedding. On a GPU they would fail later, in an assertion of a kernel.

    Raises:
        TrainerError: on this rank only.
    """
    if largest >= rows:
        raise TrainerError(
            f"{this_rank()}: the data contains the token ID {largest}, "
            f"but the embedding has {rows} rows (model.padded_vocab_size). The data was made with another tokenizer or "
            "is damaged; `hpcgen data verify -c RUN.yaml` names the place"
        )


def _ignore_stop_signals(worker: int) -> None:
    # Slurm may signal every process of the step, and the trainer needs its loaders to finish the current step.
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
