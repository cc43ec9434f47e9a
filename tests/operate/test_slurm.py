"""What squeue's answer means. tests/slurm/test_status.py asks a real Slurm."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcgen.runs import slurm
from hpcgen.runs.slurm import Queue, QueuedJob
from trainer.contract.record import replaced

JOB = QueuedJob(
    job="7",
    state="PENDING",
    reason="Resources",
    submitted=1.0,
    starts=None,
    ends=None,
    nodes="",
    dependency="",
    user="ann",
    name="gpt-train",
    log="/runs/gpt/train-%j.log",
)


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Resources", "waits for resources"),
        ("Dependency", "waits for its dependency 12, 13"),
        ("JobHeldUser", "held by a user"),
        ("ReqNodeNotAvail", "needs nodes that are not available"),
        ("ReqNodeNotAvail, UnavailableNodes:n[7-8]", "needs nodes that are not available: n[7-8]"),
        ("ReqNodeNotAvail, UnavailableNodes:", "needs nodes that are not available"),
        ("ReqNodeNotAvail, Reserved for maintenance", "waits for the end of a maintenance"),
        (
            "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
            "needs nodes that are down, drained or reserved",
        ),
        ("QOSMaxGRESPerUser", "waits for a limit of its account or QOS (QOSMaxGRESPerUser)"),
        ("SomethingNew", "waits (SomethingNew)"),
    ],
)
def test_reasons_are_told_in_words(reason: str, words: str) -> None:
    assert replaced(JOB, reason=reason, dependency="afterok:12(unfulfilled),afterok:13").in_words() == words


def test_a_job_whose_nodes_the_cloud_starts_says_so() -> None:
    assert replaced(JOB, state="CONFIGURING", reason="").in_words() == "waits for its nodes to start"


def test_a_job_of_hpcgen_is_known_by_its_log() -> None:
    assert (JOB.run_dir, JOB.stage) == (Path("/runs/gpt"), "train")
    array = replaced(JOB, log="/runs/gpt/index-cache-77.log")
    assert (array.run_dir, array.stage) == (Path("/runs/gpt"), "index-cache")
    for log in ("/runs/gpt/slurm-7.out", "train-7.log", "/runs/gpt/trainer-7.log", ""):
        assert (replaced(JOB, log=log).run_dir, replaced(JOB, log=log).stage) == (None, None)


def test_waiting_tasks_of_an_array_share_one_line() -> None:
    waiting = replaced(JOB, job="7_[2,4-6,10-20:5%3]")
    queue = Queue(jobs=(waiting, replaced(JOB, job="8")))
    found = {task for task in range(30) if queue.find(f"7_{task}") is waiting}
    assert found == {2, 4, 5, 6, 10, 15, 20}
    assert queue.find("8") is not None
    assert queue.find("7") is None
    assert queue.find("8_1") is None


@pytest.mark.process
def test_a_machine_without_slurm_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert slurm.ask_queue([0]).problem == "squeue is not installed here"
    assert slurm.ask_accounts(["7"]).problem == "sacct is not installed here"
    assert slurm.ask_accounts([]).problem == ""  # nothing to ask


SACCT = """\
#!/bin/sh
echo call >> {calls}
for option; do case $option in --jobs=*) echo "${{option#--jobs=}}" | tr , '\\n'; esac; done |
while read -r job; do printf '%s\\037NODE_FAIL\\0370:0\\0371\\0371\\0371\\03760\\037n1\\n' "$job"; done
"""
"""Answers for each job that its node failed."""


@pytest.mark.process
def test_the_jobs_of_many_runs_fit_into_few_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Linux refuses an argument of 128 KiB."""
    stand_in, calls = tmp_path / "sacct", tmp_path / "calls"
    stand_in.write_text(SACCT.format(calls=calls))
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    jobs = {str(number) for number in range(10_000_000, 10_013_000)}
    found = slurm.ask_accounts(jobs)
    assert (found.problem, found.jobs.keys()) == ("", jobs)
    assert len(calls.read_text().splitlines()) == 2
