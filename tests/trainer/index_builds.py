"""Builds of sample indices in processes of their own, which can be killed. Forks of a process that was prepared:
a fork of the process of pytest could crash, since that has threads."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path

import torch

from tests.patience import PATIENCE_S
from tests.trainer.forked import ForkedPython
from trainer.contract.config import TrainerConfig
from trainer.contract.errors import TrainerError
from trainer.data.datasets import build_datasets, build_index

CALL = """
import pickle, sys
function, arguments = pickle.loads(bytes.fromhex(sys.argv[1]))
function(*arguments)
"""


def started(function: Callable[..., None], *arguments: object) -> ForkedPython:
    """The process of a call of `function`, which is a function of this module."""
    call = pickle.dumps((function, arguments)).hex()
    return ForkedPython(["-c", CALL, call], os.environ, Path(os.devnull))


def status_of(process: ForkedPython) -> int:
    """Exit status of the process; negative for the signal that ended it."""
    return process.wait(PATIENCE_S)


def killed_at(point: int, config: TrainerConfig, cache: Path) -> bool:
    """True if a build reached its fsync or rename number `point` and was killed before it; False if it completed."""
    status = status_of(started(build_until, config, cache, point))
    assert status in (0, -signal.SIGKILL)
    return status != 0


def build_until(config: TrainerConfig, cache: Path, point: int | None) -> None:
    """Builds the indices. The process is killed before its fsync or rename number `point`."""
    if point is not None:
        count = iter(range(1, point + 1))
        fsync, replace = os.fsync, Path.replace

        def reach() -> None:
            if next(count) == point:
                os.kill(os.getpid(), signal.SIGKILL)

        os.fsync = lambda descriptor: (reach(), fsync(descriptor))[1]
        Path.replace = lambda path, target: (reach(), replace(path, target))[1]
    _join(torch.distributed.HashStore(), 0, 1)
    build_index(config, cache, 1000, lambda line: None)


def fail_to_build(config: TrainerConfig, directory: Path, rank: int) -> None:
    """Builds as one of two ranks. Leaves a file if the rank learns that the cache cannot be written."""
    _join(torch.distributed.FileStore(str(directory / "store"), 2), rank, 2)
    try:
        build_datasets(config, directory / "cache", 1000, True, lambda line: None)
    except TrainerError as error:
        (directory / f"rank-{rank}").write_text(str(error))
    torch.distributed.destroy_process_group()


def _join(store: torch.distributed.Store, rank: int, world_size: int) -> None:
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
