"""Messages on the ranks that cause a hang."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from trainer.health.meeting import Note, blame

ROOT = Path(__file__).parents[3]

HERE, THERE = "node-a", "node-b"


def notes(*steps: int) -> list[Note]:
    return [
        Note(step, (HERE, HERE, THERE, THERE)[rank]) if step else Note() for rank, step in enumerate(steps)
    ]


def test_a_rank_that_never_joined() -> None:
    assert blame(3, notes(3, 3, 0, 3), [True, True, False, True]) == "rank 2 on an unknown node never joined"


def test_a_process_that_stopped_responding() -> None:
    assert blame(3, notes(3, 3, 3, 3), [True, True, False, False]) == "ranks 2 3 on node-b stopped responding"


def test_a_rank_that_is_still_at_an_earlier_step() -> None:
    assert blame(3, notes(3, 2, 3, 3), [True] * 4) == "rank 1 on node-a did not reach it"


def test_ranks_that_are_ahead_are_not_blamed() -> None:
    found = blame(3, notes(4, 4, 3, 3), [True] * 4)
    assert found == "ranks 2 3 on node-b began it and are alive, but none finished: a GPU or a link hangs"


def test_several_reasons_are_combined() -> None:
    found = blame(3, notes(3, 1, 0, 3), [True, True, False, False])
    assert found == (
        "rank 2 on an unknown node never joined; rank 3 on node-b stopped responding; "
        "rank 1 on node-a did not reach it"
    )


WAITING = """
import os, sys, time
from trainer.health.meeting import Meeting
from trainer.distributed.rendezvous import Ranks
rank = int(sys.argv[1])
with Meeting(Ranks(rank, 0, 2, "a test"), f"node-{rank}", os.environ, 3.0, "test") as meeting:
    meeting.gather("start", None)
    with meeting.step("a sum"):
        print("inside", flush=True)
        time.sleep(120)
"""


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(
    ("stopped", "line"),
    [
        (1, "test: HANG: rank 0 on node-0 has waited 3 s in 'a sum': rank 1 on node-1 stopped responding\n"),
        (
            0,
            "test: HANG: rank 1 on node-1 has waited 3 s in 'a sum': "
            "rank 0, which hosts the store, does not answer\n",
        ),
    ],
)
def test_a_process_that_stops_is_named_by_the_one_that_waits_for_it(stopped: int, line: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TRAINER_RENDEZVOUS_ID": "test",
        "TORCH_CPP_LOG_LEVEL": "FATAL",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", WAITING, str(rank)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in ranks:
            assert process.stdout is not None
            assert process.stdout.readline() == "inside\n"
        ranks[stopped].send_signal(signal.SIGSTOP)
        _, error = ranks[1 - stopped].communicate(timeout=PATIENCE_S)
        assert (ranks[1 - stopped].returncode, error) == (1, line)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
            for stream in (process.stdout, process.stderr):
                assert stream is not None
                stream.close()
