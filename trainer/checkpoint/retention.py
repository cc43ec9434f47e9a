"""Retention: removes the checkpoints that the configuration does not keep, while training continues."""

from __future__ import annotations

import threading
from collections.abc import Collection
from pathlib import Path

from trainer.contract.config import TrainerConfig
from trainer.contract.evaluation import evaluated
from trainer.contract.files import checkpoint_files
from trainer.contract.files.run_directory import RunDirectory
from trainer.metrics.console import Log


class Retention:
    """Removes checkpoints in the background, one removal at a time."""

    def __init__(self, directory: Path, config: TrainerConfig, log: Log) -> None:
        self._directory, self._config, self._log = directory, config, log
        self._lock = threading.Lock()
        self._last: threading.Thread | None = None

    def start(self) -> None:
        """Start a removal, unless the configuration keeps every checkpoint."""
        if self._config.checkpoint.keep_last is not None:
            # A daemon thread, so that a finished run does not wait for hanging storage.
            self._last = threading.Thread(target=self._remove, name="checkpoint-removal", daemon=True)
            self._last.start()

    def wait(self, timeout_s: float) -> None:
        """Wait for the last removal, which covers all checkpoints."""
        if self._last is not None:
            self._last.join(timeout_s)

    def _remove(self) -> None:
        keep, every = self._config.checkpoint, self._config.evaluation_every
        with self._lock:
            try:
                RunDirectory.of(self._config).refuse_foreign_links()
                results = evaluated(Path(self._config.run_dir)) if every is not None else ()
                for path in prune(self._directory, keep.keep_last, keep.keep_every, every, results):
                    self._log.line(f"removed {path}: keep_last = {keep.keep_last}")
            except OSError as error:  # not fatal: the next save tries again
                self._log.line(f"a checkpoint could not be removed: {error}")


def prune(
    directory: Path,
    keep_last: int | None,
    keep_every: int | None,
    evaluation_every: int | None = None,
    evaluated: Collection[int] = (),
) -> list[Path]:
    """Remove the checkpoints that retention does not keep. Returns their paths.

    A checkpoint with missing or truncated files does not count towards keep_last and is not removed.

    Raises:
        OSError: the checkpoints cannot be listed or removed.
    """
    checkpoints = checkpoint_files.demote_incomplete(checkpoint_files.list_checkpoints(directory))
    best = checkpoint_files.best_iteration(directory)
    kept = checkpoint_files.kept(checkpoints, keep_last, keep_every, evaluation_every, evaluated, best)
    removed = [checkpoint.path for checkpoint in checkpoints if checkpoint.iteration not in kept]
    for path in removed:
        checkpoint_files.remove(path)
    return removed
