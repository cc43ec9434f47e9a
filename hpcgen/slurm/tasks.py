"""The task that submitit pickles and runs in a job.

It is an importable class with plain data, so that Python on the login node and in the job can differ. It runs the same
command as the rendered script.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from hpcgen.slurm.processes import process_tree

POLL_S = 0.3


@dataclass(frozen=True)
class ModuleTask:
    """`python ARGUMENTS...` (arguments begin with "-m", MODULE) in the task's own process.

    `environment` is set first. A word "$NAME" is replaced by that environment variable of the job. Words that the task
    is called with are appended to the arguments, such as the number of an array task.
    """

    arguments: tuple[str, ...]
    environment: dict[str, str]
    stopped_marker: str | None = None
    """A file that exists if the module stopped early, to resume in the job's next attempt."""

    def __call__(self, *words: str) -> None:
        """Runs the module.

        Raises:
            RuntimeError: the module ended with a nonzero status.
            SystemExit: the module stopped early. submitit then stores no result.
        """
        os.environ.update(self.environment)
        _set_ranks()
        _reset_signal_handlers()
        dash_m, module, *given = self.arguments
        assert dash_m == "-m"
        sys.argv = [
            module,
            *(os.environ[word[1:]] if word.startswith("$") else word for word in (*given, *words)),
        ]
        status = _status_of(module)
        if status:
            raise RuntimeError(f"python -m {module} ended with status {status}")
        if self.stopped_marker and Path(self.stopped_marker).exists():
            raise SystemExit(0)


@dataclass(frozen=True)
class ShellTask:
    """`sh FILE` as a child of the task, with the variables of a Slurm task, for a stage with a program of the user."""

    file: str
    environment: dict[str, str]
    request: str
    """A file that exists once the program is to save and stop."""
    stop_signal: str | None = None
    """Signal for every process of the program, such as USR1. It or `stop_path` asks the program."""
    stop_path: str | None = None
    """File that asks the program."""

    def __call__(self) -> None:
        """Runs the file. SIGTERM to the task reaches the child.

        Raises:
            RuntimeError: the file ended with a nonzero status.
        """
        ids = {"SLURM_PROCID": "GLOBALID", "SLURM_LOCALID": "LOCALID"}
        ranks = {name: os.environ[f"SUBMITIT_LOCAL_{suffix}"] for name, suffix in ids.items()}
        environment = {**os.environ, **ranks, **self.environment}
        environment.pop("PYTHONSAFEPATH", None)  # for hpcgen's code only
        _reset_signal_handlers()
        child = subprocess.Popen(("sh", self.file), env=environment)
        signal.signal(signal.SIGTERM, lambda *_: child.terminate())
        if status := self._wait(child):
            raise RuntimeError(f"the program ended with status {status}")

    def _wait(self, child: subprocess.Popen[bytes]) -> int:
        is_asked = False
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(POLL_S)
            if not is_asked and Path(self.request).exists():
                is_asked = True
                self._ask(child.pid)

    def _ask(self, child: int) -> None:
        if self.stop_path is not None:
            Path(self.stop_path).touch()
        for pid in process_tree(child) if self.stop_signal is not None else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.Signals[f"SIG{self.stop_signal}"])


def _status_of(module: str) -> int:
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _reset_signal_handlers() -> None:
    """Removes submitit's handlers, which ignore TERM and requeue the job at USR2. The script handles both."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCONT, signal.SIG_DFL)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def _set_ranks() -> None:
    """Sets the ranks from variables of submitit's local executor. The trainer reads srun's by itself."""
    names = {"RANK": "GLOBALID", "LOCAL_RANK": "LOCALID", "WORLD_SIZE": "NTASKS"}
    if "SUBMITIT_LOCAL_GLOBALID" in os.environ:
        os.environ.update({name: os.environ[f"SUBMITIT_LOCAL_{suffix}"] for name, suffix in names.items()})
