"""hpcgen stop, cancel and resume, on a real Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcgen.runs.attempts import read_attempts
from tests.cli.command import hpcgen
from tests.operate.test_status import end, write_events
from tests.patience import wait_until
from tests.slurm.cluster import SlurmCluster
from tests.slurm.conftest import TWO_RANKS, curve, log_of, render, wait_for_steps
from tests.slurm.test_job import end_training_with


@pytest.fixture
def client(slurm_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> SlurmCluster:
    """The cluster, which commands in this process use."""
    for name, value in slurm_cluster.env.items():
        monkeypatch.setenv(name, value)
    return slurm_cluster


def test_a_run_stops_at_a_checkpoint_and_resumes_as_it_was_submitted(
    client: SlurmCluster, tiny_run: Path
) -> None:
    """hpcgen submit, resume while it trains, stop, stop again, resume with another value, resume when done."""
    run_dir, longer = tiny_run.parent / "run", "training.train_iters=100000"
    given = ("-c", tiny_run, *(word for each in (*TWO_RANKS, longer) for word in ("--set", each)))
    job_id = hpcgen("submit", "train", *given).stdout.split()[0]
    wait_for_steps(tiny_run, 3)
    refused = hpcgen("resume", run_dir)
    assert (refused.status, f"job {job_id} of " in refused.stderr) == (2, True), refused

    stopped = hpcgen("stop", run_dir)
    assert stopped.status == 0, stopped
    assert "because hpcgen stop asked" in stopped.stdout
    assert f"{job_id} has the request" in stopped.stderr
    assert client.wait(job_id) == "CANCELLED"
    [attempt] = read_attempts(run_dir)
    assert attempt.verdict == "stopped"
    assert not (run_dir / "jobs" / job_id / "hold").exists()
    iteration = int((run_dir / "STOPPED").read_text())
    again = hpcgen("stop", run_dir)
    assert again.stdout == "nothing to stop: it has stopped at a checkpoint, and no job of it waits or runs\n"

    tiny_run.write_text(f"{tiny_run.read_text()}# a comment\n")
    resumed = hpcgen("resume", run_dir, "--set", f"training.train_iters={iteration + 4}")
    assert resumed.status == 0, resumed
    assert f"{tiny_run} has changed since" in resumed.stderr
    second = resumed.stdout.split()[0]
    assert client.wait(second) == "COMPLETED", log_of(tiny_run, second)
    assert f"from iteration {iteration} of {iteration + 4}" in log_of(tiny_run, second)
    assert hpcgen("resume", tiny_run).stdout.startswith("nothing to resume: the run is done")
    assert hpcgen("cancel", tiny_run).stdout.startswith("nothing to cancel: it is done")


def test_what_waits_is_canceled_and_a_failure_is_not_repeated_unasked(
    client: SlurmCluster, tiny_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tiny_run.parent / "run"
    script = render(tiny_run, *TWO_RANKS)
    for command in ("stop", "cancel"):
        job_id = client.sbatch(script, "--hold", cwd=tiny_run.parent)
        ended = hpcgen(command, run_dir)
        assert (ended.status, f"canceled {job_id}" in ended.stdout) == (0, True), ended
        assert client.wait(job_id) == "CANCELLED"
    assert "no job of the run has trained yet" in hpcgen("resume", run_dir).stderr
    output = f"--output={run_dir}/train-%j.log"  # as a job whose script has not begun
    job_id = client.sbatch("#!/bin/bash\nsleep 600\n", output, cwd=tiny_run.parent)
    wait_until(lambda: client.state(job_id) == "RUNNING")
    ended = hpcgen("stop", run_dir)
    assert (ended.status, ended.stdout) == (
        0,
        f"canceled {job_id}, which had nothing to save: its script had not begun\n",
    )
    assert client.wait(job_id) == "CANCELLED"

    job_id = client.sbatch(render(tiny_run, "secrets=[WANDB_API_KEY]"), cwd=tiny_run.parent)
    assert client.wait(job_id) == "FAILED"
    (run_dir / "FAILED").write_text("the loss is nan at iteration 7\n")
    refused = hpcgen("resume", run_dir, "--dry-run")
    assert (refused.status, "the loss is nan at iteration 7" in refused.stderr) == (2, True), refused
    monkeypatch.setenv("WANDB_API_KEY", "x")
    for option in (("--yes",), ("--set", "optimizer.lr=1e-4")):
        accepted = hpcgen("resume", run_dir, "--dry-run", *option)
        assert (accepted.status, accepted.stderr.splitlines()[-1]) == (0, "dry run: would submit train"), (
            accepted
        )


def test_a_run_that_may_go_on_in_another_cluster_is_left_alone(client: SlurmCluster, tmp_path: Path) -> None:
    write_events(tmp_path, "7", [], values={"cluster": "elsewhere"})
    for command in ("stop", "cancel", "resume"):
        refused = hpcgen(command, tmp_path)
        assert (refused.status, refused.stdout) == (2, "")
        assert "job 7 of cluster elsewhere may go on, and this is cluster " in refused.stderr
    write_events(tmp_path, "7", [end("stopped")], values={"cluster": "elsewhere"})
    assert hpcgen("stop", tmp_path).stdout.startswith("nothing to stop: ")


def test_a_chain_of_jobs_continues_and_ends_with_the_training(client: SlurmCluster, tiny_run: Path) -> None:
    """As for a site that forbids requeues. The first job is told that its time limit is near."""
    longer = (*TWO_RANKS, "training.train_iters=60", "slurm.train.chain=5")
    given = ("-c", tiny_run, *(word for each in longer for word in ("--set", each)))
    submitted = hpcgen("submit", "train", *given)
    assert submitted.status == 0, submitted
    first = submitted.stdout.split()[0]
    wait_for_steps(tiny_run, 3)
    assert client.show(first)["Requeue"] == "0"
    second = next_job(tiny_run, first)
    client.run("scancel", "--batch", "--signal=USR2", first)
    assert client.wait(first) == "COMPLETED"
    assert client.wait(second) == "COMPLETED", log_of(tiny_run, second)
    assert len(curve(tiny_run)) == 60
    before, after = read_attempts(tiny_run.parent / "run")
    assert (before.job, before.verdict, after.job, after.verdict) == (first, "requeued", second, "done")
    assert f"job {second} continues (job 2 of at most 5)" in before.reason
    assert client.wait(next_job(tiny_run, second)) == "CANCELLED"


def test_failures_without_progress_count_in_the_whole_chain(client: SlurmCluster, tiny_run: Path) -> None:
    end_training_with(7, tiny_run)
    jobs = [client.sbatch(render(tiny_run, "slurm.train.chain=9"), cwd=tiny_run.parent)]
    for state in ("COMPLETED", "COMPLETED", "FAILED"):
        assert client.wait(jobs[-1]) == state
        jobs.append(next_job(tiny_run, jobs[-1]))
    assert "three attempts without progress beyond iteration 0" in log_of(tiny_run, jobs[2])
    assert client.wait(jobs[3]) == "CANCELLED"


def test_no_stage_can_wait_for_a_chain(tiny_run: Path, byte_corpus: Path) -> None:
    values = (
        "--set",
        "slurm.train.chain=2",
        "--set",
        f"evaluation.data=[{{name: a, prefix: {byte_corpus}}}]",
    )
    refused = hpcgen("submit", "train", "evaluate", "-c", tiny_run, *values)
    assert refused.status == 2
    assert (
        "slurm.train.chain = 2 lets jobs follow each other, so no stage can wait for train" in refused.stderr
    )


def next_job(run: Path, job: str) -> str:
    """The job that a job of a chain has queued."""
    events = [event for each in read_attempts(run.parent / "run") for event in each.events]
    return str(next(event["next_job"] for event in events if (event["event"], event["job"]) == ("next", job)))
