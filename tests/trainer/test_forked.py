"""The process whose forks run Python programs for the other tests."""

from __future__ import annotations

import json
import multiprocessing.spawn
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hpcgen.data.workers import Finished, run_all
from tests.patience import wait_until
from tests.trainer import forked, prepared_python
from tests.trainer.forked import ForkedPython, run_python

pytestmark = pytest.mark.process

ENDLESS = "import os, time; print(os.getpid(), flush=True); time.sleep(3600)"


def stand_in_that_runs(stand_in: str, program: str) -> tuple[subprocess.Popen[str], int]:
    """The stand-in for Python, and the fork that prints its process ID."""
    process = subprocess.Popen([stand_in, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_a_program_gets_what_python_would_give_it(stand_in: str, tmp_path: Path) -> None:
    program = (
        "import json, os, sys; umask = os.umask(0);"
        "print(json.dumps([os.getcwd(), umask, sys.argv, os.environ['A'], sorted(os.listdir('/proc/self/fd'))]))"
    )
    ask = f'umask 027; exec "$0" -c "{program}" "x y" "$1"'
    environment = {**os.environ, "A": "1=2\n3"}
    answers = []
    for python in (stand_in, sys.executable):
        done = subprocess.run(
            ["bash", "-c", ask, python, "\u00e9"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        answers.append(json.loads(done.stdout))
    assert answers[0] == answers[1]
    assert answers[0][:4] == [str(tmp_path), 0o27, ["-c", "x y", "\u00e9"], "1=2\n3"]


def test_signals_and_the_end_by_a_signal_are_passed_on(stand_in: str) -> None:
    process, fork = stand_in_that_runs(
        stand_in, f"import signal\nsignal.signal(2, signal.SIG_IGN)\n{ENDLESS}"
    )
    with process:
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM
    assert not is_running(fork)


def test_a_killed_stand_in_takes_its_fork_along_and_no_other(stand_in: str) -> None:
    killed, fork = stand_in_that_runs(stand_in, ENDLESS)
    other, fork_of_other = stand_in_that_runs(stand_in, ENDLESS)
    with killed, other:
        killed.kill()
        wait_until(lambda: not is_running(fork))
        assert run_python("-c", "raise SystemExit(3)").returncode == 3
        assert is_running(fork_of_other)
        other.terminate()
        assert other.wait() == -signal.SIGTERM


def test_open_files_are_passed_on_and_closed_with_the_fork(stand_in: str) -> None:
    reader, writer = os.pipe()
    program = (
        "import os, sys, time; os.write(int(sys.argv[1]), b'x'); os.close(int(sys.argv[1])); time.sleep(3600)"
    )
    with subprocess.Popen([stand_in, "-c", program, str(writer)], pass_fds=[writer]) as process:
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            assert pipe.read() == b"x"  # until all have closed it
        process.terminate()


def doubled(item: int, update: object, num_cores: object) -> int:
    return 2 * item


def test_workers_that_are_forks_work(stand_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    executable = multiprocessing.spawn.get_executable()
    multiprocessing.set_executable(stand_in)
    try:
        events = [event for event in run_all(doubled, [1, 2, 3], 2) if event is not None]
    finally:
        multiprocessing.set_executable(executable)
    assert sorted(event.result for event in events if isinstance(event, Finished)) == [2, 4, 6]


def test_waiting_for_a_fork_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "log").write_text("why it hangs")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind(str(tmp_path / "server"))
        silent.listen()
        monkeypatch.setenv(forked.SHARED, str(tmp_path))
        monkeypatch.setattr(prepared_python, "start", lambda: tmp_path)
        monkeypatch.setattr(forked, "PATIENCE_S", 0)
        with pytest.raises(TimeoutError, match="why it hangs"):
            ForkedPython(["-c", "pass"], {}, tmp_path / "output")
