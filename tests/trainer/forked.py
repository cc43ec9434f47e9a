"""Runs Python programs as forks of a process that has imported the trainer, since imports take most of a short run.

A fork differs from `python -m` and `python -c` in what is imported before its first line. The first test of
tests/slurm/test_train.py starts `python -m trainer`.
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

from tests.patience import PATIENCE_S

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
        self._process = CONTEXT.Process(
            target=_start_as_python, args=(list(arguments), dict(environment), *files)
        )
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
    [done] = run_ranks(arguments, [os.environ if env is None else env])
    return done


def run_ranks(
    arguments: Sequence[str], environments: Sequence[Mapping[str, str]]
) -> list[subprocess.CompletedProcess[str]]:
    """Runs `python ARGUMENTS` in each environment at once, as forks, and waits for the end of all."""
    with tempfile.TemporaryDirectory() as directory:
        streams = [
            (Path(directory, f"{rank}.out"), Path(directory, f"{rank}.err"))
            for rank in range(len(environments))
        ]
        processes = [
            ForkedPython(arguments, environment, *files)
            for environment, files in zip(environments, streams, strict=True)
        ]
        try:
            statuses = [process.wait(timeout=PATIENCE_S) for process in processes]
        finally:
            for process in processes:
                process.kill()
        return [
            subprocess.CompletedProcess(arguments, status, output.read_text(), errors.read_text())
            for status, (output, errors) in zip(statuses, streams, strict=True)
        ]


def _start_as_python(arguments: list[str], environment: dict[str, str], output: Path, errors: Path) -> None:
    os.chdir(ROOT)
    for path, descriptor in ((output, 1), (errors, 2)):
        with path.open("a") as file:
            os.dup2(file.fileno(), descriptor)
    be_python(arguments, environment)


def be_python(arguments: list[str], environment: dict[str, str]) -> None:
    """Does in this process, a fork, what `python ARGUMENTS` would do in this environment."""
    os.environ.clear()
    os.environ.update(environment)
    from tests.trainer.preloaded import SEARCHED

    added = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*added, *SEARCHED]
    if any((Path(path) / "sitecustomize.py").exists() for path in added):
        sys.modules.pop("sitecustomize", None)
        import sitecustomize  # noqa: F401  # as Python does at its start
    first, *rest = arguments
    if first == "-m":
        module, *rest = rest
        sys.argv = [module, *rest]
        sys.modules.pop(module, None)  # else runpy warns that it is imported
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    elif first == "-c":
        program, *rest = rest
        sys.argv = [first, *rest]
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(first).parent))
        runpy.run_path(first, run_name="__main__")
