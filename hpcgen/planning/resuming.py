"""Checkpoints from which a run resumes or that it loads, if this machine sees them.

Most scripts are rendered for the first job of a run, which has no checkpoints. The code that reads checkpoints is
therefore imported only if there are some.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from hpcgen.config.run import RunConfig
from trainer.contract.config import TrainerConfig

if TYPE_CHECKING:
    from hpcgen.planning.continuation import Resumption
    from hpcgen.planning.loaded_checkpoints import LoadedCheckpoints


def loaded(load: str) -> LoadedCheckpoints:
    """Checkpoints that a job with checkpoint.load reads."""
    from hpcgen.planning.loaded_checkpoints import LoadedCheckpoints

    return LoadedCheckpoints(Path(load))


def weights_read(config: RunConfig) -> tuple[str, ...]:
    """The directories that a job with checkpoint.load reads: of its checkpoints and, if these contain adapters, of
    their model."""
    load = config.checkpoint.load
    return () if load is None else loaded(load).directories


def model_of_adapters(config: RunConfig) -> tuple[str, ...]:
    """The directories that a job reads in addition to the checkpoints of a run, because these contain adapters."""
    return () if config.lora.rank is None else weights_read(config)


def resumption_of(trainer: TrainerConfig) -> Resumption | None:
    """The training that the run may resume. None if this machine sees nothing to resume from."""
    if is_first_job(trainer):
        return None
    from hpcgen.planning.continuation import Resumption

    return Resumption(trainer)


def is_first_job(trainer: TrainerConfig) -> bool:
    """Returns True if this machine sees nothing to resume from. `hpcgen init` makes an empty run directory."""
    own = (trainer.run_dir, trainer.checkpoint.save)
    load = trainer.checkpoint.load
    if load and os.path.exists(load):  # noqa: PTH110
        return False
    return not any(directory and _has_files(directory) for directory in own)


def _has_files(path: str) -> bool:
    """Returns False for an empty directory, and for a path that does not exist."""
    try:
        return bool(os.listdir(path))  # noqa: PTH208
    except OSError:
        return os.path.exists(path)  # noqa: PTH110
