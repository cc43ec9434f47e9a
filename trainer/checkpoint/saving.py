"""Saves the state while training goes on: one checkpoint at a time, complete on all ranks in the same step.

A save has three parts. `save` plans it with Core and copies the tensors to host memory; only for that does
training stand still. A thread of each rank writes its files. Once no rank writes any more, which the ranks
tell each other in the all-reduce of every step, `advance` has rank 0 write the index, then the record.
"""

from __future__ import annotations

import os
import socket
import threading
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
from trainer.checkpoint.writer import HostBuffer, NotFiniteError, Writing, Written
from trainer.contract import checkpoint_files, hyperparameters
from trainer.contract.checkpoint_files import COMMON, COMPLETE, METADATA, STARTED, TRACKER
from trainer.contract.config import CheckpointConfig, TrainerConfig, to_dict
from trainer.contract.errors import NotSavedError, TrainerError
from trainer.contract.run_directory import publish, sync_directory
from trainer.distributed.groups import from_rank_0
from trainer.faults import storage
from trainer.metrics.console import Log
from trainer.metrics.versions import versions
from trainer.step import TrainingState, Vote

T = TypeVar("T")

TURN_S = 5.0
"""Seconds that a rank waits for its own files before it asks how far the others are."""

REMOVAL_S = 30.0
"""So long the last save waits for removals to end. The next life ends those that did not."""


@dataclass(frozen=True)
class SaveEvent:
    """A checkpoint that became complete."""

    path: str
    stall_s: float
    """Training stood still so long for it."""
    write_s: float
    """From the first byte to the last, on the slowest rank."""
    bytes: int
    """Of the tensors' files; not of the index and the record."""
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
    """How long training stood still for it, by what it waited for."""


