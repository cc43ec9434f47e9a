"""A process that has imported the trainer and hpcgen, and forks Python programs for all tests that run at once.

The first worker that needs it starts it, in the directory that the variable SHARED names. It ends with the run of the
tests. Also a program that takes the place of Python in job scripts. It only waits, passes signals on, and when it is
killed, so is the fork.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import importlib
import json
import multiprocessing
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import NoReturn

import hpcgen
from tests.trainer.forked import ROOT, SHARED, be_python

PROGRAM = """\
#!{python} -IS
import json, os, signal, socket, sys

if sys.argv[1:3] == ["-m", "submitit.local._local"]:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])  # its PID is the ID of the local job
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect({address!r})
umask = os.umask(0o77)
os.umask(umask)
request = [sys.argv, dict(os.environ), os.getcwd(), umask]
socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, frame: server.send(bytes([number])))
server.recv(16)  # the process ID of the fork
status = int(server.recv(16))
if status < 0:
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


@functools.cache
def start() -> Path:
    """The directory of the process: its socket `server`, and `python`, which takes the place of Python."""
    directory = Path(os.environ[SHARED])
    address, program = directory / "server", directory / "python"
    with (directory / "lock").open("w") as lock, (directory / "log").open("a+") as log:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not address.exists():
            program.write_text(PROGRAM.format(python=sys.executable, address=str(address)))
            program.chmod(0o755)
            run_of_tests = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
            command = [sys.executable, "-m", __name__, str(address), str(run_of_tests)]
            none = subprocess.DEVNULL
            process = subprocess.Popen(
                command, cwd=ROOT, stdin=none, stdout=log, stderr=log, start_new_session=True
            )
            _started.append(process)
            while not address.exists():
                assert process.poll() is None, (directory / "log").read_text()
                time.sleep(0.01)
    return directory


_started: list[subprocess.Popen[bytes]] = []
"""Keeps the process, which would be reported as still running."""


def _serve(address: str, run_of_tests: int) -> None:
    """Forks for each program that connects. Ends with the run of the tests."""
    import tests.trainer.preloaded  # noqa: F401

    _import_hpcgen()
    tests_end = os.pidfd_open(run_of_tests)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"{address}.new")
        listener.listen(64)
        Path(f"{address}.new").rename(address)
        while tests_end not in wait([listener, tests_end]):
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _supervise(connection)
            connection.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def _import_hpcgen() -> None:
    """Imports every module of hpcgen. A command would import most of them, which takes longer than its work."""
    for module in pkgutil.walk_packages(hpcgen.__path__, "hpcgen."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    gc.freeze()


def _supervise(connection: socket.socket) -> NoReturn:
    """Runs the Python program that was requested, and reports its process ID and then its status."""
    request, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    fork = multiprocessing.get_context("fork")
    program = fork.Process(target=_run, args=(descriptors, *json.loads(request)))
    program.start()
    assert program.pid is not None
    for descriptor in descriptors:
        os.close(descriptor)
    with contextlib.suppress(OSError):
        connection.send(str(program.pid).encode())
    ended = os.pidfd_open(program.pid)  # processes that it leaves behind would keep its sentinel open
    while ended not in wait([connection, ended]):
        message = connection.recv(1)
        os.kill(program.pid, message[0] if message else signal.SIGKILL)
        if not message:
            break
    program.join()
    with contextlib.suppress(OSError):
        connection.send(str(program.exitcode).encode())
    os._exit(0)


def _run(
    descriptors: list[int], arguments: list[str], environment: dict[str, str], directory: str, umask: int
) -> None:
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = os.fdopen(0, closefd=False)  # multiprocessing has opened /dev/null instead
    os.chdir(directory)
    os.umask(umask)
    sys.executable, *words = arguments
    be_python(words[1:] if words[0] == "-u" else words, environment)


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
