"""The status of runs on a real Slurm: with accounting, without, with jobs it has forgotten, and when it is silent."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcgen.runs import slurm
from hpcgen.runs.files import RunReader
from hpcgen.runs.look import look
from hpcgen.runs.slurm import Queue
from hpcgen.runs.status import RunStatus, status_of, unsettled_jobs
from hpcgen.slurm import programs, sbatch
from tests.patience import wait_until
from tests.slurm.cluster import SlurmCluster
from tests.slurm.test_run import program_run, submit

WAITING = {"command": ["sh", "-c", "while ! [ -e {RUN_DIR}/go ]; do sleep 0.1; done"]}
"""A program that ends when a file appears."""


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[SlurmCluster], None]:
    """Makes this process ask a cluster."""

    def set_environment(cluster: SlurmCluster) -> None:
        for name in ("SLURM_CONF", "PATH"):
            monkeypatch.setenv(name, cluster.env[name])

    return set_environment


def status(run: Path, now: float | None = None) -> RunStatus:
    started = max((path.stat().st_mtime for path in run.rglob("events.jsonl")), default=0.0)
    return look([run], now or started + 1)[0]


def wait_for(run: Path, state: str) -> RunStatus:
    """The status of the run once its last attempt has this state."""

    def has_state() -> bool:
        return [attempt.state for attempt in status(run).attempts[-1:]] == [state]

    wait_until(has_state, lambda: repr(status(run)))
    return status(run)


def kill_batch_script(cluster: SlurmCluster, job_id: str) -> None:
    """Kills the job's processes at one blow, as the kernel does when memory runs out. None records anything."""
    mark = {f"SLURM_JOB_ID={job_id}".encode(), f"SLURM_CONF={cluster.env['SLURM_CONF']}".encode()}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark <= set((process / "environ").read_bytes().split(b"\0")):
                os.kill(int(process.name), signal.SIGKILL)
        except (OSError, ValueError):
            continue


def test_what_slurm_knows_and_what_it_has_forgotten(
    accounting_cluster: SlurmCluster,
    use: Callable[[SlurmCluster], None],
    tmp_path: Path,
) -> None:
    cluster, run = accounting_cluster, tmp_path / "run"
    use(cluster)
    file = program_run(tmp_path, WAITING)
    first = submit(cluster, file)
    found = wait_for(run, "running")
    assert (found.state, found.owner) == ("running", cluster.run("id", "-un").stdout.strip())
    assert [(job.job, job.stage, job.state) for job in found.jobs] == [(first, "run", "RUNNING")]

    second = submit(cluster, file, options=[f"--dependency=afterany:{first}"])
    third = submit(cluster, file, options=["--hold"])
    waiting = {job.job: job.words for job in status(run).jobs if job.state == "PENDING"}
    assert waiting == {second: f"waits for its dependency {first}", third: "held by a user"}
    cluster.run("scancel", second, third)

    kill_batch_script(cluster, first)
    cluster.wait(first)
    killed = wait_for(run, "killed")
    assert (killed.state, killed.why) == ("died", "its batch script was killed or failed, according to Slurm")

    # The controller has forgotten the job. Accounting has not.
    files, forgotten = RunReader(run).read(killed.attempts[0].began + 3600), Queue(asked=1e10)
    assert unsettled_jobs([files], forgotten) == (first,)
    assert status_of(files, forgotten, slurm.NO_ACCOUNTS, 1e10).why.startswith("it ended without a verdict")

    def accounted() -> bool:
        accounts = slurm.ask_accounts([first])
        assert accounts.problem == ""
        return status_of(files, forgotten, accounts, 1e10).why == killed.why

    wait_until(accounted, lambda: repr(slurm.ask_accounts([first])))

    fourth = submit(cluster, file)
    wait_until(lambda: status(run).attempts[-1].job == fourth, lambda: repr(status(run)))
    cluster.run("scancel", fourth)
    canceled = wait_for(run, "terminated")
    cluster.wait(fourth)
    assert status(run).state == "stopped"
    assert canceled.attempts[-1].reason.startswith("ended by Slurm (canceled)")


def test_without_accounting_and_with_a_controller_that_does_not_answer(
    slurm_cluster: SlurmCluster,
    use: Callable[[SlurmCluster], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster, run = slurm_cluster, tmp_path / "run"
    use(cluster)
    command = ["sh", "-c", f"echo 7 >{{RUN_DIR}}/step; {WAITING['command'][2]}"]
    program = {"command": command, "progress": {"file": "{RUN_DIR}/step"}}
    job = submit(cluster, program_run(tmp_path, program))
    wait_for(run, "running")
    wait_until((run / "step").exists, lambda: repr(status(run)))
    wait_until(lambda: (run / "step").read_text() == "7\n", lambda: repr(status(run)))
    found = status(run).program
    assert found is not None
    assert (found.began, found.value, found.source) == (0, 7, f"{run}/step")
    monkeypatch.setenv("SQUEUE_PARTITION", "another")  # would hide the job
    assert sbatch.state_of(job) == "RUNNING"
    assert slurm.ask_accounts([job]).problem == "sacct fails: Slurm accounting storage is disabled"

    controller = int((cluster.directory / "slurmctld.pid").read_text())
    os.kill(controller, signal.SIGSTOP)  # its port takes connections, and nothing answers
    try:
        monkeypatch.setattr(programs, "TIMEOUT_S", 1.0)
        silent = status(run)
    finally:
        os.kill(controller, signal.SIGCONT)
    assert silent.problems == ("squeue does not answer within 1 s",)
    assert [attempt.state for attempt in silent.attempts] == ["unknown"]
    monkeypatch.setattr(programs, "TIMEOUT_S", 60.0)

    (run / "go").touch()
    assert cluster.wait(job) == "COMPLETED"
    done = status(run)
    assert (done.state, done.jobs, done.problems) == ("done", (), ())
