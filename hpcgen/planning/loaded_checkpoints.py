"""Parts of the checkpoints in checkpoint.load that a job reads."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from trainer.contract.files import checkpoint_files
from trainer.contract.files.checkpoint_files import COMPLETE, METADATA, TRACKER
from trainer.contract.resuming import base_model


@dataclass(frozen=True)
class LoadedCheckpoints:
    """The value of checkpoint.load: a directory of checkpoints, or one of them."""

    path: Path

    @property
    def proof(self) -> str:
        """The file that proves that there are checkpoints: the tracker or, in an archive without one, the record of the
        newest checkpoint. For a single checkpoint, its record or, for Megatron-LM's, the tracker."""
        path = self.path
        if checkpoint_files.iteration_of(path) is not None:
            is_foreign = (path / METADATA).exists() and not (path / COMPLETE).exists()
            return str(path.parent / TRACKER if is_foreign else path / COMPLETE)
        tracker = path / TRACKER
        with contextlib.suppress(OSError):
            if not tracker.exists():
                for each in checkpoint_files.list_paths(path):
                    if (each / COMPLETE).exists():
                        return str(each / COMPLETE)
        return str(tracker)

    @property
    def lack(self) -> str:
        """Description of what an existing directory without checkpoints lacks."""
        return f"has neither {TRACKER} nor iter_.../{COMPLETE}"

    @property
    def directory(self) -> str:
        """The directory that a job reads. The tracker next to a single checkpoint belongs to it."""
        return str(checkpoint_files.directory_of(self.path))

    @property
    def directories(self) -> tuple[str, ...]:
        """The directories that a job reads: `directory` and, if it contains adapters, that of their model."""
        found = [self.directory]
        with contextlib.suppress(OSError):
            for path in checkpoint_files.paths_to_load(self.path)[:1]:
                record = checkpoint_files.describe(path).record
                if record is not None and base_model.has_adapters(record):
                    found.append(LoadedCheckpoints(Path(base_model.path_of(record))).directory)
        return tuple(dict.fromkeys(found))
