"""The order of a run's training samples: how many samples each pair has provided, and which come next.

A run is a sequence of phases, each with one mixture. A phase begins when the mixture changes, at a resume or with the
next stage of the configuration (data.stages). Within a phase, Megatron-Core's blend decides which pair a sample comes
from. The pair then gives its next sample, wherever the phases
before left it. So a change of the mixture neither repeats nor skips samples. Checkpoints record all of this.

The first phase of a run is Megatron-Core's own order.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SEEDS = 2**32
"""Number of seeds that numpy accepts."""


@dataclass(frozen=True)
class Documents:
    """A range of documents of one pair, numbered by sequence as in Core. GPT pairs have one sequence per document."""

    first: int
    """First sequence."""
    end: int
    """Last sequence + 1."""
    tokens: int


@dataclass(frozen=True)
class Order:
    """One shuffle of a pair's samples."""

    seed: int
    num_samples: int
    """Number of samples that were asked for. It determines the number of epochs, and which of them Core shuffles
    together."""


@dataclass(frozen=True)
class Packing:
    """Samples that are filled with complete chats, so that an epoch is a whole number of samples."""

    samples: int
    """Number of samples of an epoch."""
    tokens: int
    """Number of tokens of an epoch, without padding."""
    packed: bool
    """True if a sample has several chats (data.sft_packing)."""


def order_seed(seed: int, number: int) -> int:
    """Seed of the order with this number in a stream. The first order of a run is the order that Core draws by
    itself."""
    return (seed + number) % SEEDS if number else seed


