"""Saves checkpoints while training continues: one at a time, completed on all ranks in the same step.

A save has three parts. `save` plans it with Core and copies the tensors to host memory; training waits only for this.
A thread of each rank then writes the rank's files. The ranks exchange their progress in the all-reduce of every step.
When all have finished, `advance` has rank 0 write the index and then the record.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.process_groups_config import ProcessGroupCollection

from trainer.checkpoint import megatron_lm
from trainer.checkpoint import state as contents
from trainer.checkpoint.planning import Plan, plan_save
from trainer.checkpoint.retention import Retention
from trainer.checkpoint.writer import HostBuffer, NotFiniteError, Writing, Written
from trainer.contract.config import CheckpointConfig, TrainerConfig, to_dict
from trainer.contract.errors import NotSavedError, Scope, TrainerError
from trainer.contract.files import checkpoint_files
from trainer.contract.files.checkpoint_files import COMMON, COMPLETE, INDEX, METADATA, STARTED, TRACKER
from trainer.contract.files.regular_file import open_regular
from trainer.contract.files.run_directory import RunDirectory, publish
from trainer.contract.files.system_calls import sync_path
from trainer.contract.optimizers import optimizer_of
from trainer.contract.resuming import hyperparameters
from trainer.contract.wording import counted
from trainer.data.datasets import Reading
from trainer.data.own_run import OwnReading
from trainer.distributed.groups import from_rank_0, this_rank
from trainer.faults import storage
from trainer.metrics.console import Log
from trainer.metrics.versions import versions
from trainer.model.build import gather_weights
from trainer.step import TrainingState, Vote

T = TypeVar("T")

EXCHANGE_INTERVAL_S = 5.0
"""Interval at which the ranks exchange their progress while they wait for a save (seconds)."""

REMOVAL_S = 30.0
"""Time that the last save waits for removals to finish (seconds). The next attempt finishes the rest."""


@dataclass(frozen=True)
class SaveEvent:
    """A checkpoint that became complete."""

    path: str
    stall_s: float
    """Time that training waited for the save."""
    write_s: float
    """Time to write the files on the slowest rank."""
    bytes: int
    """Total size of the tensors' files, without index and record."""
    asynchronous: bool


@dataclass
class _Save:
    """The save in progress."""

    path: Path
    iteration: int
    record: dict[str, Any]
    plan: Plan
    writing: Writing
    stall_s: dict[str, float]
    """Time that training waited for it, by reason."""


