"""What submitit pickles and runs in a job: importable classes with plain data, so that the login node's Python
and the job's may differ. Each runs the same command as the rendered script."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ModuleTask:
    """`python ARGUMENTS...` (arguments begin with "-m", MODULE) in the task's own process.

    `environment` is set first. Of the words, "$NAME" stands for an environment variable of the job. What it is
    called with follows the arguments: a task of an array has its number from there.
    """

    arguments: tuple[str, ...]
    environment: dict[str, str]
    stopped_marker: str | None = None
    """A file that says the module left early, to go on in the job's next attempt."""

    def __call__(self, *words: str) -> None:
        """Runs the module.

        Raises:
            RuntimeError: the module ended with another status than 0.
            SystemExit: the module left early; submitit then stores no result, since there is none yet.
        """
        os.environ.update(self.environment)
        _tell_ranks()
        _take_signals_as_a_command_does()
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


def _status_of(module: str) -> int:
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _take_signals_as_a_command_does() -> None:
    """submitit ignores TERM, and near the time limit it would requeue the job (USR2); the script says what happens."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCONT, signal.SIG_DFL)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def _tell_ranks() -> None:
    """submitit's local executor numbers its tasks in its own variables; srun's are known to the trainer."""
    names = {"RANK": "GLOBALID", "LOCAL_RANK": "LOCALID", "WORLD_SIZE": "NTASKS"}
    if "SUBMITIT_LOCAL_GLOBALID" in os.environ:
        os.environ.update({name: os.environ[f"SUBMITIT_LOCAL_{theirs}"] for name, theirs in names.items()})
