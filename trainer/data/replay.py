"""Determines what was read of each pair by a run whose checkpoints do not record it (`trainer.data.progress.OneBlend`).

All samples of such a run come from one blend of Megatron-Core, which follows from the mixture in the record.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
from megatron.core.datasets import helpers
from megatron.core.datasets.utils import normalize

from trainer.contract.config import BlendConfig, ConfigError
from trainer.contract.resuming import provenance
from trainer.contract.resuming.pair_identity import likeness
from trainer.contract.resuming.sampling import Order, Phase, Portion, Sampling, Stream, draws
from trainer.data.corpora import Share, documents_of_share, open_corpus, split_shares
from trainer.data.progress import OneBlend

CHUNK = 2**22
"""Number of samples that are counted at a time."""


def counts(streams: numpy.ndarray, size: int) -> list[int]:
    """How often each number below `size` occurs in an index of a blend."""
    total = numpy.zeros(size, numpy.int64)
    for first in range(0, len(streams), CHUNK):  # bincount converts its input to int64
        total += numpy.bincount(streams[first : first + CHUNK], minlength=size)
    found: list[int] = total.tolist()
    return found


def replayed(
    blend: OneBlend,
    consumed: int,
    pairs: Sequence[Mapping[str, Any]],
    rows: int,
    log: Callable[[str], None],
) -> Sampling:
    """The streams of the run after `consumed` samples. `pairs` come from the configuration and may have been moved.

    Raises:
        ConfigError: this depends on the size of a pair that is missing or has changed.
    """
    datasets = blend.data.get("datasets") or blend.data["train"]
    split = blend.data.get("split", BlendConfig.split) if blend.data.get("datasets") else None
    share = split_shares(split)["train"] if split is not None else (0.0, 1.0)
    assert share is not None
    identities = blend.pairs if len(blend.pairs) == len(datasets) else [None] * len(datasets)
    streams: list[Stream | None] = []
    weights: list[float] = []
    for dataset, identity in zip(datasets, identities, strict=True):
        stream = _stream(dataset["prefix"], identity, pairs, blend.seq_length, share, rows)
        if stream is not None and stream.documents.tokens < 2:
            continue  # left out of the blend
        if stream is None and len(datasets) > 1:
            _report_missing(dataset, log)
        streams.append(stream)
        weights.append(dataset["weight"] or (stream.documents.tokens if stream else 1))
    weights = normalize(weights)
    known = tuple(
        dataclasses.replace(stream, orders=(Order(blend.seed, draws(weight, blend.num_samples)),), read=count)
        for stream, weight, count in zip(streams, weights, blended(weights, consumed), strict=True)
        if stream is not None
    )
    portions = tuple(Portion(number, weight, 0) for number, weight in enumerate(weights))
    # The portions are numbers of streams, so they are unknown if a stream is.
    return Sampling(known, (Phase(0, split, portions),) if len(known) == len(streams) else ())


def _report_missing(dataset: Mapping[str, Any], log: Callable[[str], None]) -> None:
    problem = f"{dataset['prefix']} is missing or has changed"
    if dataset["weight"] is None:
        raise ConfigError(
            f"the checkpoint does not record how much of each pair was read, and {problem}, whose size "
            "determines this. Restore it, or keep the mixture of the checkpoint"
        )
    log(f"data: warning: {problem}, so later checkpoints cannot record how much of it was read")


def _stream(
    prefix: str,
    identity: Mapping[str, Any] | None,
    pairs: Sequence[Mapping[str, Any]],
    seq_length: int,
    share: Share,
    rows: int,
) -> Stream | None:
    """The unread stream of a pair; None if the pair is missing, damaged or has changed."""
    found = _find(prefix, identity, pairs)
    if found is None:
        return None
    try:
        corpus = open_corpus("the checkpoint's data", str(found["prefix"]), rows)
    except ConfigError:
        return None
    return Stream(found if identity is None else identity, documents_of_share(corpus, share), seq_length)


def _find(
    prefix: str, identity: Mapping[str, Any] | None, pairs: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any] | None:
    """The pair that the run read at `prefix`, found there or among `pairs`. None if no pair has its .idx."""
    here = next((pair for pair in pairs if pair["prefix"] == prefix), None) or provenance.identify_pair(
        prefix
    )
    if identity is None:
        return here
    candidates = [here, *pairs] if here else pairs
    alike = [pair for pair in candidates if likeness(identity, pair)]
    return max(alike, key=lambda pair: likeness(identity, pair), default=None)


def blended(weights: Sequence[float], size: int) -> list[int]:
    """Number of samples of each pair among the first `size` of a blend. It does not depend on the blend's own size."""
    if len(weights) == 1:
        return [size]
    datasets, samples = numpy.zeros(size, numpy.int16), numpy.zeros(size, numpy.int64)
    helpers.build_blending_indices(datasets, samples, weights, len(weights), size, False)
    return counts(datasets, len(weights))
