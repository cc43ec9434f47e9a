"""What the report says of runs that are silent, died or hang."""

from __future__ import annotations

import html
import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.cli.command import hpcgen
from tests.cli.reports import Page, report
from tests.recorded_run import START, start, step, steps, write_run


def test_a_silent_run_shows_its_last_heartbeat(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [start(), *steps(1, 3)])
    beat = time.time() - 3 * 86400 - 4.5 * 3600
    (run / "heartbeat").write_text(
        json.dumps({"time": beat, "iteration": 3, "phase": "save", "host": "ndv5-002"})
    )
    (run / "stacks").mkdir()
    (run / "stacks" / "rank-3").touch()
    page = report(run)
    assert "last activity 3 d 4 h ago: save on ndv5-002, iteration 3" in page.text
    assert f"The stacks of its ranks are in {run}: stacks." in page.text
    assert "no recent output" in page.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make links of another user")
def test_the_file_behind_a_link_of_another_user_is_not_in_the_report(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [start(), *steps(1, 3)])
    (tmp_path / "private").write_text("my password")
    (run / "FAILED").symlink_to(tmp_path / "private")
    os.lchown(run / "FAILED", 65534, 65534)
    page = report(run)
    assert "FAILED is a symbolic link that another user placed, and was not followed" in page.text
    assert "my password" not in page.source


def write_heartbeat(run: Path, pid: int, host: str | None = None, phase: str = "train") -> None:
    beat = {
        "time": time.time(),
        "iteration": 3,
        "phase": phase,
        "host": host or socket.gethostname(),
        "pid": pid,
    }
    (run / "heartbeat").write_text(json.dumps(beat))


@pytest.fixture
def ended_pid() -> int:
    with subprocess.Popen(["true"]) as process:
        pass
    return process.pid


def column(page: Page, *, row: str, number: int) -> str:
    """A cell of the comparison."""
    [cells] = re.findall(rf"<tr><td>{row}</td>(.*?)</tr>", page.source)
    return html.unescape(re.findall("<td.*?>(.*?)</td>", cells)[number])


@pytest.mark.process
def test_a_run_whose_process_is_gone_has_died(tmp_path: Path, eventful: Path, ended_pid: int) -> None:
    run = write_run(tmp_path / "run", [start(), *steps(1, 4)])
    write_heartbeat(run, ended_pid)
    page = report(run)
    assert re.search(
        r"The run died: ended without a message: it was killed or crashed; see the log; last activity \S+ s ago: "
        rf"train on {re.escape(socket.gethostname())}, iteration 4",
        page.text,
    )
    assert "running" not in page.text
    assert "still running" not in page.text
    assert (
        "ended without a message: it was killed or crashed; see its log" in page.text
    )  # in the table of its attempts
    terminal = hpcgen("report", run, eventful).stdout
    assert (
        "run: died, iteration 4 of 1,000: ended without a message: it was killed or crashed; see the log"
        in terminal
    )
    assert column(report(run, eventful), row="state", number=0).startswith(
        "died: ended without a message: it was killed"
    )


@pytest.mark.process
@pytest.mark.parametrize("host", [None, "another-host"])
def test_a_run_whose_process_may_be_there_is_running(
    tmp_path: Path, ended_pid: int, host: str | None
) -> None:
    """Nothing is known of the processes of other machines."""
    run = write_run(tmp_path / "run", [start(), *steps(1, 3)])
    write_heartbeat(run, os.getpid() if host is None else ended_pid, host)
    assert "gpt: running, iteration 3 of 1,000" in hpcgen("report", run).stdout


@pytest.mark.process
def test_a_run_that_died_shows_its_last_message(tmp_path: Path, ended_pid: int) -> None:
    stop = {"event": "stop", "iteration": 3, "time": START + 7, "reason": "rank 1 on ndv5-002 is gone"}
    run = write_run(tmp_path / "run", [start(), *steps(1, 3), stop])
    write_heartbeat(run, ended_pid)
    assert (
        "gpt: died, iteration 3 of 1,000: its last message: rank 1 on ndv5-002 is gone;"
        in hpcgen("report", run).stdout
    )


