"""Names of the files in a run directory, and functions that write small files safely."""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, ClassVar

from trainer.contract.config import TrainerConfig
from trainer.contract.evaluation import DIRECTORY as EVALUATION
from trainer.contract.files.regular_file import opener
from trainer.contract.files.shared_files import refuse_foreign_link
from trainer.contract.files.system_calls import sync_path


@dataclass(frozen=True)
class RunDirectory:
    """Directory of a run. The batch script reads `DONE` and `STOPPED` in addition to the exit status."""

    METRICS: ClassVar[str] = "metrics.jsonl"
    DONE: ClassVar[str] = "DONE"
    STOPPED: ClassVar[str] = "STOPPED"
    FAILED: ClassVar[str] = "FAILED"
    LAST_STEP: ClassVar[str] = "last-step.json"
    HEARTBEAT: ClassVar[str] = "heartbeat"
    CHECKPOINTS: ClassVar[str] = "checkpoints"
    """Names in `root`, which hpcgen reads too."""
    PROMETHEUS: ClassVar[str] = "metrics.prom"

    root: Path
    checkpoints: Path
    index_cache: Path

    @classmethod
    def of(cls, config: TrainerConfig) -> RunDirectory:
        """The directory that the configuration names. Creates nothing."""
        return cls.at(Path(config.run_dir), save=config.checkpoint.save, cache_dir=config.data.cache_dir)

    @classmethod
    def at(cls, root: Path, *, save: str | None = None, cache_dir: str | None = None) -> RunDirectory:
        """The directory `root`. `save` and `cache_dir`: see `checkpoint.save` and `data.cache_dir`."""
        return cls(
            root=root,
            checkpoints=Path(save or root / cls.CHECKPOINTS),
            index_cache=Path(cache_dir or root / "index-cache"),
        )

    @classmethod
    def recorded(cls, root: Path, config: object) -> RunDirectory:
        """The directory `root` with the checkpoints where `config` saves them: a recorded configuration, which nobody
        has validated."""
        section = config.get("checkpoint") if isinstance(config, dict) else None
        saved = section.get("save") if isinstance(section, dict) else None
        return cls.at(root, save=saved if isinstance(saved, str) else None)

    @property
    def directories(self) -> tuple[Path, ...]:
        """All directories that the trainer makes."""
        of_training = (self.checkpoints, self.stacks, self.tensorboard, self.profile, self.code)
        return (*of_training, self.evaluation, self.index_cache)

    @property
    def metrics(self) -> Path:
        """Metrics as JSON Lines."""
        return self.root / self.METRICS

    @property
    def last_step(self) -> Path:
        """The last step, if metrics.jsonl has no line for it yet because of logging.log_interval."""
        return self.root / self.LAST_STEP

    ANSWERS: ClassVar[str] = "answers.jsonl"

    @property
    def answers(self) -> Path:
        """Answers of the model in training, as JSON Lines."""
        return self.root / self.ANSWERS

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's event files."""
        return self.root / "tensorboard"

    @property
    def heartbeat(self) -> Path:
        """JSON file with time and phase of rank 0's last progress."""
        return self.root / self.HEARTBEAT

    FLIGHT_RECORD: ClassVar[str] = "flight-record-"
    """Prefix of the names of flight records in `stacks`; the rank follows."""

    @property
    def stacks(self) -> Path:
        """Reports of the ranks when a run hangs. Reports of earlier hangs are in stacks.1, stacks.2, ..."""
        return self.root / "stacks"

    @property
    def profile(self) -> Path:
        """Traces and memory snapshots, one per rank and recording."""
        return self.root / "profile"

    TRAINED_WITH: ClassVar[str] = "trained-with.json"

    @property
    def trained_with(self) -> Path:
        """Resolved configuration of the newest attempt that trained. Other attempts do not change it."""
        return self.root / self.TRAINED_WITH

    @property
    def code(self) -> Path:
        """Copies of the users' code files that were used in training; each name begins with the file's SHA-256."""
        return self.root / "code"

    @property
    def evaluation(self) -> Path:
        """Results of evaluations, a file for each checkpoint."""
        return self.root / EVALUATION

    @property
    def wandb_id(self) -> Path:
        """ID of the Weights & Biases run that all attempts log to."""
        return self.root / "wandb-run-id"

    @property
    def done(self) -> Path:
        """Exists when the run is complete. Contains the last iteration and the fingerprint of the configuration."""
        return self.root / self.DONE

    @property
    def stopped(self) -> Path:
        """Exists when the run saved and stopped early, to be requeued. Contains the iteration."""
        return self.root / self.STOPPED

    @property
    def failed(self) -> Path:
        """Exists if another attempt would fail in the same way. Contains the reason.

        The exit status is not enough: when one rank ends, srun kills the other ranks and reports their status.
        """
        return self.root / self.FAILED

    def refuse_foreign_links(self) -> None:
        """Refuses links of other users in place of the run's directories, because the run would write and remove
        checkpoints in their targets.

        Raises:
            OSError: ELOOP, with the link as its file name.
        """
        for path in self.directories:
            if path.is_relative_to(self.root):
                refuse_foreign_link(path, self.root)


def set_aside(directory: Path) -> None:
    """Make `directory` empty. If it has files, it is first renamed to `next_number(directory)`."""
    if directory.exists() and any(directory.iterdir()):
        directory.rename(next_number(directory))
    directory.mkdir(exist_ok=True)


def next_number(path: Path) -> Path:
    """Name for the next numbered copy of `path`: NAME.1, or one more than the largest number in use."""
    numbers = (other.suffix[1:] for other in path.parent.glob(f"{path.name}.*"))
    last = max((int(number) for number in numbers if number.isdecimal()), default=0)
    return path.with_name(f"{path.name}.{last + 1}")


def publish(path: Path, content: str | bytes, mode: int = 0o666, *, ignores_umask: bool = False) -> None:
    """Write a file atomically: readers see the old or the new content, even after a power failure.

    The umask reduces `mode`, unless the file must be readable for others.

    Raises:
        OSError: the file cannot be written. The old content is still there.
    """
    private, file = _create_private(path, mode)
    try:
        with file:
            if ignores_umask:  # by its descriptor: the published name may lead to another file by then
                os.fchmod(file.fileno(), mode)
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        private.replace(path)
    except OSError:
        private.unlink(missing_ok=True)
        raise
    sync_path(path.parent)


def _create_private(path: Path, mode: int) -> tuple[Path, BinaryIO]:
    """Create a new file next to `path`. Mode "x" follows no link; if the random name exists, another is tried."""
    while True:
        private = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        with contextlib.suppress(FileExistsError):
            return private, open(private, "xb", opener=lambda name, flags: os.open(name, flags, mode))


def open_nofollow(path: str, flags: int) -> int:
    """Opener for `open(opener=...)` that refuses symbolic links, for files with a well-known name.

    Raises:
        OSError: ELOOP for a link. Another user may have put it there to have its target overwritten. An
            IrregularFileError for what is not a file.
    """
    return opener(path, flags | os.O_NOFOLLOW)
