"""A run's own dataset (`data.dataset`): opened by all ranks together, with its position in the checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from trainer.contract.config import ConfigError, EarlyStopping, TrainerConfig
from trainer.contract.errors import Scope
from trainer.contract.resuming.sampling import Sampling
from trainer.contract.wording import counted, rank_list
from trainer.data.corpora import SPLITS
from trainer.data.index_files import LogLine
from trainer.data.own import (
    KEY,
    Position,
    Samples,
    StreamSamples,
    check_state,
    first_digest,
    open_samples,
)
from trainer.data.own_samples import SampleError
from trainer.data.progress import OneBlend, Progress


@dataclass(frozen=True)
class Saved:
    """Facts about the run's own dataset in the checkpoint that it resumes from."""

    consumed: int
    dataset: Mapping[str, Any] | None
    """Section `dataset` of the record. None if the run read other data, or another function."""
    may_change: bool
    """True if checkpoint.changed confirms a change of the dataset."""

    @property
    def position(self) -> Position:
        """The position at which the run continues."""
        if self.dataset is None:
            return Position(self.consumed, first=self.consumed)
        return Position(self.consumed, self.dataset["first"], self.dataset["state"])

    def position_in(self, length: int | None, name: str) -> Position:
        """The position in a dataset with `length` samples; None for a stream.

        Raises:
            ConfigError: the checkpoint's dataset had another length, and nothing confirms this.
        """
        if self.dataset is None or length == self.dataset["length"]:
            return self.position
        was, now = (
            "a stream" if each is None else counted(each, "sample")
            for each in (self.dataset["length"], length)
        )
        if not self.may_change:
            raise ConfigError(
                f"{name} has {now}, but the checkpoint was trained with {was}. If this is intended, set "
                f"checkpoint.changed: [{KEY}], and the samples begin again. Otherwise restore the data"
            )
        return Position(self.consumed, first=self.consumed)


NEW = Saved(0, None, may_change=True)
"""The beginning of a run."""


@dataclass(frozen=True)
class OwnReading:
    """Tells the position of the run in its own dataset, for its checkpoints."""

    samples: Samples | None
    """Training samples; None on ranks that read none."""
    first: int
    earlier: Sampling | OneBlend
    """Samples of pairs that the run read before."""

    def record(self, consumed: int) -> dict[str, Any]:
        """Sections of the record of a checkpoint after `consumed` samples."""
        samples = self.samples
        state = samples.state_at(consumed) if isinstance(samples, StreamSamples) else None
        length = None if samples is None else samples.length
        # Pairs that return begin a new phase, in which they continue.
        sampling = None if isinstance(self.earlier, OneBlend) else replace(self.earlier, phases=()).to_dict()
        return {"sampling": sampling, "dataset": {"first": self.first, "length": length, "state": state}}


class _Facts(NamedTuple):
    """Facts that all ranks must find in a dataset."""

    length: int | None
    has_state: bool
    digest: str
    """SHA-256 of the first sample."""


def open_own(
    config: TrainerConfig, saved: Saved, progress: Progress, is_needed: bool, log: LogLine
) -> tuple[dict[str, Samples | None], OwnReading]:
    """Open the run's own dataset for all splits. Every rank must call this. `is_needed` is false on ranks that read no
    samples, which get None for each split.

    Raises:
        ConfigError: on all ranks, if the user's code fails on any rank, its samples are invalid, ranks get different
            ones, or the checkpoint's dataset had another length.
    """
    found: dict[str, Samples | None] = {}
    name = str(config.data.dataset)
    train, facts = _opened_by_all(config, "train", is_needed)
    if facts is None:
        raise ConfigError(f"{KEY} = {name!r} returns None for 'train'")
    position = saved.position_in(facts.length, name)
    if train is not None:
        train.position = position
    found["train"] = train
    _log_training(name, facts, position, progress.end, log)
    for split in SPLITS[1:] if config.training.eval_iters else ():
        samples, facts = _opened_by_all(config, split, is_needed)
        if facts is None:
            _require_unwatched(split, config)
            log(f"data: {split}: none, since {name} returns None for it")
            continue
        found[split] = samples
        read = config.training.eval_iters * config.training.global_batch_size
        log(
            f"data: {split}: {_described(facts.length)} of {name}; each evaluation reads {_amount(read, facts)}"
        )
    return found, OwnReading(train, position.first, progress.earlier)


