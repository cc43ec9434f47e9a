"""Plans the blends: which documents of each corpus each split reads, and with which weights.

Planning only needs the .idx files and happens before any index is built. A corpus without documents in a split is left
out of that split's blend, since Core would count its epochs in an endless loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import normalize

from trainer.contract.config import BlendConfig, ConfigError, Dataset, TrainerConfig
from trainer.contract.files.index_header import bin_path
from trainer.contract.resuming import sampling
from trainer.contract.resuming.data_stages import StageEnd
from trainer.contract.resuming.pair_identity import is_same_pair
from trainer.contract.resuming.sampling import Documents, Listed, Mixture, Order, Sampling, Stream, draws
from trainer.contract.validation import config_of_split
from trainer.contract.wording import counted
from trainer.data import replay
from trainer.data.corpora import SPLITS, Share, cut, documents_of_share, open_corpora, split_shares
from trainer.data.index_files import LogLine
from trainer.data.kind import MAX_PAIRS_SHOWN, Source
from trainer.data.kinds import kind_of
from trainer.data.progress import OneBlend, Progress, fresh
from trainer.data.recorded import require_as_recorded

MOCK_SPLIT = "1,1,1"

MAX_EPOCHS = 1_000_000
"""Maximum number of epochs of a corpus. Core counts them one by one and lists all documents once per epoch."""


@dataclass(frozen=True)
class Part:
    """Part of one corpus that a split reads."""

    stream: Stream
    """Its samples. The prefix of mock samples is None."""
    weight: float
    """Fraction of the split's samples. The weights of a split sum to 1."""
    start: int = 0
    """First sample of the stream that the split reads."""

    @property
    def prefix(self) -> str | None:
        """Prefix of the pair; None for mock samples."""
        prefix: str | None = self.stream.pair["prefix"]
        return prefix

    @property
    def documents(self) -> Documents:
        """Documents that the split has of the corpus."""
        return self.stream.documents


@dataclass(frozen=True)
class Blend:
    """Corpora that a split reads, in the order of the configuration."""

    split: str
    num_samples: int
    """Number of samples from `first` on."""
    parts: tuple[Part, ...]
    first: int = 0
    """Number of the first sample. Above 0 if the run reads samples of other blends before."""
    stage: str | None = None
    """Name of the stage of the data that reads it; None without data.stages."""
    sampling: Sampling | None = None
    """Samples that the run has read of each pair when it begins to read this blend, for its checkpoints. None for
    validation, test and mock data."""

    @property
    def end(self) -> int:
        """Number of the first sample after the blend."""
        return self.first + self.num_samples


Blends = dict[str, tuple[Blend, ...]]
"""Blends by split. Training has one for each stage that is left, the other splits have one."""


@dataclass(frozen=True)
class _SplitData:
    """Configured corpora of a split, and the share of each corpus's documents that it gets."""

    split: str
    datasets: Sequence[Dataset]
    share: Share | None


def plan_blends(
    config: TrainerConfig, cache_dir: Path, rows: int, log: LogLine, progress: Progress | None = None
) -> Blends:
    """Plan the blends of each split that the run reads, by the name of the split.

    Chats are packed first, with index files in `cache_dir`. `rows` is the number of rows of the embedding, one for
    every token ID. Without `progress`, the run begins. The log says which corpora are left out, and how many epochs are
    read from the rest.

    Raises:
        ConfigError: a pair is missing, damaged or made with another tokenizer; a
            document would be in two splits; training or validation would have no documents; or what was read of the
            pairs before cannot be determined.
        OSError: the index files of chats cannot be written.
    """
    progress = progress or fresh(config)
    data = config.data
    if data.mock:
        return _mock_blends(config, progress)
    if data.dataset is not None:
        return _named_sets(config, cache_dir, rows, log)
    if data.datasets:
        shares = split_shares(data.split)
        sources = [_SplitData(split, data.datasets, shares[split]) for split in SPLITS]
        corpora = open_corpora("data.datasets", data.datasets, rows)
    else:
        sources = [_SplitData(split, getattr(data, split), (0.0, 1.0)) for split in SPLITS]
        corpora = {}
        for source in sources:
            corpora |= open_corpora(f"data.{source.split}", source.datasets, rows)
    _require_disjoint(data)
    require_as_recorded(corpora)
    for prefix, corpus in corpora.items():
        kind_of(data).check_pair(prefix, corpus, data)
    blends: Blends = {}
    for source in sources:
        if source.split != "train" and not config.training.eval_iters:
            continue  # the run never reads it, so it may be empty
        if streams := _streams(source, corpora, Source(config, cache_dir, rows), log):
            if source.split == "train":
                blends["train"] = _training(source, streams, config, rows, progress, log)
            else:
                blends[source.split] = (_evaluation(source, streams, config, log),)
    return blends | _named_sets(config, cache_dir, rows, log)


