"""A program that takes the place of Python in job scripts, and runs as a fork of a process that has imported all.

The program that a script starts only waits. It passes signals on, and when it is killed, so is the fork.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import pkgutil
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import NoReturn

import hpcgen
from tests.trainer.forked import CONTEXT, be_python

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
status = int(server.recv(16))
if status < 0:
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


@contextlib.contextmanager
def stand_in_python() -> Iterator[Path]:
    """The program, which works until the context ends."""
    directory = Path(tempfile.mkdtemp(prefix="python-"))  # a socket's path has at most 107 bytes
    address, program = directory / "server", directory / "python"
    program.write_text(PROGRAM.format(python=sys.executable, address=str(address)))
    program.chmod(0o755)
    server = CONTEXT.Process(target=_serve, args=(str(address),))
    server.start()
    try:
        while not address.exists():
            assert server.is_alive()
            time.sleep(0.01)
        yield program
    finally:
        server.terminate()
        server.join()
        shutil.rmtree(directory)


def _serve(address: str) -> None:
    """Forks for each program that connects. Ends with the process of the tests."""
    tests = multiprocessing.parent_process()
    assert tests is not None
    _import_hpcgen()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"{address}.new")
        listener.listen(64)
        Path(f"{address}.new").rename(address)
        while tests.sentinel not in wait([listener, tests.sentinel]):
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
    """Runs the Python program that was requested, and reports its status."""
    request, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    fork = multiprocessing.get_context("fork")
    program = fork.Process(target=_run, args=(descriptors, *json.loads(request)))
    program.start()
    for descriptor in descriptors:
        os.close(descriptor)
    while program.sentinel not in wait([connection, program.sentinel]):
        message = connection.recv(1)
        assert program.pid is not None
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