class Checkpoints:
    """Saves the checkpoints of this attempt. Every rank must call every method, in the same step."""

    def __init__(
        self,
        directory: Path,
        config: TrainerConfig,
        groups: ProcessGroupCollection,
        log: Log,
        on_complete: Callable[[int, SaveEvent], None],
        beat: Callable[[], None],
        attempt: dict[str, Any],
        reading: Reading | OwnReading,
    ) -> None:
        """Nothing is written before the first `save`. `directory` is the one that `find` has locked.

        `on_complete` is called on rank 0 with the iteration of each checkpoint that became complete. `beat` is called
        while training waits for the storage. `attempt` is what all records of this attempt have: the files that it
        depends on (`trainer.contract.resuming.provenance`), and the names of checkpoint.changed that it uses
        (`trainer.contract.resuming.confirmations`). `reading` counts what the run reads of its data, on rank 0.
        """
        self._directory, self._config, self._groups, self._log = directory, config, groups, log
        self._on_complete, self._beat = on_complete, beat
        self._interval_s = interval_s(config.checkpoint)
        self._versions = versions()
        self._attempt, self._reading = attempt, reading
        self._last_start = time.monotonic()
        self._buffer = HostBuffer()
        self._save: _Save | None = None
        self._has_failed = False
        self.retry_pending = False
        """True if a background save failed for a temporary reason. The next one is due now; its failure is final."""
        self._is_first = True
        self.best: int | None = None
        """Iteration of the best checkpoint to keep, which may still be in progress."""
        self._retention = Retention(directory, config, log)

    def prepare(self, state: TrainingState) -> None:
        """Pin the memory for the first copy in the background. Otherwise the first save must wait for this."""
        if self._config.device == "cuda":
            size = contents.staged_bytes(state, self._groups, optimizer_of(self._config.optimizer))
            self._buffer.prepare(size, torch.cuda.current_device())

    def vote(self) -> Vote:
        """This rank's vote on saves at the end of a step. Only rank 0's clock decides when one is due."""
        if self._save is not None:
            writing = self._save.writing
            return Vote(writing=not writing.is_done, failed=writing.error is not None)
        is_due = self._interval_s is not None and time.monotonic() - self._last_start >= self._interval_s
        return Vote(save=is_due and torch.distributed.get_rank() == 0)

    def advance(self, vote: Vote) -> bool:
        """Complete the save in progress if the combined `vote` of the step says that all ranks have finished writing.

        Returns whether there was one to complete.

        Raises:
            NonFiniteError: on all ranks, if a value to be saved is not finite. Earlier checkpoints are kept.
            NotSavedError: on all ranks, as soon as any rank could not write. Earlier checkpoints are kept. If the
                reason may be temporary, the save is retried once instead: see `retry_pending`.
        """
        if self._save is None or (vote.writing and not vote.failed):
            return False
        try:
            self._complete(self._save)
        except NotSavedError as error:
            self._allow_retry(error)
            self.retry_pending = True
        return True

    def save(self, state: TrainingState, *, wait: bool) -> None:
        """Start a save of the current state, after the one in progress. With `wait`, also complete it.

        Raises:
            NonFiniteError: on all ranks, if a value to be saved is not finite.
            NotSavedError: on all ranks, if this save or the one in progress cannot be written. If the reason may be
                temporary, the save is retried once before that.
        """
        self.retry_pending = False
        try:
            self._begin(state, wait=wait)
        except NotSavedError as error:
            self._allow_retry(error)
            self._begin(state, wait=wait)
        if wait:
            self._retention.wait(REMOVAL_S)
            self._beat()

    def keep_best(self, state: TrainingState) -> None:
        """Keep the checkpoint of the current state as the best one. Starts a save unless this state is being saved.

        Raises:
            NonFiniteError, NotSavedError: see `save`.
        """
        self.best = state.iteration
        if self._save is None or self._save.iteration != state.iteration:
            self.save(state, wait=False)

    def _begin(self, state: TrainingState, *, wait: bool) -> None:
        if self._save is not None:
            waited_s = self._wait(self._save)
            if not wait and waited_s >= 1:
                self._log.line(
                    f"iteration {state.iteration}: waited {waited_s:.1f} s for the previous checkpoint. "
                    "Save less often, or to faster storage"
                )
        started = time.perf_counter()
        self._last_start = time.monotonic()
        path = checkpoint_files.iteration_directory(self._directory, state.iteration)
        if not from_rank_0(
            lambda: _with_not_saved(lambda: _make_directory(path, RunDirectory.of(self._config)))
        ):
            self._note_best(state.iteration)
            return  # this attempt has saved this state, or started from it
        self._save = self._start(state, path, started)
        if wait or not self._config.checkpoint.async_save:
            self._wait(self._save)

    def _allow_retry(self, error: NotSavedError) -> None:
        """Raise `error` again unless it may be temporary, is on all ranks, and is the first since a complete save."""
        if not error.retry or error.scope is not Scope.ALL_RANKS or self._has_failed:
            raise error
        self._has_failed = True
        self._log.line(f"{error}. The save is retried once")

    def finish(self) -> None:
        """Complete the save in progress, if there is one.

        Raises:
            NonFiniteError: on all ranks, if a value to be saved is not finite.
            NotSavedError: on all ranks, if it cannot be written.
        """
        if self._save is not None:
            self._wait(self._save)

    def _start(self, state: TrainingState, path: Path, started: float) -> _Save:
        gather_weights(state.model)
        sharding = contents.sharding(self._groups, adapters=state.has_adapters)
        weights = contents.sharded_weights(state, sharding)
        optimizer = contents.sharded_optimizer(state, weights, sharding, state.average, is_loading=False)
        common = contents.common_state(state, sharding)
        common |= megatron_lm.common_state(self._config, state.iteration, state.consumed_samples)
        plan = plan_save(weights | optimizer | common, path, self._groups, is_first=self._is_first)
        self._is_first = False
        planned = time.perf_counter()
        buckets = plan.take_buckets()
        unchecked = contents.buffer_names(state, buckets)
        writing = Writing(self._buffer.copy(buckets), unchecked)
        stall_s = {"planning": planned - started, "copying": time.perf_counter() - planned}
        return _Save(
            path,
            state.iteration,
            self._record(state) if torch.distributed.get_rank() == 0 else {},
            plan,
            writing,
            stall_s,
        )

    def _record(self, state: TrainingState) -> dict[str, Any]:
        """Content of COMPLETE, without the files. Only rank 0 writes it."""
        config = self._config
        return {
            "format": checkpoint_files.FORMAT,
            "iteration": state.iteration,
            "consumed_samples": state.consumed_samples,
            "consumed_tokens": state.consumed_tokens,
            "time": time.time(),
            "world_size": config.world_size,
            "layout": to_dict(config.parallelism),
            "precision": config.training.precision,
            **hyperparameters.sections(config),
            "versions": self._versions,
            **self._reading.record(state.consumed_samples),
            **self._attempt,
        }

    def _wait(self, save: _Save) -> float:
        """Wait until all ranks have written, and complete the save. Returns the waiting time in seconds."""
        started = time.perf_counter()
        is_writing = True
        while is_writing:  # in short turns, so that no collective waits for long
            before = save.writing.bytes
            save.writing.wait(EXCHANGE_INTERVAL_S)
            is_writing = self._is_any_writing()
            if save.writing.is_done or save.writing.bytes > before:  # no beat if the storage hangs
                self._beat()
        waited_s = time.perf_counter() - started
        save.stall_s["writing"] = waited_s
        self._complete(save)
        return waited_s

    def _is_any_writing(self) -> bool:
        """True if any rank is still writing and none has failed."""
        vote = self.vote()
        counts = torch.tensor([vote.writing, vote.failed], dtype=torch.float32)
        counts = counts.to(self._config.device)
        torch.distributed.all_reduce(counts)
        writing, failed = counts.tolist()
        return bool(writing and not failed)

    def _complete(self, save: _Save) -> None:
        started = time.perf_counter()
        self._save = None
        try:
            written = _gather(save.writing)
        except TrainerError:
            save.writing.discard()
            raise
        warning = from_rank_0(lambda: _with_not_saved(lambda: _publish(save, written)))
        self._has_failed = False
        if torch.distributed.get_rank() != 0:
            return
        save.stall_s["completing"] = time.perf_counter() - started
        event = SaveEvent(
            path=str(save.path),
            stall_s=sum(save.stall_s.values()),
            write_s=max(part.seconds for part in written),
            bytes=sum(entry["bytes"] for part in written for entry in part.files.values()),
            asynchronous=self._config.checkpoint.async_save,
        )
        parts = ", ".join(f"{what} {seconds:.2f}" for what, seconds in save.stall_s.items())
        self._log.line(
            f"iteration {save.iteration}: checkpoint saved in {save.path} ({event.bytes / 2**30:.2f} GiB, "
            f"written in {event.write_s:.1f} s; training waited {event.stall_s:.2f} s: {parts})"
        )
        if warning:
            self._log.line(warning)
        self._on_complete(save.iteration, event)
        self._note_best(save.iteration)
        self._retention.start()

    def _note_best(self, iteration: int) -> None:
        """Name the best checkpoint, which is complete, in its file."""
        if iteration != self.best or torch.distributed.get_rank() != 0:
            return
        file = self._directory / checkpoint_files.BEST
        try:
            publish(file, f"{iteration}\n")
        except OSError as error:
            self._log.line(f"{storage.reason(error, file)}. It still names an earlier checkpoint")
        else:
            self._log.line(f"iteration {iteration}: this checkpoint is the best so far")


