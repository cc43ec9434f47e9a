"""Hung and lost ranks end the job quickly and say where to look."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from tests.trainer.forked import run_python
from tests.trainer.runs import ROOT, Ranks, Run, run
from trainer.contract.errors import Exit
from trainer.contract.files.run_directory import set_aside
from trainer.contract.hang_report import HangReport, describe_hang, read_reports, report_file
from trainer.distributed.peers import Peers
from trainer.distributed.rendezvous import Ranks as Place

ENOUGH_S = 60
"""Longer than these tests take on a busy machine, and shorter than the timeouts that would otherwise end a run."""


@pytest.fixture
def two_ranks(config: dict[str, Any]) -> dict[str, Any]:
    """Two ranks that train until something ends them."""
    config["world_size"] = 2
    config["training"]["train_iters"] = 100_000
    return config


@pytest.mark.process
@pytest.mark.slow  # tests/slurm/test_faults.py has a job of two ranks hang
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
        r"trainer: hung: no progress for [34](\.\d)? s\. Look first at rank 1 on \S+, which did not report",
        line,
    )
    assert "Traceback" not in result.log

    stacks = (result.directory / "stacks" / "rank-00000.txt").read_text()
    report, _, rest = stacks.partition("\n")
    assert HangReport(**json.loads(report)).phase == "train"
    assert "in train_step" in rest
    record = pickle.loads((result.directory / "stacks" / "flight-record-0").read_bytes())
    assert record["entries"]
    assert not (result.directory / "FAILED").exists()  # another try may do
    heartbeat = json.loads((result.directory / "heartbeat").read_text())
    assert heartbeat["pid"] == ranks.processes[0].pid
    assert heartbeat["time"] <= time.time()


SILENT_STORE = """
import sys, threading, time
from pathlib import Path
from trainer.distributed import device
device.stand_in_for_cuda()
from trainer.contract.config import TrainingConfig
from trainer.distributed.rendezvous import Ranks
from trainer.contract.files.run_directory import RunDirectory
from trainer.faults.watch import Watch

class Silent:
    def __getattr__(self, question):
        return threading.Event().wait

directory = Path(sys.argv[1])
training = TrainingConfig(micro_batch_size=1, global_batch_size=1, train_iters=1, distributed_timeout_minutes=1 / 60)
with Watch(RunDirectory(directory, directory, directory), Ranks(1, 1, 2, "a test"), Silent(), training):
    time.sleep(60)
