"""Samples of each pair that a run has read, according to its newest checkpoint, and samples that it will read, by stage
of its data (data.stages).

The lengths of texts are not read. So the number of tokens that data.split gives to training is estimated, unless the
checkpoint records it. Chats are packed as in the trainer (`hpcgen.planning.chat_samples`).
"""

from __future__ import annotations

import bisect
import importlib.util
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hpcgen.planning.resuming import resumption_of
from trainer.contract.config import Dataset, TrainerConfig
from trainer.contract.files.index_header import HEADER_SIZE, bin_path, idx_path, is_complete, read_header
from trainer.contract.files.regular_file import open_regular
from trainer.contract.resuming import sampling
from trainer.contract.resuming.data_stages import stages_left
from trainer.contract.resuming.pair_identity import is_same_pair, likeness
from trainer.contract.resuming.sampling import Documents, Listed, Mixture, Packing, Sampling, Stream, draws
from trainer.contract.rules.data import split_weights
from trainer.packing.counts import Counts

if TYPE_CHECKING:
    from trainer.packing.samples import ChatSamples

MAX_CHAT_TOKENS = 5 * 10**9
"""Maximum number of tokens of the chats of a run that are packed, which takes some seconds.
The samples of more are estimated."""


@dataclass(frozen=True)
class Reading:
    """Samples that a training reads from one pair, in one stage of its data."""

    prefix: str
    read: int | None
    """Number of samples read so far, or by the beginning of a stage that has not begun; None if it is unknown, or known
    only by reading the pair."""
    remaining: int
    """Number of samples to read in the stage."""
    epochs: float
    """Number of epochs that `remaining` is."""
    tokens: int
    """Number of tokens that `remaining` is."""
    stage: str | None = None
    """Name of the stage; None for a run without stages."""
    iterations_per_epoch: float | None = None
    """Number of iterations that read one epoch of the pair at its weight; None while the batch size grows."""
    chats: Counts | None = None
    """Chats that are read, cut and left out. None for texts, and for chats that are not counted here."""
    is_estimated: bool = False
    """True if the samples of an epoch are estimated, as if all chats fit and no sample had padding."""


@dataclass(frozen=True)
class _Pair:
    """The sizes of a pair."""

    prefix: str
    tokens: int
    end: int
    """Number of sequences in training, which are the first ones (`trainer.contract.resuming.sampling.Documents`)."""


def pair_readings(trainer: TrainerConfig) -> list[Reading]:
    """Samples of each pair that the training has read and will read. Empty if this machine does not see all pairs, or
    cannot tell where the training continues."""
    try:
        resumption = resumption_of(trainer)
        if resumption is None:
            return readings(trainer, None)
        return [] if resumption.continues_from_unknown() else readings(trainer, resumption.record())
    except OSError:
        return []


def readings(trainer: TrainerConfig, record: Mapping[str, Any] | None) -> list[Reading]:
    """The reading of each training pair; empty if a pair does not exist on this machine. `record` comes from the
    checkpoint that the training resumes from; None if it begins at sample 0.

    Raises:
        OSError: a file cannot be read.
    """
    data = trainer.data
    datasets = data.datasets or data.train
    shares = split_weights(data.split) if data.datasets else [1.0]
    if not datasets or not shares:
        return []
    share = shares[0] / sum(shares)
    pairs = [pair for dataset in datasets if (pair := _read_sizes(dataset.prefix, share))]
    if len(pairs) < len(datasets):
        return []  # the shares of the pairs depend on the sizes of all
    identities = _identities(trainer, datasets, record)
    iteration, consumed = (record["iteration"], record["consumed_samples"]) if record else (0, 0)
    is_known = record is None or record.get("sampling") is not None
    earlier = sampling.from_dict(record["sampling"]) if record and is_known else Sampling()
    packed = _packed(trainer, pairs)
    streams = {
        pair.prefix: _stream(trainer, _documents(pair, share, identity, earlier), identity, earlier, packed)
        for pair, identity in zip(pairs, identities, strict=True)
    }
    stages = stages_left(data, trainer.training, iteration, consumed)
    planned = sampling.plan_all(
        earlier,
        [_mixture(each.stage.train if each.stage else datasets, streams, each.end) for each in stages],
        data.split if data.datasets else None,
        is_same_pair,
        consumed=consumed,
        seed=trainer.training.seed,
        count=_expected_counts,
    )
    return [
        Reading(
            prefix=stream.prefix,
            read=stream.read if is_known and (stream.read or not _may_have_read(stream, earlier)) else None,
            remaining=(
                remaining := portion.start + draws(portion.weight, each.end - phase.first) - stream.read
            ),
            epochs=stream.epochs(remaining),
            tokens=remaining * stream.seq_length,
            stage=each.stage.name if each.stage else None,
            iterations_per_epoch=(
                None
                if trainer.training.rampup_batch_size
                else 1 / (stream.epochs(1) * portion.weight * trainer.training.global_batch_size)
            ),
            chats=packed[stream.prefix].counts if stream.prefix in packed else None,
            is_estimated=stream.prefix not in packed
            and stream.packing == _estimate(trainer, stream.documents),
        )
        for each, plan in zip(stages, planned, strict=True)
        for phase in plan.phases[-1:]
        for portion, stream in zip(phase.portions, plan.current, strict=True)
    ]