@pytest.mark.process
def test_a_requeued_run_that_has_not_started_yet_did_not_die(tmp_path: Path, ended_pid: int) -> None:
    """The job has removed STOPPED, and the trainer is not up yet."""
    stop = {"event": "stop", "iteration": 3, "time": START + 7, "reason": "asked to stop (SIGUSR2)"}
    run = write_run(tmp_path / "run", [start(), *steps(1, 3), stop])
    write_heartbeat(run, ended_pid, phase="end")
    assert "gpt: stopped, iteration 3 of 1,000: last activity " in hpcgen("report", run).stdout


def write_stacks(run: Path, ranks: Iterable[int], at: str = "step.py:140 _agree") -> Path:
    """Stacks of ranks on two hosts, as trainer.faults.hang writes them."""
    (run / "stacks").mkdir(exist_ok=True)
    for rank in ranks:
        seen = {
            "rank": rank,
            "host": f"ndv5-00{1 + rank // 8}",
            "pid": 7,
            "iteration": 3,
            "phase": "train",
            "at": at,
            "quiet_s": 600.4,
            "since": "2026-07-01T12:00:00+0000",
        }
        path = run / "stacks" / f"rank-{rank:05d}.txt"
        path.write_text(json.dumps(seen) + "\n\nMain thread (most recent call last):\n")
    return run / "stacks"


@pytest.mark.process
def test_a_run_that_hung_says_so_at_once_and_where(tmp_path: Path, eventful: Path, ended_pid: int) -> None:
    run = write_run(tmp_path / "run", [start(), *steps(1, 3)])
    write_heartbeat(run, ended_pid)
    write_stacks(run, [*range(5), *range(6, 12), 13, 14, 15])
    write_stacks(run, [12], at="sampler.py:31 read")
    said = (
        "no progress for 600.4 s. Look first at rank 5, which did not report, "
        "then at rank 12 on ndv5-002, waiting after iteration 3 at sampler.py:31 read. "
        "Ranks 0-4,6-11,13-15 wait after iteration 3 at step.py:140 _agree"
    )
    page = report(run)
    assert f"The run hung: {said}" in page.text
    assert f"hung: {said}" in page.text  # in the table of its attempts
    assert f"gpt: hung, iteration 3 of 1,000: {said}\n" in hpcgen("report", run).stdout
    assert column(report(run, eventful), row="state", number=0) == f"hung: {said}"


def test_stacks_older_than_the_last_step_do_not_mean_a_hang(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [start(time=time.time()), step(1, time=time.time())])
    stacks = write_stacks(run, [0, 1])
    for path in stacks.iterdir():
        os.utime(path, (START, START))
    assert "gpt: running, iteration 1 of 1,000" in hpcgen("report", run).stdout
    stacks.rename(run / "stacks.1")
    assert (
        f"The run hung in an earlier attempt. The stacks of its ranks are in {run}: stacks.1."
        in report(run).text
    )


@pytest.mark.process
def test_a_failed_run_shows_its_reason_in_a_comparison(
    tmp_path: Path, eventful: Path, ended_pid: int
) -> None:
    run = write_run(tmp_path / "run", [start(), *steps(1, 3)])
    write_heartbeat(run, ended_pid)
    write_stacks(run, [0])
    (run / "FAILED").write_text("the loss is nan at iteration 4\n")
    assert column(report(run, eventful), row="state", number=0) == "failed: the loss is nan at iteration 4"
    assert (
        "run: failed, iteration 3 of 1,000: the loss is nan at iteration 4\n"
        in hpcgen("report", run, eventful).stdout
    )


@pytest.mark.process
def test_a_run_that_stopped_early_says_why(tmp_path: Path) -> None:
    reason = "stopped early at iteration 3: valid/loss has not improved for 2 evaluations; the best is 2.5"
    run = write_run(tmp_path / "run", [start(), *steps(1, 3)])
    (run / "DONE").write_text(f"3\n{'0' * 64}\n{reason}\n")
    assert f"done, iteration 3 of 1,000: {reason}" in hpcgen("report", run).stdout
    assert reason in report(run).text
    assert reason in " ".join(hpcgen("status", run).stdout.split())