def interval_s(config: CheckpointConfig) -> float | None:
    """Seconds between checkpoints in a resolved configuration; None if the interval is in steps only."""
    return None if config.save_interval_minutes is None else 60 * config.save_interval_minutes


def _make_directory(path: Path, run: RunDirectory) -> bool:
    """Create the directory of a checkpoint. Returns False if it exists and is complete."""
    run.refuse_foreign_links()
    if path.exists():
        if checkpoint_files.describe(path).flaw is None:
            return False
        checkpoint_files.set_aside(path)
    path.mkdir(parents=True)
    publish(path / STARTED, f"{time.strftime('%Y-%m-%d %H:%M:%S%z')} on {socket.gethostname()}\n")
    sync_path(path.parent)
    return True


def _gather(writing: Writing) -> list[Written]:
    """Gather what all ranks wrote, on rank 0. The result is empty on other ranks.

    Raises:
        NonFiniteError: on all ranks, with the name of the first rank whose values are not finite.
        NotSavedError: on all ranks, with the name of the first rank that failed.
    """
    world_size = torch.distributed.get_world_size()
    error = writing.error
    failures: list[tuple[str, bool] | None] = [None] * world_size
    torch.distributed.all_gather_object(failures, error and (_failure(error), storage.allows_retry(error)))
    contents.raise_not_finite(
        str(error) if isinstance(error, NotFiniteError) else None,
        "a checkpoint would contain numbers that are not finite",
        "It is not kept; earlier complete checkpoints are",
    )
    failed = [failure for failure in failures if failure is not None]
    if failed:
        message, retry = failed[0]
        others = f" (also on {counted(len(failed) - 1, 'other rank')})" if len(failed) > 1 else ""
        raise NotSavedError(message + others, scope=Scope.ALL_RANKS, retry=retry)
    written: list[Any] | None = [None] * world_size if torch.distributed.get_rank() == 0 else None
    torch.distributed.gather_object(writing.wait(), written)
    return written or []