class Checkpoints:
    """The checkpoints that this life of the run saves. Every rank calls every method, at the same step."""

    def __init__(
        self,
        directory: Path,
        config: TrainerConfig,
        groups: ProcessGroupCollection,
        log: Log,
        on_complete: Callable[[int, SaveEvent], None],
        beat: Callable[[], None],
        origins: dict[str, Any],
    ) -> None:
        """`on_complete` is told on rank 0 of each checkpoint that became complete, with its iteration.

        `origins` are the files that this attempt is made of (`trainer.contract.provenance`), for the records. `beat`
        is called while training waits for the storage. Before the first `save` no file is written or touched; the
        directory is the one that `find` has locked.
        """
        self._directory, self._config, self._groups, self._log = directory, config, groups, log
        self._on_complete, self._beat = on_complete, beat
        self._interval_s = interval_s(config.checkpoint)
        self._versions = versions()
        self._origins = origins
        self._last_start = time.monotonic()
        self._buffer = HostBuffer()
        self._save: _Save | None = None
        self._has_failed = False
        self.is_owed = False
        """A save in the background failed for a reason that may pass: the next is due now, and must not fail."""
        self._is_first = True
        self._removing = threading.Lock()
        self._removal: threading.Thread | None = None

    def prepare(self, state: TrainingState) -> None:
        """Has the memory for the first copy pinned in the background; without it that save waits for this too."""
        if self._config.device == "cuda":
            size = contents.staged_bytes(state, self._groups)
            self._buffer.prepare(size, torch.cuda.current_device())

    def vote(self) -> Vote:
        """What this rank has to say about saves at the end of a step. The clock is that of rank 0."""
        if self._save is not None:
            writing = self._save.writing
            return Vote(writing=not writing.is_done, failed=writing.error is not None)
        is_due = self._interval_s is not None and time.monotonic() - self._last_start >= self._interval_s
        return Vote(save=is_due and torch.distributed.get_rank() == 0)

    def advance(self, vote: Vote) -> None:
        """Completes the save in progress when, by the step's `vote`, all ranks have written.

        Raises:
            NonFiniteError: on all ranks, when what was to be saved is not finite; the checkpoints before it stay.
            NotSavedError: on all ranks, as soon as one could not write; the checkpoints before it stay. Once, when
                the reason may pass, a save `is_owed` in place of it.
        """
        if self._save is not None and (vote.failed or not vote.writing):
            try:
                self._complete(self._save)
            except NotSavedError as error:
                self._forgive(error)
                self.is_owed = True

    def save(self, state: TrainingState, *, wait: bool) -> None:
        """Starts a save of the state as it is, after the one in progress; completes it too if `wait`.

        Raises:
            NonFiniteError: on all ranks, when what was to be saved is not finite.
            NotSavedError: on all ranks, when this save or the one in progress cannot be written, nor once more when
                the reason may pass.
        """
        self.is_owed = False
        try:
            self._begin(state, wait=wait)
        except NotSavedError as error:
            self._forgive(error)
            self._begin(state, wait=wait)
        if wait:
            self._end_removals()

    def _begin(self, state: TrainingState, *, wait: bool) -> None:
        if self._save is not None:
            waited_s = self._wait(self._save)
            if not wait and waited_s >= 1:
                self._log.line(
                    f"iteration {state.iteration}: waited {waited_s:.1f} s for the checkpoint before this one; "
                    "save less often, or to faster storage"
                )
        started = time.perf_counter()
        self._last_start = time.monotonic()
        path = checkpoint_files.iteration_directory(self._directory, state.iteration)
        if not from_rank_0(lambda: _reporting(lambda: _make_room(path))):
            return  # it is what this life started from
        self._save = self._start(state, path, started)
        if wait or not self._config.checkpoint.async_save:
            self._wait(self._save)

    def _forgive(self, error: NotSavedError) -> None:
        """Raises `error` again unless it may pass, all ranks know of it, and no save failed since the last complete."""
        if error.is_final or not error.is_everywhere or self._has_failed:
            raise error
        self._has_failed = True
        self._log.line(f"{error}; it is tried once more")

    def finish(self) -> None:
        """Completes the save in progress, if there is one.

        Raises:
            NonFiniteError: on all ranks, when what was to be saved is not finite.
            NotSavedError: on all ranks, when it cannot be written.
        """
        if self._save is not None:
            self._wait(self._save)

    def _start(self, state: TrainingState, path: Path, started: float) -> _Save:
        for chunk in state.model:
            chunk.start_param_sync(force_sync=True)
        sharding = contents.sharding(self._groups)
        weights = contents.sharded_weights(state, sharding)
        optimizer = contents.sharded_optimizer(state, weights, sharding, is_loading=False)
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
            _record(state, self._config, self._versions, self._origins),
            plan,
            writing,
            stall_s,
        )

    def _wait(self, save: _Save) -> float:
        """Completes a save once all ranks have written; returns how many seconds that took."""
        started = time.perf_counter()
        is_writing = True
        while is_writing:  # in turns, so that no collective waits for long, whatever the storage does
            before = save.writing.bytes
            save.writing.wait(TURN_S)
            is_writing = self._is_any_writing()
            if save.writing.is_done or save.writing.bytes > before:  # storage that hangs is no sign of life
                self._beat()
        waited_s = time.perf_counter() - started
        save.stall_s["writing"] = waited_s
        self._complete(save)
        return waited_s

    def _is_any_writing(self) -> bool:
        """Whether a rank has still to write, and none has failed."""
        vote = self.vote()
        said = torch.tensor([vote.writing, vote.failed], dtype=torch.float32)
        said = said.to("cuda" if self._config.device == "cuda" else "cpu")
        torch.distributed.all_reduce(said)
        writing, failed = said.tolist()
        return bool(writing and not failed)

    def _complete(self, save: _Save) -> None:
        started = time.perf_counter()
        self._save = None
        try:
            written = _gather(save.writing)
        except TrainerError:
            save.writing.discard()
            raise
        refused = from_rank_0(lambda: _reporting(lambda: _publish(save, written)))
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
            f"written in {event.write_s:.1f} s; training stood still for {event.stall_s:.2f} s: {parts})"
        )
        if refused:
            self._log.line(refused)
        self._on_complete(save.iteration, event)
        if self._config.checkpoint.keep_last is not None:
            # A daemon: a run that is saved does not wait for storage that hangs.
            self._removal = threading.Thread(target=self._prune, name="checkpoint-removal", daemon=True)
            self._removal.start()

    def _prune(self) -> None:
        keep = self._config.checkpoint
        with self._removing:
            try:
                for path in prune(self._directory, keep.keep_last, keep.keep_every):
                    self._log.line(f"removed {path}: keep_last = {keep.keep_last}")
            except OSError as error:  # the run goes on; the next save tries again
                self._log.line(f"a checkpoint could not be removed: {error}")

    def _end_removals(self) -> None:
        """Waits for the last removal, which goes by what all saves have left; not for ever."""
        if self._removal is not None:
            self._removal.join(REMOVAL_S)
            self._beat()


def interval_s(config: CheckpointConfig) -> float | None:
    """Seconds between checkpoints, of a resolved configuration; None when only steps count."""
    return None if config.save_interval_minutes is None else 60 * config.save_interval_minutes


