"""Training on two real Slurm nodes, through the rendered script: the curve, a new layout, a warning."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from hpcgen.ledger.read import read_ledger
from tests.slurm.cluster import SlurmCluster
from tests.slurm.conftest import (
    TP2_PP2,
    TWO_NODES,
    curve,
    hpcgen,
    log_of,
    make_run,
    python_by_rank,
    render,
    run_job,
    slow_requeue,
    wait_for_steps,
)


def test_the_piped_script_trains_on_both_nodes_and_computes_what_one_process_does(
    slurm_cluster: SlurmCluster,
    tmp_path: Path,
    byte_corpus: Path,
    stand_in: str,
    single_process_curve: dict[int, tuple[float, float]],
) -> None:
    """Another program has the port that the job's number gives. Rank 0 is no fork."""
    run = make_run(tmp_path, byte_corpus, python_by_rank(tmp_path, 0, stand_in))
    script = render(run, *TWO_NODES, *TP2_PP2)
    job_id = slurm_cluster.sbatch(script, "--hold", cwd=tmp_path)
    port = 10_000 + int(job_id) * 8 % 20_000
    with socket.create_server(("127.0.0.1", port)):
        slurm_cluster.run("scontrol", "release", job_id)
        state = slurm_cluster.wait(job_id)
    log = log_of(run, job_id)
    assert state == "COMPLETED", log
    assert f"rank 0: port {port} is in use; the ranks meet at port" in log
    assert "on ndv5-[1-2]" in log
    assert "TP 2 x PP 2" in log
    spent = read_ledger(run.parent / "run", time.time()).spent
    large = {part for part, seconds in spent.parts.items() if seconds > 0.005 * spent.wall_s}
    assert large >= {"productive", "start_up", "infrastructure"}
    assert spent.parts["unaccounted"] < 0.01 * spent.wall_s
    found = curve(run)
    assert found.keys() == single_process_curve.keys()
    for iteration, expected in single_process_curve.items():
        assert found[iteration] == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.slow
def test_a_checkpoint_resumes_at_another_layout_on_the_same_curve(
    slurm_cluster: SlurmCluster, tiny_run: Path, single_process_curve: dict[int, tuple[float, float]]
) -> None:
    one_node = ("slurm.train.ntasks_per_node=2",)
    run_job(slurm_cluster, tiny_run, *one_node, TP2_PP2[0], "training.train_iters=4")
    log = run_job(slurm_cluster, tiny_run, *one_node, TP2_PP2[1])
    assert "iter_0000004" in log
    assert "TP 1 x PP 2" in log
    found = curve(tiny_run)
    assert len(found) == 8
    for iteration, expected in single_process_curve.items():
        assert found[iteration] == pytest.approx(expected, rel=1e-4, abs=1e-4)


LONG = ("training.train_iters=80", "optimizer.lr_decay_iters=80", "checkpoint.save_interval=1000")


@pytest.mark.slow
def test_a_warned_job_requeues_itself_and_ends_on_the_identical_curve(
    slurm_cluster: SlurmCluster,
    tiny_run: Path,
    tmp_path: Path,
    byte_corpus: Path,
    stand_in: str,
) -> None:
    """The signal that Slurm sends before the time limit, sent by hand; test_cluster.py waits for Slurm's."""
    slow = slow_requeue(slurm_cluster, tiny_run.parent)
    job_id = slurm_cluster.sbatch(render(tiny_run, *LONG), slow, cwd=tiny_run.parent)
    wait_for_steps(tiny_run, 3)
    slurm_cluster.run("scancel", "--batch", "--signal=USR2", job_id)
    (tmp_path / "undisturbed").mkdir()
    undisturbed = make_run(tmp_path / "undisturbed", byte_corpus, stand_in)
    ends_on_the_undisturbed_curve(slurm_cluster, tiny_run, job_id, LONG, undisturbed)


@pytest.mark.slow
def test_a_job_that_slurm_warns_requeues_itself_and_ends_on_the_identical_curve(
    slurm_cluster: SlurmCluster,
    tiny_run: Path,
    tmp_path: Path,
    byte_corpus: Path,
    stand_in: str,
) -> None:
    """The real pre-timeout signal. Slurm looks at limits every 30 s, so that it comes about 27 s after the start."""
    longer = ("training.train_iters=120", "optimizer.lr_decay_iters=120", "checkpoint.save_interval=1000")
    sets = (*longer, "training.micro_batch_size=1", "training.global_batch_size=64")
    warned = ('slurm.train.time="2:00"', "slurm.train.signal_lead_s=100")
    job_id = slurm_cluster.sbatch(render(tiny_run, *sets, *warned), cwd=tiny_run.parent)
    (tmp_path / "undisturbed").mkdir()
    undisturbed = make_run(tmp_path / "undisturbed", byte_corpus, stand_in)
    ends_on_the_undisturbed_curve(slurm_cluster, tiny_run, job_id, sets, undisturbed)


def ends_on_the_undisturbed_curve(
    cluster: SlurmCluster,
    run: Path,
    job_id: str,
    sets: tuple[str, ...],
    undisturbed: Path,
) -> None:
    assert cluster.wait(job_id) == "COMPLETED", log_of(run, job_id)
    log = log_of(run, job_id)
    assert "USR2: the time limit is near" in log
    assert "back into the queue (restart 1 of at most 100)" in log
    assert "ERROR" not in log
    assert int(cluster.show(job_id)["Restarts"]) >= 1
    options = [f"--set={each}" for each in sets]
    hpcgen("submit", "train", "-c", str(undisturbed), "--launcher=local", *options, cwd=undisturbed.parent)
    assert curve(run) == curve(undisturbed)


def test_a_done_run_is_not_trained_again(slurm_cluster: SlurmCluster, single_process_run: Path) -> None:
    log = run_job(slurm_cluster, single_process_run)
    assert "done already" in log
    assert "iteration 1/8" not in log


def test_a_run_that_stopped_early_is_not_trained_again(slurm_cluster: SlurmCluster, tiny_run: Path) -> None:
    """Nothing is better than the first evaluation by so much. The next job of a chain would find the same."""
    watch = "{patience: 1, min_delta: 1000}"
    sets = ("training.eval_interval=2", "training.eval_iters=1", f"training.early_stopping={watch}")
    job_id = slurm_cluster.sbatch(render(tiny_run, *sets), cwd=tiny_run.parent)
    assert slurm_cluster.wait(job_id) == "COMPLETED", log_of(tiny_run, job_id)
    assert "done: 4 iterations (stopped early)" in log_of(tiny_run, job_id)
    again = slurm_cluster.sbatch(render(tiny_run, *sets), cwd=tiny_run.parent)
    assert slurm_cluster.wait(again) == "COMPLETED"
    assert "done already" in log_of(tiny_run, again)
    assert "iteration 5/" not in log_of(tiny_run, again)


def test_a_done_run_does_not_count_for_another_configuration(
    slurm_cluster: SlurmCluster, single_process_run: Path, tmp_path: Path
) -> None:
    """The script was rendered before the run in its directory was finished."""
    directory = single_process_run.parent
    script = render(single_process_run, "optimizer.lr=2e-3", f"paths.run_dir={tmp_path}/new")
    job_id = slurm_cluster.sbatch(script.replace(f"{tmp_path}/new", f"{directory}/run"), cwd=directory)
    assert slurm_cluster.wait(job_id) == "FAILED"
    log = log_of(single_process_run, job_id)
    assert "this configuration differs from it: optimizer.lr: 0.001 -> 0.002" in log
    assert "not requeued, since it would fail again" in log
    assert "hpcgen: done" not in log