def _named_sets(config: TrainerConfig, cache_dir: Path, rows: int, log: LogLine) -> Blends:
    """The blends of the named validation sets, by split."""
    blends: Blends = {}
    for index, each in enumerate(config.data.validation if config.training.eval_iters else ()):
        of_set = config_of_split(config, each.split)
        corpora = open_corpora(f"data.validation[{index}].datasets", each.datasets, rows)
        require_as_recorded(corpora)
        for prefix, corpus in corpora.items():
            kind_of(of_set.data).check_pair(prefix, corpus, of_set.data)
        source = _SplitData(each.split, each.datasets, (0.0, 1.0))
        streams = _streams(source, corpora, Source(of_set, cache_dir, rows), log)
        blends[each.split] = (_evaluation(source, streams, of_set, log),)
    return blends


def training_blend(planned: Sampling, number: int, end: int, stage: str | None = None) -> Blend:
    """The blend of a phase, by its number, up to sample `end` of the run."""
    phase = planned.phases[number]
    parts = tuple(
        Part(planned.streams[portion.stream], portion.weight, portion.start) for portion in phase.portions
    )
    return Blend("train", end - phase.first, parts, phase.first, stage, planned)


def _streams(
    source: _SplitData, corpora: Mapping[str, IndexedDataset], of_samples: Source, log: LogLine
) -> dict[str, Stream]:
    """The unread samples that a split has of each pair, by prefix. Pairs without any are left out.

    Empty, with a line in the log, if the split is empty.
    """
    documents = _documents(source, corpora, of_samples.config, log)
    seq_length = of_samples.config.model.seq_length
    streams = {
        prefix: Stream({"prefix": prefix}, of_pair, seq_length) for prefix, of_pair in documents.items()
    }
    packings = kind_of(of_samples.config.data).pack(source.split, documents, of_samples, log)
    if packings is None:
        return streams
    return {prefix: replace(streams[prefix], packing=packing) for prefix, packing in packings.items()}


def _documents(
    source: _SplitData, corpora: Mapping[str, IndexedDataset], config: TrainerConfig, log: LogLine
) -> dict[str, Documents]:
    """The documents that a split reads of each pair, by prefix. Pairs without any are left out.

    Empty, with a line in the log, if the split is empty.
    """
    split, datasets = source.split, source.datasets
    if not datasets:
        log(f"data: {split}: none, since data.{split} is empty")
        return {}
    if source.share is None and (split == "test" or config.data.validation):
        log(f"data: {split}: none, since data.split = {config.data.split!r} gives it no weight")
        return {}
    documents = _documents_by_prefix(source, corpora)
    if not documents:
        reason = _empty_split_reason(source, corpora, config.data)
        if split == "test":
            log(f"data: warning: {reason}. There will be no test loss")
            return {}
        raise ConfigError(reason)
    if left_out := [dataset.prefix for dataset in datasets if dataset.prefix not in documents]:
        log(
            f"data: {split}: {len(left_out)} of {len(datasets)} corpora are left out, since data.split = "
            f"{config.data.split!r} leaves none of their documents for it; the first is {left_out[0]}"
        )
    return documents


def _weighted(datasets: Sequence[Dataset], streams: Mapping[str, Stream]) -> list[tuple[Dataset, float]]:
    """The datasets that have documents, with their fractions of the samples."""
    used = [dataset for dataset in datasets if dataset.prefix in streams]
    weights = normalize([dataset.weight or streams[dataset.prefix].size for dataset in used])
    return list(zip(used, weights, strict=True))


def _evaluation(
    source: _SplitData, streams: Mapping[str, Stream], config: TrainerConfig, log: LogLine
) -> Blend:
    """The blend of an evaluation. Every evaluation reads the same samples, so that losses are comparable."""
    seed = config.training.seed
    wanted = config.training.eval_iters * config.training.global_batch_size

    def stream(prefix: str, weight: float) -> Stream:
        return replace(streams[prefix], orders=(Order(seed, draws(weight, wanted)),))

    parts = tuple(
        Part(stream(dataset.prefix, weight), weight)
        for dataset, weight in _weighted(source.datasets, streams)
    )
    blend = Blend(source.split, wanted, parts)
    _log_epochs(blend, log)
    return blend


