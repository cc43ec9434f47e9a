"""Hung and lost ranks end the job soon, and say where to look."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from tests.trainer.runs import ROOT, Ranks, Run
from trainer.errors import Exit
from trainer.hang import Report, verdict
from trainer.peers import Peers, ranges
from trainer.rendezvous import Ranks as Place
from trainer.run_directory import set_aside

ENOUGH_S = 60
"""Well above what any of this takes on a busy machine, and below the timeouts that would end a run otherwise."""


@pytest.fixture
def two_ranks(config: dict[str, Any]) -> dict[str, Any]:
    """Two ranks that train until something ends them."""
    config["world_size"] = 2
    config["training"]["train_iters"] = 100_000
    return config


def test_a_stopped_rank_ends_the_others_with_their_stacks(two_ranks: dict[str, Any]) -> None:
    two_ranks["training"]["distributed_timeout_seconds_after_init"] = 3
    ranks = Ranks(two_ranks)
    ranks.wait_for_step()
    ranks.send(signal.SIGSTOP, rank=1)
    assert ranks.processes[0].wait(ENOUGH_S) == Exit.HUNG
    ranks.send(signal.SIGKILL, rank=1)
    result = ranks.wait()
    [line] = [line for line in result.log.splitlines() if line.startswith("trainer: ")]
    assert re.match(
        r"trainer: hung: nothing moved for [34](\.\d)? s; look first at rank 1 on \S+, which did not report",
        line,
    )
    assert "Traceback" not in result.log

    stacks = (result.directory / "stacks" / "rank-00000.txt").read_text()
    report, _, rest = stacks.partition("\n")
    assert Report(**json.loads(report)).phase == "train"
    assert "in run_steps" in rest
    record = pickle.loads((result.directory / "stacks" / "flight-record-0").read_bytes())
    assert record["entries"]
    assert not (result.directory / "FAILED").exists()  # another try may do
    heartbeat = json.loads((result.directory / "heartbeat").read_text())
    assert heartbeat["pid"] == ranks.processes[0].pid
    assert heartbeat["time"] <= time.time()


@pytest.mark.parametrize("silent", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_sigterm_while_a_rank_is_silent_does_not_wait_for_it(silent: int, two_ranks: dict[str, Any]) -> None:
    """Stopped, it neither answers nor closes its connections: nothing tells the other that it will not come."""
    ranks = Ranks(two_ranks)
    ranks.wait_for_step()
    ranks.send(signal.SIGSTOP, rank=silent)
    for _ in range(3):  # Slurm sends it more than once
        ranks.send(signal.SIGTERM, rank=1 - silent)
    assert ranks.processes[1 - silent].wait(ENOUGH_S) == Exit.TERMINATED
    ranks.send(signal.SIGKILL, rank=silent)
    result = ranks.wait()
    assert f"rank {1 - silent} on " in result.log
    assert "without saving" in result.log
    assert_nothing_saved(result)


@pytest.mark.slow
def test_sigterm_to_all_ranks_saves(two_ranks: dict[str, Any]) -> None:
    ranks = Ranks(two_ranks)
    ranks.wait_for_step()
    for rank in (0, 1, 0, 1):
        ranks.send(signal.SIGTERM, rank)
    result = ranks.wait()
    assert result.statuses == (Exit.DONE, Exit.DONE), result.log
    assert (result.directory / "STOPPED").read_text() == f"{result.steps[-1][0]}\n"


def test_a_rank_whose_peer_is_gone_says_so_in_one_line_and_saves_nothing(two_ranks: dict[str, Any]) -> None:
    ranks = Ranks(two_ranks)
    ranks.wait_for_step()
    ranks.send(signal.SIGKILL, rank=1)
    result = ranks.wait()
    assert result.statuses == (Exit.LOST_PEERS, -signal.SIGKILL), result.log
    assert "Traceback" not in result.log
    assert re.search(
        r"^trainer: rank 0 on \S+ lost its peers after iteration \d+ \(train\) \(", result.log, re.MULTILINE
    )
    assert not (result.directory / "FAILED").exists()
    assert_nothing_saved(result)


def assert_nothing_saved(result: Run) -> None:
    assert not list(result.checkpoints.glob("*/COMPLETE"))
    assert not (result.directory / "STOPPED").exists()


def test_the_heartbeat_of_a_run_that_ended_says_so(single_gpt: Run) -> None:
    heartbeat = json.loads((single_gpt.directory / "heartbeat").read_text())
    assert (heartbeat["iteration"], heartbeat["phase"]) == (6, "end")
    assert heartbeat.keys() == {"time", "iteration", "phase", "host", "pid"}
    assert not list((single_gpt.directory / "stacks").iterdir())


def report(rank: int, iteration: int = 8, at: str = "step.py:150 _agree") -> Report:
    return Report(
        rank=rank, host=f"n{rank}", pid=1, iteration=iteration, phase="train", at=at, quiet_s=600.0, since=""
    )


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        (
            [report(0), report(1), report(3)],
            "look first at rank 2 on n2, which did not report; rank 0-1,3 waits after iteration 8 at step.py:150 _agr",
        ),
        (
            [report(0), report(1, at="data.py:88 micro_batches"), report(2), report(3)],
            "look first at rank 1 on n1, which stands after iteration 8 at data.py:88 micro_batches; rank 0,2-3 waits",
        ),
        (
            [report(0), report(1), report(2, 7, "loop.py:70 run_steps"), report(3, 9)],
            "look first at rank 2 on n2, which stands after iteration 7 at loop.py:70 run_steps, then at rank 3 on n3",
        ),
        (
            [report(rank) for rank in range(4)],
            "600 s; every rank waits after iteration 8 at step.py:150 _agree;",
        ),
    ],
)
def test_the_line_of_a_hang_names_those_that_stand_apart(reports: list[Report], expected: str) -> None:
    line = verdict({each.rank: each for each in reports}, 4, lambda rank: f"n{rank}", Path("/run/stacks"))
    assert line.startswith("hung: nothing moved for 600 s; ")
    assert expected in line
    assert line.endswith("stacks and flight records are in /run/stacks")


def test_ranks_in_few_words() -> None:
    assert ranges([0, 1, 2, 4, 6, 7]) == "0-2,4,6-7"
    assert ranges([]) == ""


def place(rank: int, world_size: int = 3) -> Place:
    return Place(rank, rank, world_size, "a test")


def test_a_roll_names_those_that_did_not_answer() -> None:
    store = HashStore()
    first, second, third = (Peers(place(rank), store) for rank in range(3))
    assert first.missing("roll", 0) == [1, 2]
    assert third.missing("roll", 0) == [1]
    assert second.missing("roll", 0) == []
    assert first.missing("roll", ENOUGH_S) == []
    assert not first.is_alarmed()
    third.raise_alarm()
    assert first.is_alarmed()
    assert first.host(2) == os.uname().nodename
    assert first.host(7) is None


class SilentStore:
    """As one whose process is stopped: the connection stays, and nothing comes back."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: time.sleep(ENOUGH_S)