def _publish(save: _Save, written: list[Written]) -> str | None:
    """Write the index, the record, which makes the checkpoint complete, and the tracker.

    Returns a warning if the tracker cannot be written. That is not an error, since only Megatron-LM reads it.
    """
    path = save.path
    save.plan.write_index([part.results for part in written])
    with (path / COMMON).open("xb") as file:
        file.write(save.plan.common)
    save_config(CheckpointingConfig("torch_dist", 1), str(path))
    files = {name: entry for part in written for name, entry in part.files.items()}
    small = [path / name for name in (STARTED, COMMON, INDEX, METADATA)]
    with ThreadPoolExecutor(len(small)) as threads:  # in parallel, since each fsync waits for the storage
        files |= {file.name: entry for file, entry in zip(small, threads.map(_sync, small), strict=True)}
    sync_path(path)
    publish(path / COMPLETE, checkpoint_files.record_text({**save.record, "files": files}))
    try:
        publish(path.parent / TRACKER, str(save.iteration))
    except OSError as error:
        return f"{TRACKER} was not updated to {path.name}: {storage.reason(error, path.parent / TRACKER)}"
    return None


def _sync(path: Path) -> dict[str, Any]:
    with open_regular(path) as file:
        os.fsync(file.fileno())
    return checkpoint_files.describe_file(path)


def _with_not_saved(function: Callable[[], T]) -> T:
    """Call `function`, and turn an OSError into a NotSavedError that names this rank."""
    try:
        return function()
    except OSError as error:
        raise NotSavedError(_failure(error), retry=storage.allows_retry(error)) from error


def _failure(error: BaseException) -> str:
    where = this_rank()
    why = storage.reason(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    return f"a checkpoint could not be saved: {where}: {why}. Earlier complete checkpoints are kept"