@dataclass(frozen=True)
class Stream:
    """The samples of one pair in the order in which a run reads them.

    An order is read to its end before the next one begins. If the documents or the sequence length change, the samples
    change. The same pair then has a new stream.
    """

    pair: Mapping[str, Any]
    """Prefix and identity of the files (`trainer.contract.resuming.provenance`)."""
    documents: Documents
    seq_length: int
    orders: tuple[Order, ...] = ()
    read: int = 0
    """Number of samples that the run has read."""
    packing: Packing | None = None
    """How chats fill the samples. None if samples are cut from the continuous tokens of the documents."""

    @property
    def prefix(self) -> str:
        """Path of the pair without suffix."""
        return str(self.pair["prefix"])

    @property
    def size(self) -> int:
        """Weight of the pair if the configuration gives none. Chats that have a sample each are counted, not their
        tokens, so that the chats of all pairs are read equally often."""
        return self.documents.tokens if self.packing is None else self.packing.samples

    def epochs(self, samples: int) -> float:
        """`samples` as a number of epochs."""
        if self.packing is not None:
            return samples / self.packing.samples
        return samples * self.seq_length / self.documents.tokens

    def length(self, order: Order) -> int:
        """Number of samples in an order. Its last epoch is complete, so this is at least what was asked for."""
        if self.packing is not None:
            return max(1, -(-order.num_samples // self.packing.samples)) * self.packing.samples
        epochs = max(1, -(-(order.num_samples * self.seq_length + 1) // self.documents.tokens))
        return (epochs * self.documents.tokens - 1) // self.seq_length

    @property
    def ends(self) -> list[int]:
        """For each order, the number of samples up to its end."""
        return list(itertools.accumulate(map(self.length, self.orders)))

    def begun(self) -> Stream:
        """This stream without unread orders, which may still be planned differently."""
        starts = [0, *self.ends]
        orders = [order for order, start in zip(self.orders, starts, strict=False) if start < self.read]
        return dataclasses.replace(self, orders=tuple(orders))

    def extended(self, end: int, seed: int) -> Stream:
        """This stream with at least `end` samples. A further order has a seed of its own.

        Each epoch of chats is shuffled by itself, so their order just gets further epochs.
        """
        missing = end - (self.ends[-1] if self.orders else 0)
        if missing <= 0:
            return self
        if self.packing is not None and self.orders:
            *others, last = self.orders
            longer = dataclasses.replace(last, num_samples=self.length(last) + missing)
            return dataclasses.replace(self, orders=(*others, longer))
        order = Order(order_seed(seed, len(self.orders)), missing)
        return dataclasses.replace(self, orders=(*self.orders, order))


@dataclass(frozen=True)
class Portion:
    """Samples that a phase reads from one stream."""

    stream: int
    """Number of the stream."""
    weight: float
    """Fraction of the samples of the phase."""
    start: int
    """Number of samples of the stream that were read before the phase."""


@dataclass(frozen=True)
class Phase:
    """The samples of a run with one mixture."""

    first: int
    """Number of its first sample."""
    split: str | None
    """Value of data.split; None for pairs of data.train, which are not divided."""
    portions: tuple[Portion, ...]


@dataclass(frozen=True)
class Listed:
    """A pair in the configuration's mixture."""

    stream: Stream
    """The stream of a run that has read nothing."""
    weight: float


@dataclass(frozen=True)
class Sampling:
    """The streams and phases of a run up to one of its samples."""

    streams: tuple[Stream, ...] = ()
    phases: tuple[Phase, ...] = ()

    @property
    def current(self) -> list[Stream]:
        """The streams of the last phase, in the order of its portions."""
        return [self.streams[portion.stream] for portion in self.phases[-1].portions]

    def advanced(self, counts: Sequence[int]) -> Sampling:
        """The state after the last phase has read `counts` more samples of its streams."""
        streams = list(self.streams)
        for portion, count in zip(self.phases[-1].portions, counts, strict=True):
            stream = streams[portion.stream]
            streams[portion.stream] = dataclasses.replace(stream, read=stream.read + count)
        return dataclasses.replace(self, streams=tuple(streams))

    def at_end(self, end: int, count: Count) -> Sampling:
        """The state when the last phase has read all samples before number `end` of the run."""
        phase = self.phases[-1]
        streams = list(self.streams)
        totals = count([portion.weight for portion in phase.portions], end - phase.first)
        for portion, total in zip(phase.portions, totals, strict=True):
            stream = streams[portion.stream]
            streams[portion.stream] = dataclasses.replace(stream, read=portion.start + total)
        return dataclasses.replace(self, streams=tuple(streams))

    def to_dict(self) -> dict[str, Any]:
        """Content of the record of a checkpoint. Streams of documents have no key `packing`, as before there were
        chats."""
        content = dataclasses.asdict(self)
        for stream in content["streams"]:
            if stream["packing"] is None:
                del stream["packing"]
        return content


def from_dict(content: Mapping[str, Any]) -> Sampling:
    """Read what `Sampling.to_dict` wrote. `trainer.contract.resuming.record_shape` has checked its types."""
    streams = tuple(
        Stream(
            **{
                **stream,
                "documents": Documents(**stream["documents"]),
                "orders": tuple(Order(**order) for order in stream["orders"]),
                "packing": Packing(**stream["packing"]) if "packing" in stream else None,
            }
        )
        for stream in content["streams"]
    )
    phases = tuple(
        Phase(**{**phase, "portions": tuple(Portion(**portion) for portion in phase["portions"])})
        for phase in content["phases"]
    )
    return Sampling(streams, phases)


@dataclass(frozen=True)
class Mixture:
    """The pairs that a run reads up to one of its samples."""

    listed: tuple[Listed, ...]
    end: int
    """Number of the first sample after it."""


IsSamePair = Callable[[Mapping[str, Any], Mapping[str, Any]], bool]
"""Function that tells whether two identities describe the same pair."""

Count = Callable[[Sequence[float], int], Sequence[int]]
"""Function that tells how many of the first samples of a blend come from each pair, given the weights of the pairs and
the number of samples."""


def draws(weight: float, size: int) -> int:
    """Maximum number of samples that a blend of `size` samples draws from a portion.

    Core takes each sample from the pair that is furthest behind its weight, so none gets more than weight x size,
    rounded up. (Core's builder requests 0.5% more, and then makes the blend longer than requested: small splits with
    unequal corpora end in its error "oversamples".)
    """
    return math.ceil(weight * size)


def plan(
    earlier: Sampling,
    mixture: Sequence[Listed],
    split: str | None,
    is_same_pair: IsSamePair,
    *,
    consumed: int,
    end: int,
    seed: int,
) -> Sampling:
    """Plan a run that has read `consumed` samples according to `earlier` and continues with `mixture` up to sample
    `end`.

    If the mixture is the same as in the last phase, this phase continues. Otherwise a new phase begins, in which every
    pair continues where the last phase stopped. Orders that have begun are kept, even if another seed or number of
    samples would result in others.
    """

    def is_same(one: Stream, other: Stream) -> bool:
        makes_same_samples = all(
            getattr(one, name) == getattr(other, name) for name in ("documents", "seq_length", "packing")
        )
        return makes_same_samples and is_same_pair(one.pair, other.pair)

    streams = [stream.begun() for stream in earlier.streams]
    phases = earlier.phases
    if not phases or not _continues(phases[-1], streams, mixture, is_same):
        numbers = []
        for number, listed in zip(_matches(streams, mixture, is_same), mixture, strict=True):
            if number is None:
                streams.append(listed.stream)
            numbers.append(len(streams) - 1 if number is None else number)
        portions = (
            Portion(number, listed.weight, streams[number].read)
            for number, listed in zip(numbers, mixture, strict=True)
        )
        phases = (
            *(phase for phase in phases if phase.first < consumed),
            Phase(consumed, split, tuple(portions)),
        )
    phase = phases[-1]
    for portion, listed in zip(phase.portions, mixture, strict=True):
        stream = dataclasses.replace(streams[portion.stream], pair=listed.stream.pair)
        last = portion.start + draws(portion.weight, end - phase.first)
        streams[portion.stream] = stream.extended(last, seed)
    return Sampling(tuple(streams), phases)


def plan_all(
    earlier: Sampling,
    mixtures: Sequence[Mixture],
    split: str | None,
    is_same_pair: IsSamePair,
    *,
    consumed: int,
    seed: int,
    count: Count,
) -> list[Sampling]:
    """A plan for each of the mixtures, which follow each other: the state of the run when it begins to read this one.

    An attempt that starts at the beginning of a mixture, from the checkpoint there, makes the same plan for it. So
    neither the samples nor their order depend on where a run is interrupted.
    """
    plans: list[Sampling] = []
    for mixture in mixtures:
        plans.append(
            plan(
                earlier,
                mixture.listed,
                split,
                is_same_pair,
                consumed=consumed,
                end=mixture.end,
                seed=seed,
            )
        )
        if len(plans) < len(mixtures):
            earlier, consumed = plans[-1].at_end(mixture.end, count), mixture.end
    return plans


def _matches(
    streams: Sequence[Stream], mixture: Sequence[Listed], is_same: Callable[[Stream, Stream], bool]
) -> list[int | None]:
    """For each pair of the mixture, the number of the stream that it continues; None if it starts a new one. Pairs at
    the path of their stream are matched first. Files without a known hash and copies may only look like a stream's
    pair. If several streams match, a pair continues the one that was read furthest.
    """
    found: dict[int, int] = {}
    for is_moved in (False, True):
        for position, listed in enumerate(mixture):
            if position in found:
                continue
            taken = set(found.values())
            same = [
                number
                for number, stream in enumerate(streams)
                if number not in taken
                and (is_moved or stream.prefix == listed.stream.prefix)
                and is_same(stream, listed.stream)
            ]
            if same:
                # A pair that is listed twice is two streams, as in Core.
                found[position] = max(same, key=lambda number: streams[number].read)
    return [found.get(position) for position in range(len(mixture))]


def _continues(
    phase: Phase,
    streams: Sequence[Stream],
    mixture: Sequence[Listed],
    is_same: Callable[[Stream, Stream], bool],
) -> bool:
    """True if `mixture` is the mixture of `phase`."""
    return len(phase.portions) == len(mixture) and all(
        portion.weight == listed.weight and is_same(streams[portion.stream], listed.stream)
        for portion, listed in zip(phase.portions, mixture, strict=True)
    )
