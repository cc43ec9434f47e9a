"""Everything a run writes, by name, and how a small file is published."""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, ClassVar

from trainer.contract.config import TrainerConfig


@dataclass(frozen=True)
class RunDirectory:
    """The run's directory. The batch script reads `DONE` and `STOPPED` beside the exit status."""

    root: Path
    checkpoints: Path
    index_cache: Path

    @classmethod
    def of(cls, config: TrainerConfig) -> RunDirectory:
        """The directory that the configuration names; nothing is created."""
        root = Path(config.run_dir)
        return cls(
            root=root,
            checkpoints=Path(config.checkpoint.save or root / "checkpoints"),
            index_cache=Path(config.data.cache_dir or root / "index-cache"),
        )

    @property
    def metrics(self) -> Path:
        """JSON Lines, one object a line."""
        return self.root / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's event files."""
        return self.root / "tensorboard"

    @property
    def heartbeat(self) -> Path:
        """JSON: when and where rank 0 moved last."""
        return self.root / "heartbeat"

    FLIGHT_RECORD: ClassVar[str] = "flight-record-"
    """What the names of flight records in `stacks` begin with; the rank follows."""

    @property
    def stacks(self) -> Path:
        """Reports of the ranks when a run hangs; of earlier hangs in stacks.1, stacks.2, ..."""
        return self.root / "stacks"

    @property
    def profile(self) -> Path:
        """Traces and memory snapshots, one of each rank and recording."""
        return self.root / "profile"

    TRAINED_WITH: ClassVar[str] = "trained-with.json"

    @property
    def trained_with(self) -> Path:
        """The resolved configuration of the newest attempt that trained, which a refused or idle one leaves alone."""
        return self.root / self.TRAINED_WITH

    @property
    def code(self) -> Path:
        """Copies of the files of users' functions that trained; each name begins with its SHA-256."""
        return self.root / "code"

    @property
    def wandb_id(self) -> Path:
        """The id of the Weights & Biases run that all lives of this one log to."""
        return self.root / "wandb-run-id"

    @property
    def done(self) -> Path:
        """There when the run is complete; holds the last iteration, then the fingerprint of the configuration."""
        return self.root / "DONE"

    @property
    def stopped(self) -> Path:
        """There when the run saved and left early, to be started again; holds the iteration."""
        return self.root / "STOPPED"

    @property
    def failed(self) -> Path:
        """There when starting again would give the same; holds the reason.

        An exit status would not do: srun ends the other ranks when the first one leaves, and reports theirs.
        """
        return self.root / "FAILED"


def set_aside(directory: Path) -> None:
    """Leaves an empty directory of this name; what it held stays beside it under the next number."""
    if directory.exists() and any(directory.iterdir()):
        directory.rename(next_number(directory))
    directory.mkdir(exist_ok=True)


def next_number(path: Path) -> Path:
    """The name under which `path` is set aside: NAME.1, or one more than the last."""
    numbers = (other.suffix[1:] for other in path.parent.glob(f"{path.name}.*"))
    last = max((int(number) for number in numbers if number.isdecimal()), default=0)
    return path.with_name(f"{path.name}.{last + 1}")


def publish(path: Path, text: str) -> None:
    """Writes a file so that a reader sees all of it or what was there before, even after a power cut.

    Raises:
        OSError: it cannot be written; what was there before is still there.
    """
    private, file = _create_private(path)
    try:
        with file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        private.replace(path)
    except OSError:
        private.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def _create_private(path: Path) -> tuple[Path, BinaryIO]:
    """A new file next to `path`. Nobody can have put a link there: "x" follows none, and another name is taken."""
    while True:
        private = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        with contextlib.suppress(FileExistsError):
            return private, private.open("xb")


def open_nofollow(path: str, flags: int) -> int:
    """For `open(opener=...)`, where a name must be known to others: a symbolic link in its place is refused.

    Raises:
        OSError: ELOOP for a link, which somebody else may have put there to have its target overwritten.
    """
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def sync_directory(path: Path) -> None:
    """Makes renames in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