"""


@pytest.mark.process
@pytest.mark.slow
def test_a_silent_store_does_not_keep_the_watch_from_ending(tmp_path: Path) -> None:
    done = run_python("-c", SILENT_STORE, str(tmp_path))
    assert done.returncode == Exit.HUNG, done.stderr
    assert "trainer: hung: no progress for" in done.stderr
    assert "Look first at rank 0, which did not report" in done.stderr


@pytest.mark.process
def test_hanging_storage_in_a_save_ends_the_run_at_the_next_save(
    two_ranks: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training continues during a background save of any length. Waiting for a save is limited by the timeout."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "trainer" / "snapshot_hook"))
    monkeypatch.setenv("HOLD_SAVE", "1")
    monkeypatch.setenv("HELD", str(tmp_path / "held"))
    two_ranks["training"]["distributed_timeout_seconds_after_init"] = 3
    two_ranks["checkpoint"] = {"save_interval": 4}
    result = run(two_ranks)
    assert result.statuses == (Exit.HUNG, Exit.HUNG), result.log
    assert result.steps[-1][0] == 8
    assert "Every rank waits after iteration 8 at" in result.log
    assert_nothing_saved(result)


@pytest.mark.process
@pytest.mark.parametrize("silent", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_sigterm_while_a_rank_is_silent_does_not_wait_for_it(silent: int, two_ranks: dict[str, Any]) -> None:
    """A stopped rank neither answers nor closes its connections, so the other rank cannot see that it will not come."""
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


@pytest.mark.process
@pytest.mark.slow
def test_sigterm_to_all_ranks_saves(two_ranks: dict[str, Any]) -> None:
    ranks = Ranks(two_ranks)
    ranks.wait_for_step()
    for rank in (0, 1, 0, 1):
        ranks.send(signal.SIGTERM, rank)
    result = ranks.wait()
    assert result.statuses == (Exit.DONE, Exit.DONE), result.log
    assert (result.directory / "STOPPED").read_text() == f"{result.steps[-1][0]}\n"


@pytest.mark.process
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


@pytest.mark.process
def test_the_heartbeat_shows_that_a_run_has_ended(single_gpt: Run) -> None:
    heartbeat = json.loads((single_gpt.directory / "heartbeat").read_text())
    assert (heartbeat["iteration"], heartbeat["phase"]) == (6, "end")
    assert heartbeat.keys() == {"time", "iteration", "phase", "host", "pid"}
    assert not list((single_gpt.directory / "stacks").iterdir())


def report(rank: int, iteration: int = 8, at: str = "step.py:150 _agree") -> HangReport:
    return HangReport(
        rank=rank, host=f"n{rank}", pid=1, iteration=iteration, phase="train", at=at, quiet_s=600.0, since=""
    )


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        (
            [report(0), report(1), report(3)],
            "Look first at rank 2 on n2, which did not report. Ranks 0-1,3 wait after iteration 8 at step.py:150 ",
        ),
        (
            [report(0), report(1, at="data.py:88 micro_batches"), report(2), report(3)],
            "Look first at rank 1 on n1, waiting after iteration 8 at data.py:88 micro_batches. Ranks 0,2-3 wait ",
        ),
        (
            [report(0), report(1), report(2, 7, "loop.py:70 run_steps"), report(3, 9)],
            "Look first at rank 2 on n2, waiting after iteration 7 at loop.py:70 run_steps, then at rank 3 on n3",
        ),
        (
            [report(rank) for rank in range(4)],
            "600 s. Every rank waits after iteration 8 at step.py:150 _agree",
        ),
    ],
)
def test_the_line_of_a_hang_names_ranks_that_wait_elsewhere(reports: list[HangReport], expected: str) -> None:
    line = describe_hang({each.rank: each for each in reports}, 4, {rank: f"n{rank}" for rank in range(4)})
    assert line.startswith("no progress for 600 s. ")
    assert expected in line


def test_invalid_and_unfinished_reports_are_left_out(tmp_path: Path) -> None:
    valid = dataclasses.asdict(report(1))
    for rank, content in enumerate(
        (
            json.dumps(valid)[:40],
            json.dumps(valid) + "\n\nMain thread",
            json.dumps(valid | {"rank": "2"}),
            json.dumps(valid | {"rank": -1}),
            json.dumps({"rank": 4}),
            "[]",
        )
    ):
        report_file(tmp_path, rank).write_text(content)
    assert read_reports(tmp_path) == {1: report(1)}


def place(rank: int, world_size: int = 3) -> Place:
    return Place(rank, rank, world_size, "a test")


def test_a_roll_call_has_the_answers_of_the_ranks_that_answered() -> None:
    store = HashStore()
    first, second, third = (Peers(place(rank), store) for rank in range(3))
    assert first.call_roll("roll", "yes", 0) == {0: "yes"}
    assert third.call_roll("roll", "no", 0) == {0: "yes", 2: "no"}
    everyone = {0: "yes", 1: "yes", 2: "no"}
    assert second.call_roll("roll", "yes", 0) == everyone
    assert first.call_roll("roll", "yes", ENOUGH_S) == everyone
    assert not first.is_alarmed()
    third.raise_alarm()
    assert first.is_alarmed()
    assert first.hosts() == dict.fromkeys(range(3), os.uname().nodename)


class SlowStore:
    """Acts like a stopped process until `goes_on` is set: the connection stays open without answers."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self._store = HashStore()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.goes_on.wait()
            return getattr(self._store, name)(*arguments)

        return call


def test_a_store_that_does_not_answer_blocks_no_rank_and_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer.distributed.peers.ANSWER_S", 0.05)
    store = SlowStore()
    peers = Peers(place(1), store)  # type: ignore[arg-type]
    assert peers.call_roll("roll", "yes", 0.3) == {}
    assert peers.hosts() == {}
    assert not peers.is_alarmed()
    monkeypatch.setattr("trainer.distributed.peers.ANSWER_S", float(ENOUGH_S))
    store.goes_on.set()
    assert peers.hosts() == {1: os.uname().nodename}, "what it was told while it was silent"
    assert peers.call_roll("roll", "no", 0) == {1: "no"}


