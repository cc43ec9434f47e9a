"""A process that has imported the trainer and hpcgen, and forks Python programs for all tests that run at once.

The first worker that needs it starts it, in the directory that the variable SHARED names. It ends with the run of the
tests. Also a program that takes the place of Python in job scripts. It only waits, passes signals on, and when it is
killed, so is the fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import io
import multiprocessing
import os
import pkgutil
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import hpcgen
from tests import cpu_times
from tests.trainer.forked import ROOT, SHARED, be_python

HUGE_PAGE = 2 * 2**20
MOST_FILES = 253
"""Maximum number of open files in a message: SCM_MAX_FD of Linux."""
MADV_COLLAPSE = 25
"""From linux/mman.h, since Linux 6.1. The module mmap does not have it."""

PROGRAM = """\
#!{python} -IS
import _signal, _socket, os, sys  # socket, signal and json take 20 ms to import

if sys.argv[1:3] == ["-m", "submitit.local._local"]:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])  # its PID is the ID of the local job
files = []
for name in os.listdir("/proc/self/fd"):
    try:
        if os.get_inheritable(int(name)):
            files.append(int(name))
    except OSError:  # that of the listing
        pass
server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
server.connect({address!r})
umask = os.umask(0o77)
os.umask(umask)
variables = [name + "=" + value for name, value in os.environ.items()]
numbers = " ".join(map(str, files))
request = [os.getcwd(), str(umask), numbers, str(len(sys.argv)), *sys.argv, *variables]
rights = b"".join(number.to_bytes(4, sys.byteorder) for number in files)
server.sendmsg([os.fsencode("\\0".join(request))], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
for number in files:
    if number > 2:  # whoever reads a pipe waits for the fork to close it
        os.close(number)
for number in (_signal.SIGINT, _signal.SIGTERM, _signal.SIGUSR1, _signal.SIGUSR2):
    _signal.signal(number, lambda number, frame: server.send(bytes([number])))
server.recv(16)  # the process ID of the fork
status = int(server.recv(16))
if status < 0:
    if -status != _signal.SIGKILL:
        _signal.signal(-status, _signal.SIG_DFL)
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
            run_of_tests = (directory / "pid").read_text()
            command = [sys.executable, "-m", __name__, str(address), run_of_tests]
            none = subprocess.DEVNULL
            process = subprocess.Popen(
                command, cwd=ROOT, stdin=none, stdout=log, stderr=log, start_new_session=True
            )
            _started.append(process)
            while not address.exists():
                assert process.poll() is None, (directory / "log").read_text()
                time.sleep(0.01)
    return directory


def log() -> str:
    """What the process has written."""
    return Path(os.environ[SHARED], "log").read_text()


_started: list[subprocess.Popen[bytes]] = []
"""Keeps the process, which would be reported as still running."""


def _serve(address: str, run_of_tests: int) -> None:
    """Forks for each program that connects. Ends with the run of the tests."""
    import tests.trainer.preloaded  # noqa: F401

    _import_hpcgen()
    _fill_caches()
    gc.freeze()
    _use_huge_pages()
    tests_end = os.pidfd_open(run_of_tests)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"{address}.new")
        listener.listen(64)
        Path(f"{address}.new").rename(address)
        programs: list[_Program] = []
        while True:
            watched = [file for program in programs for file in program.watched]
            ready = wait([listener, tests_end, *watched])
            if tests_end in ready:
                break
            programs = [program for program in programs if not program.advance(ready)]
            if listener in ready:
                programs.append(_Program(listener.accept()[0]))
        for program in programs:
            program.kill()