def _training(
    source: _SplitData,
    streams: Mapping[str, Stream],
    config: TrainerConfig,
    rows: int,
    progress: Progress,
    log: LogLine,
) -> tuple[Blend, ...]:
    """The blends of the stages that are left. The first one is of the phase that the run is in or begins."""
    earlier = progress.earlier
    if isinstance(earlier, OneBlend):
        earlier = replay.replayed(earlier, progress.consumed, progress.pairs, rows, log)
    plans = sampling.plan_all(
        earlier,
        [_mixture(each, source.datasets, streams, config, progress) for each in progress.stages],
        config.data.split if config.data.datasets else None,
        is_same_pair,
        consumed=progress.consumed,
        seed=config.training.seed,
        count=replay.blended,
    )
    blends = tuple(
        training_blend(planned, -1, each.end, each.stage.name if each.stage else None)
        for planned, each in zip(plans, progress.stages, strict=True)
    )
    consumed = progress.consumed
    for blend in blends:
        _log_epochs(blend, log)
        for line in _pair_lines(earlier, blend, consumed, config.training.seed):
            log(f"{_beginning(blend)}: {line}")
        assert blend.sampling is not None
        earlier, consumed = blend.sampling, blend.end
    return blends


def _mixture(
    stage: StageEnd,
    datasets: Sequence[Dataset],
    streams: Mapping[str, Stream],
    config: TrainerConfig,
    progress: Progress,
) -> Mixture:
    """The mixture of a stage. `datasets` are all training pairs, in the order of `progress.pairs`.

    Raises:
        ConfigError: no pair of the stage has documents for training.
    """
    identities = {dataset.prefix: pair for dataset, pair in zip(datasets, progress.pairs, strict=True)}
    chosen = _weighted(datasets if stage.stage is None else stage.stage.train, streams)
    if stage.stage is not None and not chosen:
        raise ConfigError(
            f"data.split = {config.data.split!r} leaves no document of the pairs of stage {stage.stage.name!r} for "
            "training. Give train a larger share"
        )
    listed = (
        Listed(replace(streams[dataset.prefix], pair=identities[dataset.prefix]), weight)
        for dataset, weight in chosen
    )
    return Mixture(tuple(listed), stage.end)


def _documents_by_prefix(source: _SplitData, corpora: Mapping[str, IndexedDataset]) -> dict[str, Documents]:
    """Documents of the split in each corpus, by prefix. Leaves out corpora with fewer than two tokens in the split."""
    if source.share is None:
        return {}
    ranges = {
        dataset.prefix: documents_of_share(corpora[dataset.prefix], source.share)
        for dataset in source.datasets
    }
    return {prefix: documents for prefix, documents in ranges.items() if documents.tokens > 1}


def _beginning(blend: Blend) -> str:
    """The beginning of the lines about a blend in the log."""
    return f"data: {blend.split}" + (f", stage {blend.stage}" if blend.stage else "")


def _log_epochs(blend: Blend, log: LogLine) -> None:
    split, parts, wanted = blend.split, blend.parts, blend.num_samples
    shuffled = [max(part.stream.epochs(order.num_samples) for order in part.stream.orders) for part in parts]
    if (most := max(shuffled)) > MAX_EPOCHS:
        raise ConfigError(
            f"{split} would read {parts[shuffled.index(most)].prefix} for {most:,.0f} epochs, since the run needs "
            f"{wanted:,} samples of {parts[0].stream.seq_length} tokens. Give it more documents or a smaller weight"
        )
    largest = max(part.stream.epochs(draws(part.weight, wanted)) for part in parts)
    documents = sum(part.documents.end - part.documents.first for part in parts)
    tokens = sum(part.documents.tokens for part in parts)
    word, corpora = (
        "chat" if parts[0].stream.packing else "document",
        counted(len(parts), "corpus", "corpora"),
    )
    phase = f" from sample {blend.first:,} on" if blend.first else ""
    at_most = "at most " if len(parts) > 1 else ""
    log(
        f"{_beginning(blend)}: {counted(documents, word)} with {tokens:,} tokens in {corpora}; "
        f"{counted(wanted, 'sample')}{phase}, {at_most}{largest:,.2f} epochs{' of each' if len(parts) > 1 else ''}"
    )