def test_a_store_that_does_not_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.peers.ANSWER_S", 0.05)
    peers = Peers(place(1), SilentStore())  # type: ignore[arg-type]
    started = time.monotonic()
    assert peers.missing("roll", ENOUGH_S) is None
    assert peers.host(0) is None
    assert not peers.is_alarmed()
    assert time.monotonic() - started < ENOUGH_S / 2


def test_stacks_of_an_earlier_hang_are_set_aside(tmp_path: Path) -> None:
    stacks = tmp_path / "stacks"
    for life in range(3):
        set_aside(stacks)
        assert list(stacks.iterdir()) == []
        (stacks / "rank-00000.txt").write_text(str(life))
    set_aside(stacks)
    set_aside(stacks)
    kept = {path.name: (path / "rank-00000.txt").read_text() for path in tmp_path.glob("stacks.*")}
    assert kept == {"stacks.1": "0", "stacks.2": "1", "stacks.3": "2"}


LEAVING = """
import os, signal, sys, time
from trainer.peers import Peers
from trainer.rendezvous import Ranks
from trainer.stopping import StopRequest

class Store(dict):  # as a rank sees it that is alone: torch's need not be imported
    set = dict.__setitem__
    def check(self, keys): return all(key in self for key in keys)

ranks = Ranks(0, 0, 1, "a test")
stop = StopRequest(None)
stop.answer_sigterm(ranks, Peers(ranks, Store()), is_worth_saving=lambda: sys.argv[1] == "worth")
if sys.argv[2:] == ["agreed"]:
    stop.agreed()
for _ in range(3):
    os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60 if sys.argv[1:] == ["worthless"] else 1)
print(stop.reason())
"""


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (
            ["worthless"],
            Exit.TERMINATED,
            "SIGTERM; all ranks leave before the first step: there is nothing to save",
        ),
        (["worth"], 0, "SIGTERM\n"),
        (["worthless", "agreed"], 0, "SIGTERM\n"),
    ],
)
def test_sigterm_ends_a_run_at_once_while_there_is_nothing_to_save(
    arguments: list[str], status: int, said: str
) -> None:
    command = [sys.executable, "-c", LEAVING, *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, said in result.stdout + result.stderr) == (status, True), result