def prune(directory: Path, keep_last: int | None, keep_every: int | None) -> list[Path]:
    """Removes the checkpoints that are not to be kept; returns which they were.

    One whose files are not there in their sizes does not count as kept, nor is it removed.

    Raises:
        OSError: the storage refuses to say what there is, or to remove it.
    """
    checkpoints = checkpoint_files.whole_ones(checkpoint_files.list_checkpoints(directory))
    kept = checkpoint_files.kept(checkpoints, keep_last, keep_every)
    removed = [checkpoint.path for checkpoint in checkpoints if checkpoint.iteration not in kept]
    for path in removed:
        checkpoint_files.remove(path)
    return removed


def _make_room(path: Path) -> bool:
    """Begins the directory of a checkpoint; false when it is there, complete."""
    if path.exists():
        if checkpoint_files.describe(path).flaw is None:
            return False
        checkpoint_files.set_aside(path)
    path.mkdir(parents=True)
    publish(path / STARTED, f"{time.strftime('%Y-%m-%d %H:%M:%S%z')} on {socket.gethostname()}\n")
    sync_directory(path.parent)
    return True


def _gather(writing: Writing) -> list[Written]:
    """What all ranks wrote, on rank 0; nothing elsewhere.

    Raises:
        NonFiniteError: on all ranks, naming the first one that had numbers to write that are not finite.
        NotSavedError: on all ranks, naming the first that failed.
    """
    world_size = torch.distributed.get_world_size()
    error = writing.error
    failures: list[tuple[str, bool] | None] = [None] * world_size
    torch.distributed.all_gather_object(failures, error and (_failure(error), storage.is_final(error)))
    contents.raise_not_finite(
        str(error) if isinstance(error, NotFiniteError) else None,
        "a checkpoint would hold numbers that are not finite",
        "it is not kept, and the complete ones before it stay",
    )
    failed = [failure for failure in failures if failure is not None]
    if failed:
        message, is_final = failed[0]
        others = f" (as on {len(failed) - 1} other ranks)" if len(failed) > 1 else ""
        raised = NotSavedError(message + others, is_final=is_final)
        raised.is_everywhere = True
        raise raised
    written: list[Any] | None = [None] * world_size if torch.distributed.get_rank() == 0 else None
    torch.distributed.gather_object(writing.wait(), written)
    return written or []


def _publish(save: _Save, written: list[Written]) -> str | None:
    """Writes the index, then the record that makes the checkpoint one, then the tracker.

    Returns what kept it from the tracker: that is for Megatron-LM alone, and the checkpoint is complete without.
    """
    path = save.path
    save.plan.write_index([part.results for part in written])
    with (path / COMMON).open("xb") as file:
        file.write(save.plan.common)
    save_config(CheckpointingConfig("torch_dist", 1), str(path))
    files = {name: entry for part in written for name, entry in part.files.items()}
    small = [path / name for name in (STARTED, COMMON, ".metadata", METADATA)]
    with ThreadPoolExecutor(len(small)) as threads:  # each waits for the storage
        files |= {file.name: entry for file, entry in zip(small, threads.map(_sync, small), strict=True)}
    sync_directory(path)
    publish(path / COMPLETE, checkpoint_files.record_text({**save.record, "files": files}))
    try:
        publish(path.parent / TRACKER, str(save.iteration))
    except OSError as error:
        return f"{TRACKER} does not name {path.name}: {storage.reason(error, path.parent / TRACKER)}"
    return None


def _sync(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return checkpoint_files.describe_file(path)


def _record(
    state: TrainingState, config: TrainerConfig, versions: dict[str, str], origins: dict[str, Any]
) -> dict[str, Any]:
    """What COMPLETE is to hold beside the files."""
    return {
        "format": checkpoint_files.FORMAT,
        "iteration": state.iteration,
        "consumed_samples": state.consumed_samples,
        "time": time.time(),
        "world_size": config.world_size,
        "layout": to_dict(config.parallelism),
        "precision": config.training.precision,
        **hyperparameters.sections(config),
        "versions": versions,
        "origins": origins,
    }


def _reporting(function: Callable[[], T]) -> T:
    """Calls `function`; what the storage refuses becomes a NotSavedError that names this rank."""
    try:
        return function()
    except OSError as error:
        raise NotSavedError(_failure(error), is_final=storage.is_final(error)) from error


def _failure(error: BaseException) -> str:
    where = f"rank {torch.distributed.get_rank()} on {socket.gethostname()}"
    why = storage.reason(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    return f"a checkpoint could not be saved: {where}: {why}; the complete ones before it stay"