def _require_unwatched(split: str, config: TrainerConfig) -> None:
    """Refuse to watch a split without samples."""
    watch, keeps_best = config.training.early_stopping, config.checkpoint.keep_best
    monitor = (watch or EarlyStopping()).monitor
    if (watch is not None or keeps_best) and monitor.rpartition("/")[0] == split:
        key = "checkpoint.keep_best" if watch is None else "training.early_stopping"
        raise ConfigError(
            f"{key} watches {monitor}, but {KEY} = {config.data.dataset!r} returns None for {split!r}. Return samples "
            "for it, or watch a set of data.validation (training.early_stopping.monitor)",
            scope=Scope.ALL_RANKS,
        )


def _opened_by_all(
    config: TrainerConfig, split: str, is_needed: bool
) -> tuple[Samples | None, _Facts | None]:
    """The samples of a split on this rank, and what all ranks found in them. None if there are none for the split."""
    samples, facts, problem = None, None, None
    if is_needed:
        try:
            samples = open_samples(config, split)
            facts = samples and _facts(samples, is_rank_0=torch.distributed.get_rank() == 0)
        except (SampleError, ConfigError) as error:
            problem = str(error)
    everywhere: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everywhere, (is_needed, facts, problem))
    if failed := [(rank, found[2]) for rank, found in enumerate(everywhere) if found[2] is not None]:
        rank, reason = failed[0]
        raise ConfigError(f"{reason} (rank {rank})", scope=Scope.ALL_RANKS)
    reading = {rank: found[1] for rank, found in enumerate(everywhere) if found[0]}
    agreed = next(iter(reading.values()))
    if differing := [rank for rank, found in reading.items() if found != agreed]:
        raise ConfigError(
            f"{KEY} = {config.data.dataset!r} does not give all ranks the same samples for {split!r}: the first one, "
            f"or their number, differs on {rank_list(differing)}. Every rank must read the same data, and random "
            "numbers must be seeded with config.training.seed",
            scope=Scope.ALL_RANKS,
        )
    return samples, agreed


def _facts(samples: Samples, *, is_rank_0: bool) -> _Facts:
    has_state = isinstance(samples, StreamSamples) and samples.has_state
    found = _Facts(samples.length, has_state, first_digest(samples))
    if isinstance(samples, StreamSamples) and has_state and is_rank_0 and samples.provider.split == "train":
        check_state(samples)
    return found


def _log_training(name: str, facts: _Facts, position: Position, end: int, log: LogLine) -> None:
    read, left = position.consumed - position.first, end - position.consumed
    order = "in its own order" if facts.length is None else "shuffled in each epoch"
    so_far = f", {counted(read, 'sample')} read" if position.consumed else ""
    log(
        f"data: train: {_described(facts.length)} of {name}, {order}{so_far}; {_amount(left, facts)} to read. Its code "
        "is recorded in checkpoints, its data is not"
    )
    if facts.length is not None or facts.has_state:
        return
    if read:
        log(
            f"data: train: {counted(read, 'sample')} of the stream are read again and skipped, since it has no "
            "state_dict and load_state_dict"
        )
    else:
        log(
            "data: train: the stream has no state_dict and load_state_dict, so a resumed run reads it from its "
            "beginning and skips what was read"
        )


def _described(length: int | None) -> str:
    return "a stream" if length is None else counted(length, "sample")


def _amount(samples: int, facts: _Facts) -> str:
    epochs = "" if facts.length is None else f" ({samples / facts.length:,.2f} epochs)"
    return f"{counted(samples, 'sample')}{epochs}"