class _Program:
    """A Python program: the connection over which it is requested and its status reported, and its process."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._process: BaseProcess | None = None
        self._end = -1
        self._test = "no test"

    @property
    def watched(self) -> list[socket.socket | int]:
        """Files that become readable when there is something to do."""
        return [self._connection] if self._process is None else [self._connection, self._end]

    def advance(self, ready: Collection[Any]) -> bool:
        """Does what is to be done, and returns whether the program is over."""
        if self._process is None:
            return self._connection in ready and not self._start()
        if self._end in ready:
            with cpu_times.counted(self._test):
                self._process.join()
            self._say(self._process.exitcode)
        elif self._connection not in ready or self._signal(self._process):
            return False
        self._connection.close()
        os.close(self._end)
        return True

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()

    def _start(self) -> bool:
        """Forks, and returns whether the request was complete."""
        request, descriptors = b"", list[int]()
        with contextlib.suppress(ConnectionResetError):  # killed before it asked
            request, descriptors, _, _ = socket.recv_fds(self._connection, 1 << 20, MOST_FILES)
        if not request:
            self._connection.close()
            return False
        if found := re.search(rf"\0{cpu_times.TEST}=([^\0]*)", os.fsdecode(request)):
            self._test = found[1]
        self._process = multiprocessing.get_context("fork").Process(target=_run, args=(request, descriptors))
        self._process.start()
        assert self._process.pid is not None
        # Processes that it leaves behind would keep its sentinel open.
        self._end = os.pidfd_open(self._process.pid)
        for descriptor in descriptors:
            os.close(descriptor)
        self._say(self._process.pid)
        return True

    def _signal(self, process: BaseProcess) -> bool:
        """Passes a signal on, and returns whether the program is still wanted: a stand-in may have been killed."""
        message = b""
        with contextlib.suppress(ConnectionResetError):
            message = self._connection.recv(1)
        if not message:
            self.kill()
            return False
        assert process.pid is not None
        os.kill(process.pid, message[0])
        return True

    def _say(self, number: int | None) -> None:
        with contextlib.suppress(OSError):  # whoever asked has been killed
            self._connection.send(str(number).encode())


def _import_hpcgen() -> None:
    """Imports every module of hpcgen. A command would import most of them, which takes longer than its work."""
    for module in pkgutil.walk_packages(hpcgen.__path__, "hpcgen."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def _fill_caches() -> None:
    """Runs commands, which keep what they read of shipped files. A fork would take a quarter of a second for it."""
    from hpcgen.cli.main import cli

    environment = dict(os.environ)
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(io.StringIO()):
        os.environ["XDG_CONFIG_HOME"] = directory
        os.chdir(directory)
        for command in (
            "init run.yaml --preset 1.3b",
            "validate -c run.yaml",
            "render train -c run.yaml",
            "explain -c run.yaml --stage train",
            "cluster check azure-ndv5",
        ):
            cli(command.split(), standalone_mode=False)
        os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)


def _use_huge_pages() -> None:
    """Collapses the memory to huge pages, where the kernel can. A fork then copies a small page table, not a large."""
    advise = ctypes.CDLL(None).madvise
    for mapping in Path("/proc/self/maps").read_text().splitlines():
        if found := re.match(r"(\w+)-(\w+) rw-p \w+ 00:00 0", mapping):  # private and of no file
            start, end = (int(bound, 16) for bound in found.groups())
            for page in range(-(-start // HUGE_PAGE) * HUGE_PAGE, end - HUGE_PAGE + 1, HUGE_PAGE):
                advise(ctypes.c_void_p(page), ctypes.c_size_t(HUGE_PAGE), MADV_COLLAPSE)


def _run(request: bytes, descriptors: list[int]) -> None:
    directory, umask, numbers, count, *words = os.fsdecode(request).split("\0")
    _open_only(dict(zip(map(int, numbers.split()), descriptors, strict=True)))
    sys.stdin = os.fdopen(0, closefd=False)  # multiprocessing has opened /dev/null instead
    arguments, variables = words[: int(count)], words[int(count) :]
    os.chdir(directory)
    os.umask(int(umask))
    sys.executable, *words = arguments
    multiprocessing.set_executable(sys.executable)
    while words[0] in ("-u", "-B"):
        words = words[1:]
    be_python(words, dict(variable.split("=", 1) for variable in variables))


def _open_only(files: Mapping[int, int]) -> None:
    """Gives open files the numbers that are the keys, and closes all others, among them the connections of others."""
    free = max(files) + 1
    kept = {number: fcntl.fcntl(descriptor, fcntl.F_DUPFD, free) for number, descriptor in files.items()}
    for number, descriptor in kept.items():
        os.dup2(descriptor, number)
    for path in Path("/proc/self/fd").iterdir():
        if int(path.name) not in files:
            with contextlib.suppress(OSError):  # that of the listing
                os.close(int(path.name))


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
