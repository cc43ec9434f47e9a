"""Starts ranks as forks of a process that has imported the trainer, since imports take most of a short run.

From `main` on nothing differs from `python -m trainer`, which tests/slurm and the commands of the documentation run.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.trainer.preloaded"])


class ForkedRank:
    """The part of a subprocess.Popen that tests use."""

    def __init__(self, arguments: list[str], environment: dict[str, str], log: Path) -> None:
        """Calls the trainer with `arguments` and appends its output to `log`."""
        self._process = CONTEXT.Process(target=_be_the_trainer, args=(arguments, environment, log))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired("trainer", timeout or 0)
        return status

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _be_the_trainer(arguments: list[str], environment: dict[str, str], log: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(Path(__file__).parents[2])
    with log.open("a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.argv = ["trainer", *arguments]
    from tests.trainer.preloaded import SEARCHED
    from trainer.__main__ import main

    sys.path[:] = SEARCHED
    sys.exit(main())
