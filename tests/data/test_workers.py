"""Worker processes: each item runs once, a death fails only one item, and no worker outlives the parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from hpcgen.data import workers
from hpcgen.data.workers import Failed, Finished, Update, cores, run_all
from hpcgen.errors import HpcgenError
from tests.patience import PATIENCE_S, wait_until


def act(item, tell, num_cores):
    """The function of the workers. Does what its item says."""
    kind, value = item
    tell(os.getpid())
    if kind == "kill":
        os.kill(os.getpid(), value)
    if kind == "fail":
        raise HpcgenError("no good", "try another")
    if kind == "break":
        raise ZeroDivisionError(value)
    if kind == "full":
        raise OSError(28, "No space left on device", value)
    if kind == "memory":
        raise MemoryError
    if kind == "wait":
        wait_until(lambda: num_cores() >= value)
        return num_cores()
    if kind == "outlive":
        wait_until(lambda: value.exists() and not is_alive(int(value.read_text())))
        time.sleep(0.3)  # the parent notices the death
        return num_cores()
    if kind == "die":
        private = value.with_suffix(".new")
        private.write_text(str(os.getpid()))
        private.replace(value)
        os.kill(os.getpid(), signal.SIGKILL)
    return value * 2


def finish(items, num_workers) -> tuple[dict[int, object], dict[int, str], set[int]]:
    made, failed, pids = {}, {}, set()
    for event in run_all(act, items, num_workers):
        if isinstance(event, Finished):
            made[event.index] = event.result
        elif isinstance(event, Failed):
            failed[event.index] = event.reason
        elif isinstance(event, Update):
            pids.add(event.message)
    return made, failed, pids


@pytest.mark.process
def test_each_item_once_and_failures_apart():
    items = [
        ("make", 1),
        ("fail", 0),
        ("full", "/data/x"),
        ("break", "a mistake of ours"),
        ("memory", 0),
        *(("make", number) for number in range(40)),
    ]
    made, failed, pids = finish(items, 2)
    assert made == {0: 2, **{index + 5: 2 * index for index in range(40)}}
    assert failed[1] == "no good; try another"
    assert (
        failed[2]
        == "No space left on device: /data/x; free some space, and run the stage again (finished outputs are kept)"
    )
    assert failed[3].startswith("Traceback")
    assert "ZeroDivisionError: a mistake of ours" in failed[3]
    assert failed[4].startswith("out of memory")
    assert 1 <= len(pids) <= 2  # the first may have done it all before the second has started
    assert not [pid for pid in pids if is_alive(pid)]


@pytest.mark.process
def test_a_worker_that_is_killed_fails_its_item_only():
    items = [
        ("kill", signal.SIGKILL),
        *(("make", number) for number in range(6)),
        ("kill", signal.SIGUSR1),
        ("make", 9),
    ]
    made, failed, pids = finish(items, 2)
    assert sorted(made) == [1, 2, 3, 4, 5, 6, 8]
    assert "killed (SIGKILL), probably because memory ran out" in failed[0]
    assert "fewer --workers or more memory" in failed[0]
    assert "signal SIGUSR1" in failed[7]
    assert len(pids) == 3  # the first worker was not replaced; the last one was, since none was left


@pytest.mark.process
def test_the_last_item_gets_the_cores_of_workers_without_items(monkeypatch):
    monkeypatch.setattr(workers, "cores", lambda: 5)
    made, failed, _ = finish([("wait", 5), ("make", 1), ("make", 2)], 3)
    assert not failed
    assert made == {0: 5, 1: 2, 2: 4}


@pytest.mark.process
def test_the_cores_of_a_killed_worker_stay_unused(monkeypatch, tmp_path):
    """It was probably killed because memory was short."""
    monkeypatch.setattr(workers, "cores", lambda: 4)
    made, failed, _ = finish([("outlive", tmp_path / "pid"), ("die", tmp_path / "pid")], 2)
    assert list(failed) == [1]
    assert made == {0: 2}


@pytest.mark.process
def test_after_repeated_kills_the_remaining_items_are_not_started():
    made, failed, _ = finish([("kill", signal.SIGKILL)] * 50, 2)
    assert (len(made), len(failed)) == (0, 50)
    reasons = [reason.partition(",")[0] for reason in failed.values()]
    assert reasons.count("its worker process was killed (SIGKILL)") == 5
    assert reasons.count("not tried") == 45


def test_cores_are_those_of_the_job(monkeypatch):
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    monkeypatch.setattr(workers.os, "sched_getaffinity", lambda pid: set(range(96)))
    assert cores() == 96
    for given, expected in (("8", 8), ("200", 96), ("", 96), ("many", 96), ("0", 96)):
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", given)
        assert cores() == expected


ENDLESS = textwrap.dedent(
    """
    import os, sys, time
    from pathlib import Path
    from hpcgen.data.workers import run_all
    from hpcgen.files import private_file

    def work(item, tell, num_cores):
        with private_file(Path(item)):
            tell(os.getpid())
            time.sleep(600)

    if __name__ == "__main__":
        for event in run_all(work, sys.argv[1:], 2):
            if event is not None:
                print(event.message, flush=True)
    """
)


@pytest.mark.process
@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT", "SIGTERM"])
def test_workers_end_with_their_parent(tmp_path, name):
    script = tmp_path / "script.py"
    script.write_text(ENDLESS)
    arguments = [sys.executable, str(script), str(tmp_path / "a"), str(tmp_path / "b")]
    parent = subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path.cwd(),
        start_new_session=True,
    )
    pids = [int(parent.stdout.readline()) for _ in range(2)]
    if name == "SIGINT":  # as a terminal sends it: to everybody
        os.killpg(parent.pid, signal.SIGINT)
    else:
        parent.send_signal(signal.Signals[name])
    _, errors = parent.communicate(timeout=PATIENCE_S)
    wait_until(lambda: not any(map(is_alive, pids)), lambda: "the workers outlive their parent")
    if name == "SIGINT":
        assert errors.count("Traceback") == 1  # the parent's alone
        assert [path.name for path in tmp_path.iterdir()] == ["script.py"]  # no private file is left


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