def test_stacks_of_an_earlier_hang_are_set_aside(tmp_path: Path) -> None:
    stacks = tmp_path / "stacks"
    for attempt in range(3):
        set_aside(stacks)
        assert list(stacks.iterdir()) == []
        (stacks / "rank-00000.txt").write_text(str(attempt))
    set_aside(stacks)
    set_aside(stacks)
    kept = {path.name: (path / "rank-00000.txt").read_text() for path in tmp_path.glob("stacks.*")}
    assert kept == {"stacks.1": "0", "stacks.2": "1", "stacks.3": "2"}


LEAVING = """
import os, signal, sys, threading
from trainer.distributed.peers import Peers
from trainer.distributed.rendezvous import Ranks
from trainer.faults.stopping import StopRequest

class Store(dict):  # as rank 0 of two sees it
    def append(self, key, value): self[key] = self.get(key) + value.encode()
    def get(self, key): return super().get(key, b"")
    def check(self, keys): return all(key in self for key in keys)

worth, other, agreed = sys.argv[1:]
store = Store({"terminated": f"1 {other}\\n".encode()})
ranks = Ranks(0, 0, 2, "a test")
stop = StopRequest(None)
stop.answer_sigterm(
    ranks, Peers(ranks, store), is_worth_saving=lambda: worth == "yes", shorten_timeout=lambda: print("shortens")
)
if agreed == "agreed":
    stop.agreed()
for _ in range(3):
    os.kill(os.getpid(), signal.SIGTERM)
[roll] = [thread for thread in threading.enumerate() if thread.name == "roll call"]
roll.join(60)
print(stop.reason())
"""

NOTHING = "SIGTERM; all ranks leave before the first step, so there is nothing to save\n"


@pytest.mark.process
@pytest.mark.parametrize(
    ("worth", "other", "agreed", "status", "said"),
    [
        pytest.param("yes", "yes", "", 0, "shortens\nSIGTERM\n", id="each has stepped"),
        pytest.param("no", "no", "", Exit.TERMINATED, NOTHING, id="none has stepped"),
        pytest.param("yes", "no", "", Exit.TERMINATED, NOTHING, id="the other has not stepped yet"),
        pytest.param("no", "yes", "", Exit.TERMINATED, NOTHING, id="only the other has stepped"),
        pytest.param("no", "no", "agreed", 0, "SIGTERM\n", id="they save already"),
    ],
)
def test_sigterm_saves_when_all_ranks_have_something_to_save_and_else_ends_all_of_them(
    worth: str, other: str, agreed: str, status: int, said: str
) -> None:
    result = run_python("-c", LEAVING, worth, other, agreed)
    assert result.returncode == status, result
    assert (result.stdout + result.stderr).endswith(said)


DYING = """
import sys, threading
from pathlib import Path
from torch.distributed import HashStore
from trainer.distributed import device
device.prepare("cpu")
from trainer.faults import watch
from trainer.contract.config import TrainingConfig
from trainer.distributed.peers import Peers
from trainer.distributed.rendezvous import Ranks
from trainer.contract.files.run_directory import RunDirectory

watch.SHORT_TIMEOUT_S = watch.OTHERS_S = 0.5
ranks, root = Ranks(0, 0, 2, "a test"), Path(sys.argv[1])
training = TrainingConfig(micro_batch_size=1, global_batch_size=1, train_iters=1)
with watch.Watch(RunDirectory(root, root, root), ranks, Peers(ranks, HashStore()), training) as running:
    running.beat(watch.Phase.TRAIN, 7)
    running.shorten_timeout()
    threading.Event().wait()  # for a rank that is gone
"""


@pytest.mark.process
def test_a_rank_that_dies_after_all_were_told_to_save_is_not_waited_for(tmp_path: Path) -> None:
    result = run_python("-c", DYING, str(tmp_path))
    assert result.returncode == Exit.TERMINATED, result
    assert "Look first at rank 1, which did not report. Rank 0 waits after iteration 7" in result.stderr
