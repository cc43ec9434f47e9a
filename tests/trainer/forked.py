"""Runs Python programs as forks of a process that has imported the trainer, since imports take most of a short run.

A fork differs from `python -m` and `python -c` in what is imported before its first line. The first test of
tests/slurm/test_train.py starts `python -m trainer`.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path

from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
SHARED = "PYTEST_PREPARED_PYTHON"
"""Variable with the directory of the process that forks, of all workers (prepared_python.py)."""


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
        from tests.trainer import prepared_python

        address = prepared_python.start() / "server"
        sys.audit("os.fork")  # of the other process, for the test that calls this
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.connect(str(address))
        umask = os.umask(0o77)
        os.umask(umask)
        variables = [f"{name}={value}" for name, value in environment.items()]
        words = [
            str(ROOT),
            str(umask),
            "0 1 2",
            str(1 + len(arguments)),
            sys.executable,
            *arguments,
            *variables,
        ]
        with Path(os.devnull).open() as none, output.open("a") as out, (errors or output).open("a") as err:
            streams = [stream.fileno() for stream in (none, out, err)]
            socket.send_fds(self._server, [os.fsencode("\0".join(words))], streams)
        if not wait([self._server], PATIENCE_S):
            self._server.close()
            raise TimeoutError(
                f"no fork within {PATIENCE_S} s; the process that forks wrote:\n{prepared_python.log()}"
            )
        self.pid = int(self._server.recv(16))
        self._status: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        if self._status is None:
            if not wait([self._server], timeout):
                raise subprocess.TimeoutExpired("python", timeout or 0)
            self._status = int(self._server.recv(16))
            self._server.close()
        return self._status

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
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