def _identities(
    trainer: TrainerConfig, datasets: Sequence[Dataset], record: Mapping[str, Any] | None
) -> Sequence[Mapping[str, Any]]:
    """The identities of the pairs of `datasets`, of which those that the run has read have recorded hashes."""
    if record is None:
        return [{"prefix": dataset.prefix} for dataset in datasets]
    from trainer.contract.resuming import provenance  # a run's first job has nothing to compare

    pairs: Sequence[Mapping[str, Any]] = provenance.examine(trainer, record, thorough=False).origins["pairs"][
        provenance.pairs_key(trainer)
    ]
    return pairs


def _mixture(datasets: Sequence[Dataset], streams: Mapping[str, Stream], end: int) -> Mixture:
    weights = [dataset.weight or streams[dataset.prefix].size for dataset in datasets]
    listed = (
        Listed(streams[dataset.prefix], weight / sum(weights))
        for dataset, weight in zip(datasets, weights, strict=True)
    )
    return Mixture(tuple(listed), end)


def _expected_counts(weights: Sequence[float], size: int) -> list[int]:
    """Samples of each pair among the first `size` of a blend, to a sample: Megatron-Core draws each from the pair that
    is furthest behind its weight."""
    return [round(weight * size) for weight in weights]


def _packed(trainer: TrainerConfig, pairs: Sequence[_Pair]) -> dict[str, ChatSamples]:
    """The samples of each pair of chats. Empty for texts, for more chats than are packed here, and without numpy."""
    is_short = sum(pair.tokens for pair in pairs) <= MAX_CHAT_TOKENS
    if not (trainer.data.sft and is_short and importlib.util.find_spec("numpy")):
        return {}
    from hpcgen.planning.chat_samples import packed_chats  # imports numpy, which only runs on chats need

    found = {pair.prefix: packed_chats(pair.prefix, pair.end, trainer) for pair in pairs}
    return {prefix: samples for prefix, samples in found.items() if samples}


def _stream(
    trainer: TrainerConfig,
    documents: Documents,
    identity: Mapping[str, Any],
    earlier: Sampling,
    packed: Mapping[str, ChatSamples],
) -> Stream:
    """The samples of a pair. Chats that are not `packed` fill as many as is recorded, or else as if all fit and no
    sample had padding."""
    stream = Stream(identity, documents, trainer.model.seq_length)
    if not trainer.data.sft:
        return stream
    together = trainer.data.sft_packing
    if samples := packed.get(stream.prefix):
        return replace(stream, packing=Packing(len(samples), samples.counts.tokens, together))
    recorded = (
        each.packing
        for each in earlier.streams
        if each.packing is not None
        and (each.packing.packed, each.seq_length) == (together, stream.seq_length)
        and _may_be(each, identity, documents)
    )
    return replace(stream, packing=next(recorded, None) or _estimate(trainer, documents))


def _estimate(trainer: TrainerConfig, documents: Documents) -> Packing:
    """How chats fill samples if all fit and no sample has padding."""
    together, chats = trainer.data.sft_packing, documents.end - documents.first
    tokens = max(1, documents.tokens - chats)
    return Packing(-(-tokens // trainer.model.seq_length) if together else max(1, chats), tokens, together)


def _documents(pair: _Pair, share: float, identity: Mapping[str, Any], earlier: Sampling) -> Documents:
    """The documents of a pair in training, with the number of tokens that a stream records or else an estimate."""
    estimate = Documents(0, pair.end, max(1, round(pair.tokens * share)))
    return next(
        (stream.documents for stream in earlier.streams if _may_be(stream, identity, estimate)), estimate
    )


def _may_have_read(stream: Stream, earlier: Sampling) -> bool:
    """True if the pair of an unread stream may be one that the run has read, which only its hash can tell."""
    return any(
        each.read and each.seq_length == stream.seq_length and _may_be(each, stream.pair, stream.documents)
        for each in earlier.streams
    )


def _may_be(stream: Stream, identity: Mapping[str, Any], documents: Documents) -> bool:
    has_same = (stream.documents.first, stream.documents.end) == (documents.first, documents.end)
    return has_same and likeness(stream.pair, identity) > 0


def _read_sizes(prefix: str, share: float) -> _Pair | None:
    """The sizes of a pair of which training gets a share; None if the path does not exist or is not a pair."""
    index = idx_path(prefix)
    if not is_complete(prefix) or index.stat().st_size < HEADER_SIZE:
        return None
    with open_regular(index) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        header = read_header(content[:HEADER_SIZE])
        if header is None or len(content) < header.file_size:
            return None
        with memoryview(content) as view, view[header.bounds_at : header.file_size].cast("q") as bounds:
            end = bounds[bisect.bisect_right(bounds, round(share * header.num_sequences)) - 1]
    tokens = bin_path(prefix).stat().st_size // header.token_bytes
    return _Pair(prefix, tokens, end) if tokens else None