def _pair_lines(earlier: Sampling, blend: Blend, consumed: int, seed: int) -> Iterator[str]:
    """Yields what was read of each pair in the first `consumed` samples of the run and what will be read, unless there
    is only one and nothing was read. `earlier` is the state of the run before `blend` was planned."""
    planned = blend.sampling
    assert planned is not None
    if consumed and blend.first == consumed:
        yield (
            f"NEW MIXTURE from sample {blend.first:,} on. Each pair continues with the first sample that it has not "
            "given yet"
        )
        current = {portion.stream for portion in planned.phases[-1].portions}
        for number, stream in enumerate(earlier.streams):
            if stream.read and number not in current:
                yield f"{stream.prefix}: no longer read, {_so_far(stream)}"
    if not consumed and len(blend.parts) == 1:
        return  # the line of the split says it all
    for part, portion in zip(blend.parts[:MAX_PAIRS_SHOWN], planned.phases[-1].portions, strict=False):
        moved = ""
        if portion.stream < len(earlier.streams) and earlier.streams[portion.stream].prefix != part.prefix:
            moved = f"continues {earlier.streams[portion.stream].prefix}, "
        yield f"{part.prefix}: {moved}{_pair_text(part, blend.num_samples)}"
    if (more := len(blend.parts) - MAX_PAIRS_SHOWN) > 0:
        yield f"and {counted(more, 'more pair')}"
    orders = (pair for part in blend.parts for pair in enumerate(part.stream.orders))
    if any(order.seed != sampling.order_seed(seed, number) for number, order in orders):
        yield f"training.seed = {seed} shuffles no order of samples again that has begun with another seed"


def _pair_text(part: Part, size: int) -> str:
    stream, end = part.stream, part.start + draws(part.weight, size)
    will = f"{end - stream.read:,} to read, {stream.epochs(end):,.2f} epochs in total"
    further = [start for start in stream.ends[:-1] if start >= stream.read]
    order = f"; shuffled again from its sample {further[0]:,} on" if further else ""
    return f"{_so_far(stream)}, {will}{order}"


def _so_far(stream: Stream) -> str:
    if not stream.read:
        return "nothing read"
    samples = f"{counted(stream.read, 'sample')} of {stream.seq_length:,} tokens"
    return f"{samples} read ({stream.epochs(stream.read):,.2f} epochs)"


def _empty_split_reason(source: _SplitData, corpora: Mapping[str, IndexedDataset], data: BlendConfig) -> str:
    split, datasets = source.split, source.datasets
    largest = max((dataset.prefix for dataset in datasets), key=lambda prefix: len(corpora[prefix]))
    count = len(corpora[largest])
    of = f"the {len(datasets)} corpora" if len(datasets) > 1 else largest
    advice = [f"give {split} a larger share"]
    if source.share is not None:
        advice[0] += f" (more than {math.ceil(1e6 / count) / 1e4:g}% of the {count:,} documents of {largest})"
        advice += (
            ["cut the corpus into fewer pairs (data.corpus.num_output_files)"] if len(datasets) > 1 else []
        )
    advice += ["name separate pairs (data.train, data.valid, data.test)"]
    advice += ["set training.eval_iters = 0"] if split == "valid" else []
    return f"data.split = {data.split!r} leaves no document of {of} for {split}; {', or '.join(advice)}"


def _mock_blends(config: TrainerConfig, progress: Progress) -> Blends:
    evaluation = config.training.eval_iters * config.training.global_batch_size
    blends: Blends = {}
    for split, wanted in {"train": progress.end, "valid": evaluation, "test": evaluation}.items():
        if wanted:
            share = split_shares(MOCK_SPLIT)[split]
            assert share is not None
            documents = Documents(*cut(MockGPTLowLevelDataset.size, share), tokens=0)
            order = Order(config.training.seed, wanted)
            stream = Stream({"prefix": None}, documents, config.model.seq_length, (order,))
            blends[split] = (Blend(split, wanted, (Part(stream, 1.0),)),)
    return blends


def _require_disjoint(data: BlendConfig) -> None:
    """Refuse a pair that is in two splits, possibly under different names, since its documents would be in both.

    Only validation sets may share pairs with each other.
    """
    seen: dict[tuple[int, int], tuple[str, str]] = {}
    for key, datasets in data.blends.items():
        for dataset in datasets:
            path = bin_path(dataset.prefix)
            if not path.is_file():
                continue  # `open_corpora` says so
            status = path.stat()
            other, prefix = seen.setdefault((status.st_dev, status.st_ino), (key, dataset.prefix))
            if other != key and not _is_validation(key, other):
                raise ConfigError(
                    f"data.{key}: {dataset.prefix} is the same pair as {prefix} in data.{other}, so its "
                    "documents would be in both. Name other pairs, or use data.datasets with data.split"
                )


def _is_validation(*keys: str) -> bool:
    return all(key.startswith("valid") for key in keys)
