"""Divides the samples, which have a fixed global order, into the microbatches of this rank.

Each step reads the next samples of the shuffled training set, in every layout. So the number of consumed samples is all
that a resumed run needs to find its position in the data.
Shapes: b microbatch, s tokens of the sequence on this context-parallel rank.
"""

from __future__ import annotations

import functools
import itertools
import signal
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model

from trainer.contract.config import BlendConfig, TrainerConfig
from trainer.contract.errors import TrainerError
from trainer.contract.model.batch_size import Batch
from trainer.data import documents
from trainer.distributed.sequence import zigzag_positions


@dataclass(frozen=True)
class MicroBatch:
    """One microbatch. The tensors [b, s] are on this rank's device."""

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    boundaries: torch.Tensor | None
    """Boundaries of the documents of the complete samples (`trainer.data.documents`), on the CPU. None if tokens attend
    across documents."""


class Packed(NamedTuple):
    """A microbatch as loaders return it, in one tensor: each additional tensor would cost the step 0.2 ms."""

    fields: torch.Tensor
    """int64 [3 or 4, b, s]: tokens, labels, 1 where the loss counts, and positions if they start over."""
    boundaries: torch.Tensor | None
    """See MicroBatch."""
    largest_id: int


class MicroBatchSampler:
    """Sample indices of this data-parallel rank, one list per microbatch, for all batches in order."""

    def __init__(self, batches: Iterable[Batch], micro_batch_size: int, dp_rank: int, dp_size: int) -> None:
        self._batches, self._size = batches, micro_batch_size
        self._offset, self._stride = dp_rank * micro_batch_size, dp_size * micro_batch_size

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._batches:
            for start in range(batch.first + self._offset, batch.first + batch.size, self._stride):
                yield list(range(start, start + self._size))


def num_microbatches(batch_size: int, config: TrainerConfig, groups: ProcessGroupCollection) -> int:
    """Number of microbatches on each data-parallel rank in a step of `batch_size` samples."""
    return batch_size // (config.training.micro_batch_size * groups.dp.size())


def reads_samples(chunk: DistributedDataParallel, data: BlendConfig) -> bool:
    """True if the chunk embeds tokens, has MTP layers or computes the loss, or if attention must know the documents."""
    if data.separates_documents:
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
    sampler = MicroBatchSampler(batches, config.training.micro_batch_size, groups.dp.rank(), groups.dp.size())
    workers = config.data.num_workers
    positions = zigzag_positions(config.model.seq_length, groups.cp.rank(), groups.cp.size())
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=workers,
        collate_fn=functools.partial(
            _packed, data=config.data, positions=positions if groups.cp.size() > 1 else None
        ),
        pin_memory=config.device == "cuda",
        # A loader draws a random number when it starts. It must not use the generator that dropout uses on a CPU.
        generator=torch.Generator(),
        worker_init_fn=_ignore_stop_signals if workers else None,
        multiprocessing_context="fork" if workers else None,
    )
    device = torch.device("cpu")
    if config.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    in_sample = positions.to(device).expand(config.training.micro_batch_size, -1)
    for batch in loader:
        _check_ids(batch.largest_id, config.model.padded_vocab_size)
        tokens, labels, loss_mask, *reset = batch.fields.to(device, non_blocking=True)
        position_ids = reset[0] if reset else in_sample
        yield MicroBatch(tokens, labels, loss_mask.float(), position_ids, batch.boundaries)


def _packed(
    samples: list[dict[str, torch.Tensor]], data: BlendConfig, positions: torch.Tensor | None
) -> Packed:
    """Collate samples, in a loader process. `positions` are the positions in the sequence that this rank holds."""
    names = ("tokens", "labels", "loss_mask")
    fields = torch.stack([torch.stack([sample[name].long() for sample in samples]) for name in names])
    largest_id = int(fields[:2].max())
    boundaries = None
    if data.needs_eod:
        assert data.eod_id is not None
        is_first = documents.first_tokens(fields[0], data.eod_id)
        if data.eod_mask_loss:
            fields[2].masked_fill_(fields[0] == data.eod_id, 0)
        if data.reset_position_ids:
            fields = torch.cat([fields, documents.positions(is_first)[None]])
        if data.reset_attention_mask:
            boundaries = documents.boundaries(is_first)
    return Packed(fields if positions is None else fields[:, :, positions], boundaries, largest_id)


def _check_ids(largest: int, rows: int) -> None:
    """Refuse token IDs that have no row in the embedding. On a GPU they would fail later, in an assertion of a kernel.

    Raises:
        TrainerError: on this rank only.
    """
    if largest >= rows:
        raise TrainerError(
            f"rank {torch.distributed.get_rank()} on {socket.gethostname()}: the data contains the token ID {largest}, "
            f"but the embedding has {rows} rows (model.padded_vocab_size). The data was made with another tokenizer or "
            "is damaged; `hpcgen data verify -c RUN.yaml` names the place"
        )


def _ignore_stop_signals(worker: int) -> None:
    # Slurm may signal every process of the step, and the trainer needs its loaders to finish the current step.
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
