"""States of the points of a sweep. tests/slurm/test_sweep.py asks a real Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcgen.runs.slurm import Queue, QueuedJob
from hpcgen.sweeps.assignments import points_of
from hpcgen.sweeps.points import Point, Sweep, plan_sweep
from hpcgen.sweeps.states import PointState, starts, states_of
from tests.runs import minimal_run, write_yaml
from trainer.contract.config import fingerprint


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    file = write_yaml(tmp_path / "run.yaml", minimal_run(paths={"run_dir": "run"}))
    sweep = plan_sweep(file, *points_of(["optimizer.lr=1e-4,3e-4"]))
    for point in sweep.points:
        point.directory.mkdir(parents=True)
    return sweep


def queued(job: str, log: Path, state: str = "PENDING") -> QueuedJob:
    return QueuedJob(
        job=job,
        state=state,
        reason="Priority",
        submitted=None,
        starts=None,
        ends=None,
        nodes="",
        dependency="",
        user="me",
        name="x",
        log=str(log),
    )


def first(sweep: Sweep, *jobs: QueuedJob) -> PointState:
    return states_of(sweep, Queue(jobs=jobs))[0]


def test_a_point_is_done_if_exactly_its_configuration_is(sweep: Sweep) -> None:
    def mark(point: Point, of: Point) -> None:
        assert of.plan.trainer is not None
        (point.directory / "DONE").write_text(f"10\n{fingerprint(of.plan.trainer)}\n")

    one, other = sweep.points
    mark(one, of=other)
    assert first(sweep).state == "missing"
    mark(one, of=one)
    assert first(sweep).state == "done"


def test_a_failed_point_starts_only_to_repeat_it(sweep: Sweep) -> None:
    (sweep.points[0].directory / "FAILED").write_text("the loss is nan\n")
    failed, missing = states_of(sweep, Queue())
    assert (failed.state, failed.detail, missing.state) == ("failed", "the loss is nan", "missing")
    assert [starts(failed, retry=retry) for retry in (False, True)] == [False, True]
    assert starts(missing, retry=False)


def test_the_running_job_of_several_is_shown_and_the_last_one_waited_for(sweep: Sweep) -> None:
    directory = sweep.points[0].directory
    jobs = [queued("99", directory / "train-%j.log", "RUNNING"), queued("100", directory / "train-%j.log")]
    found = first(sweep, *reversed(jobs))
    assert (found.state, found.job, found.detail, found.last_job) == ("in the queue", "99", "runs", "100")
    assert not starts(found, retry=True)
    assert first(sweep, queued("9", directory / "evaluate-%j.log")).state == "missing"
    assert first(sweep, queued("9", directory.parent / "train-%j.log")).state == "missing"
