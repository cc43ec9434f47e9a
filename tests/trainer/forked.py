"""Runs Python programs as forks of a process that has imported the trainer, since imports take most of a short run.

A fork differs from `python -m` and `python -c` in what is imported before its first line. tests/slurm starts `python -m
trainer`.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.trainer.preloaded"])


class ForkedPython:
    """The part of a subprocess.Popen that tests use."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        output: Path,
        errors: Path | None = None,
    ) -> None:
        """Starts `python ARGUMENTS` (-m or -c first) in ROOT. Appends to `output`, and its stderr to `errors`."""
        files = (output, errors or output)
        self._process = CONTEXT.Process(target=_be_python, args=(list(arguments), dict(environment), *files))
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
            raise subprocess.TimeoutExpired("python", timeout or 0)
        return status

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_python(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs `python ARGUMENTS` as a fork and waits for its end."""
    with tempfile.TemporaryDirectory() as directory:
        output, errors = Path(directory) / "stdout", Path(directory) / "stderr"
        process = ForkedPython(arguments, os.environ if env is None else env, output, errors)
        try:
            status = process.wait(timeout=300)
        finally:
            process.kill()
        return subprocess.CompletedProcess(arguments, status, output.read_text(), errors.read_text())


def _be_python(arguments: list[str], environment: dict[str, str], output: Path, errors: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    for path, descriptor in ((output, 1), (errors, 2)):
        with path.open("a") as file:
            os.dup2(file.fileno(), descriptor)
    from tests.trainer.preloaded import SEARCHED

    added = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*added, *SEARCHED]
    if any((Path(path) / "sitecustomize.py").exists() for path in added):
        sys.modules.pop("sitecustomize", None)
        import sitecustomize  # noqa: F401  # as Python does at its start
    option, program, *rest = arguments
    if option == "-m":
        sys.argv = [program, *rest]
        sys.modules.pop(program, None)  # else runpy warns that it is imported
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [option, *rest]
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
