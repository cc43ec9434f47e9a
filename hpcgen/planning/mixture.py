"""What a training has read of each pair, according to its newest checkpoint, and what it will read.

Only the sizes of the pairs are read, so the number of tokens that data.split gives to training is estimated.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcgen.planning.rules.data import split_weights
from trainer.contract.batch_size import end_of_run, total_samples
from trainer.contract.config import TrainerConfig
from trainer.contract.sampling import draws

_HEADER = struct.Struct("<9sQB")
"""Beginning of an .idx file: magic, version, code of the token type."""
_TOKEN_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}
"""Bytes of a token by the code of its type."""


@dataclass(frozen=True)
class Reading:
    """What a training reads of one pair."""

    prefix: str
    read: int | None
    """Number of samples read so far; None if the checkpoint does not say."""
    remaining: int
    """Number of samples to read."""
    epochs: float
    """Number of epochs that `remaining` is."""


def readings(trainer: TrainerConfig, record: Mapping[str, Any] | None) -> list[Reading]:
    """The reading of each training pair; empty if one does not exist on this machine.

    `record` is that of the checkpoint that the training resumes from; None if it begins at sample 0.

    Raises:
        OSError: a file cannot be read.
    """
    data = trainer.data
    datasets = data.datasets or data.train
    shares = split_weights(data.split) if data.datasets else [1.0]
    tokens = [_tokens(dataset.prefix) for dataset in datasets]
    if not tokens or None in tokens or not shares:
        return []
    in_training = [(count or 0) * shares[0] / sum(shares) for count in tokens]
    weights = [dataset.weight or count for dataset, count in zip(datasets, in_training, strict=True)]
    read = [0] * len(datasets) if record is None else _read(trainer, record)
    remaining = total_samples(trainer.training)
    if record is not None:
        consumed = record["consumed_samples"]
        remaining = end_of_run(trainer.training, record["iteration"], consumed) - consumed
    return [
        Reading(dataset.prefix, so_far, number, number * trainer.model.seq_length / count)
        for dataset, so_far, count, weight in zip(datasets, read, in_training, weights, strict=True)
        for number in [draws(weight / sum(weights), remaining)]
    ]


def _read(trainer: TrainerConfig, record: Mapping[str, Any]) -> Sequence[int | None]:
    """Number of samples read of each pair, as the record says."""
    from trainer.contract import provenance  # a run's first job has nothing to compare

    found = provenance.examine(trainer, record, thorough=False).origins["pairs"]
    pairs = found.get(provenance.pairs_key(trainer), [])
    sampling = record.get("sampling")
    if sampling is None:
        return [None] * len(pairs)
    streams = [stream for stream in sampling["streams"] if stream["seq_length"] == trainer.model.seq_length]
    read = []
    for pair in pairs:
        likeness = {
            number: (provenance.likeness(stream["pair"], pair), stream["pair"]["prefix"] == pair["prefix"])
            for number, stream in enumerate(streams)
            if pair and provenance.likeness(stream["pair"], pair)
        }
        best = max(likeness, key=lambda number: (*likeness[number], streams[number]["read"]), default=None)
        read.append(0 if best is None else streams.pop(best)["read"])
    return read


def _tokens(prefix: str) -> int | None:
    """Number of tokens of a pair; None if it does not exist or is not one."""
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    if not (index.is_file() and data.is_file()):
        return None
    with index.open("rb") as file:
        header = file.read(_HEADER.size)
    size = _TOKEN_BYTES.get(_HEADER.unpack(header)[2]) if len(header) == _HEADER.size else None
    return data.stat().st_size // size or None if size else None
