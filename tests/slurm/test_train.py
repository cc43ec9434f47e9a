"""Training on two real Slurm nodes, through the rendered script: the curve, a new layout, a warning, a crash."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.slurm.cluster import SlurmCluster
from tests.slurm.conftest import TP2_PP2, TWO_NODES, TWO_RANKS, curve, hpcgen, log_of, make_run, render

JOB_S = 240


def run_job(cluster: SlurmCluster, run: Path, *overrides: str) -> str:
    """Pipes the rendered script into sbatch and waits for the job's success; its log."""
    job_id = cluster.sbatch(render(run, *overrides), cwd=run.parent)
    state = cluster.wait(job_id, timeout_s=JOB_S)
    log = log_of(run, job_id)
    assert state == "COMPLETED", log
    return log


def wait_for_steps(run: Path, count: int, timeout_s: float = 120) -> None:
    """Waits until the metrics hold `count` steps."""
    metrics, end = run.parent / "run" / "metrics.jsonl", time.monotonic() + timeout_s
    while time.monotonic() < end:
        if metrics.exists() and metrics.read_text().count('"event": "step"') >= count:
            return
        time.sleep(0.1)
    raise TimeoutError(f"{metrics} has no {count} steps after {timeout_s} s")


def test_the_piped_script_trains_on_both_nodes_and_computes_what_one_process_does(
    slurm_cluster: SlurmCluster, tiny_run: Path, single_process_curve: dict[int, tuple[float, float]]
) -> None:
    log = run_job(slurm_cluster, tiny_run, *TWO_NODES, *TP2_PP2)
    assert "on ndv5-[1-2]" in log
    assert "TP 2 x PP 2" in log
    found = curve(tiny_run)
    assert found.keys() == single_process_curve.keys()
    for iteration, expected in single_process_curve.items():
        assert found[iteration] == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_a_checkpoint_of_one_layout_goes_on_at_another_on_the_same_curve(
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


LONG = ("training.train_iters=40", "optimizer.lr_decay_iters=40", "checkpoint.save_interval=1000")


def test_a_warned_job_requeues_itself_and_ends_on_the_identical_curve(
    slurm_cluster: SlurmCluster, tiny_run: Path, tmp_path_factory: pytest.TempPathFactory, byte_corpus: Path
) -> None:
    """The signal that Slurm sends before the time limit, sent by hand; test_cluster.py waits for Slurm's."""
    job_id = slurm_cluster.sbatch(render(tiny_run, *LONG), cwd=tiny_run.parent)
    wait_for_steps(tiny_run, 3)
    slurm_cluster.run("scancel", "--batch", "--signal=USR2", job_id)
    ends_on_the_undisturbed_curve(slurm_cluster, tiny_run, job_id, LONG, tmp_path_factory, byte_corpus)


@pytest.mark.slow
def test_a_job_that_slurm_warns_requeues_itself_and_ends_on_the_identical_curve(
    slurm_cluster: SlurmCluster, tiny_run: Path, tmp_path_factory: pytest.TempPathFactory, byte_corpus: Path
) -> None:
    """The real pre-timeout signal. Slurm looks at limits every 30 s, so that it comes about 27 s after the start."""
    longer = ("training.train_iters=120", "optimizer.lr_decay_iters=120", "checkpoint.save_interval=1000")
    sets = (*longer, "training.global_batch_size=64")
    warned = ('slurm.train.time="2:00"', "slurm.train.signal_lead_s=100")
    job_id = slurm_cluster.sbatch(render(tiny_run, *sets, *warned), cwd=tiny_run.parent)
    ends_on_the_undisturbed_curve(slurm_cluster, tiny_run, job_id, sets, tmp_path_factory, byte_corpus)


def ends_on_the_undisturbed_curve(
    cluster: SlurmCluster,
    run: Path,
    job_id: str,
    sets: tuple[str, ...],
    tmp_path_factory: pytest.TempPathFactory,
    corpus: Path,
) -> None:
    assert cluster.wait(job_id, timeout_s=JOB_S) == "COMPLETED", log_of(run, job_id)
    log = log_of(run, job_id)
    assert "warned: the time limit is near" in log
    assert "back into the queue (restart 1 of at most 100)" in log
    assert int(cluster.show(job_id)["Restarts"]) >= 1
    undisturbed = make_run(tmp_path_factory.mktemp("undisturbed"), corpus)
    options = [f"--set={each}" for each in sets]
    hpcgen("submit", "train", "-c", str(undisturbed), "--launcher=local", *options, cwd=undisturbed.parent)
    assert curve(run) == curve(undisturbed)


def test_a_done_run_is_not_trained_again(slurm_cluster: SlurmCluster, tiny_run: Path) -> None:
    (tiny_run.parent / "run" / "DONE").write_text("8\n")
    log = run_job(slurm_cluster, tiny_run)
    assert "done already" in log
    assert "iteration 1/8" not in log


def test_a_trainer_that_cannot_be_imported_ends_the_job_with_one_clear_line(
    slurm_cluster: SlurmCluster, tiny_run: Path
) -> None:
    cluster = tiny_run.parent / "cluster.yaml"
    cluster.write_text("extends: local\npython: /usr/bin/python3\nstartup_time_s: 1\n")
    job_id = slurm_cluster.sbatch(render(tiny_run), cwd=tiny_run.parent)
    assert slurm_cluster.wait(job_id, timeout_s=JOB_S) == "FAILED"
    last = log_of(tiny_run, job_id).splitlines()[-1]
    assert "/usr/bin/python3 cannot run the trainer (above)" in last
    assert "hpcgen install-code" in last


def test_three_lives_without_progress_end_the_job(slurm_cluster: SlurmCluster, tiny_run: Path) -> None:
    """A Python that imports the trainer and dies when it is to train, as a bug in the start-up would."""
    python = tiny_run.parent / "python"
    profile = tiny_run.parent / "cluster.yaml"
    real = profile.read_text().splitlines()[1].removeprefix("python: ")
    python.write_text(f'#!/bin/bash\n[[ "$*" == *--versions* ]] && exec {real} "$@"\necho broken\nexit 7\n')
    python.chmod(0o755)
    profile.write_text(f"extends: local\npython: {python}\nstartup_time_s: 1\n")
    job_id = slurm_cluster.sbatch(render(tiny_run), cwd=tiny_run.parent)
    assert slurm_cluster.wait(job_id, timeout_s=JOB_S) == "FAILED"
    log = log_of(tiny_run, job_id)
    assert log.count("broken") == 3
    assert "failed with status 7: three lives without progress beyond iteration 0; not requeued" in log


def test_a_loss_that_is_not_a_number_ends_the_job_in_its_first_life(
    slurm_cluster: SlurmCluster, tiny_run: Path
) -> None:
    """Four ranks: the first that leaves has srun end the others, so the exit status tells nothing."""
    diverging = (
        "optimizer.lr=1e30",
        "optimizer.min_lr=1e30",
        "optimizer.lr_warmup_iters=0",
        "checkpoint.save_interval=1",
    )
    job_id = slurm_cluster.sbatch(render(tiny_run, *TWO_NODES, *TP2_PP2, *diverging), cwd=tiny_run.parent)
    assert slurm_cluster.wait(job_id, timeout_s=JOB_S) == "FAILED"
    log = log_of(tiny_run, job_id)
    assert "ERROR: not requeued, since it would fail again: the " in log
    assert "is nan at iteration" in log
    assert "back into the queue" not in log


def test_a_second_job_in_the_same_run_directory_ends_at_once(
    slurm_cluster: SlurmCluster, tiny_run: Path
) -> None:
    script = render(tiny_run, "training.train_iters=100000", "optimizer.lr_decay_iters=100000")
    first = slurm_cluster.sbatch(script, cwd=tiny_run.parent)
    wait_for_steps(tiny_run, 1)
    second = slurm_cluster.sbatch(script, cwd=tiny_run.parent)
    assert slurm_cluster.wait(second, timeout_s=JOB_S) == "FAILED"
    assert f"job {first} is training in" in log_of(tiny_run, second)
    slurm_cluster.run("scancel", first)
    slurm_cluster.wait(first, timeout_s=60)


def test_directories_that_the_job_writes_to_are_made_before_a_container_would_mount_them(
    slurm_cluster: SlurmCluster, tiny_run: Path
) -> None:
    elsewhere = tiny_run.parent / "elsewhere" / "checkpoints"
    run_job(
        slurm_cluster,
        tiny_run,
        f"checkpoint.save={elsewhere}",
        "training.train_iters=1",
        "optimizer.lr_decay_iters=3",
    )
    assert (elsewhere / "latest_checkpointed_iteration.txt").read_text() == "1"
    again = render(tiny_run, f"checkpoint.save={elsewhere}", "optimizer.lr_decay_iters=3")
    assert f"make_striped {elsewhere}\n" in again


def test_cancelling_saves_and_leaves_the_decision_to_slurm(
    slurm_cluster: SlurmCluster, tiny_run: Path
) -> None:
    """Both ranks get SIGTERM, on two nodes: each learns that the other one has it too."""
    endless = ("training.train_iters=100000", "optimizer.lr_decay_iters=100000")
    job_id = slurm_cluster.sbatch(render(tiny_run, *TWO_RANKS, *endless), cwd=tiny_run.parent)
    wait_for_steps(tiny_run, 3)
    slurm_cluster.run("scancel", job_id)
    assert slurm_cluster.wait(job_id, timeout_s=60) == "CANCELLED"
    log = log_of(tiny_run, job_id)
    assert "asked to stop (SIGTERM)" in log
    assert "requeueing is Slurm's decision" in log
    assert (tiny_run.parent / "run" / "STOPPED").exists()


def test_what_the_submitting_shell_leaks_is_unset_and_secrets_go_by_name(
    slurm_cluster: SlurmCluster, tiny_run: Path
) -> None:
    leaky = {"NCCL_IB_HCA": "mlx5_0:1", "PYTHONPATH": "/nowhere", "HF_TOKEN": "hf_planted_secret"}
    script = render(tiny_run, "secrets=[HF_TOKEN]", "training.train_iters=1", "optimizer.lr_decay_iters=3")
    job = slurm_cluster.run(
        "env",
        *(f"{name}={value}" for name, value in leaky.items()),
        "sbatch",
        "--parsable",
        input=script,
        cwd=tiny_run.parent,
    )
    job_id = job.stdout.strip()
    assert slurm_cluster.wait(job_id, timeout_s=JOB_S) == "COMPLETED", log_of(tiny_run, job_id)
    log = log_of(tiny_run, job_id)
    assert "unset what the submitting shell leaked: NCCL_IB_HCA PYTHONPATH" in log
    written = [path for path in tiny_run.parent.rglob("*") if path.is_file()]
    assert not [path for path in written if b"hf_planted_secret" in path.read_bytes()]


def test_a_missing_secret_ends_the_job_before_it_trains(slurm_cluster: SlurmCluster, tiny_run: Path) -> None:
    job_id = slurm_cluster.sbatch(render(tiny_run, "secrets=[WANDB_API_KEY]"), cwd=tiny_run.parent)
    assert slurm_cluster.wait(job_id, timeout_s=JOB_S) == "FAILED"
    assert "WANDB_API_KEY is not set: export it where you submit" in log_of(tiny_run, job_id)


@pytest.mark.parametrize(
    ("share", "file_mode", "directory_mode"), [("private", 0o600, 0o700), ("group", 0o660, 0o770)]
)
def test_what_the_run_writes_is_as_open_as_share_says(
    slurm_cluster: SlurmCluster, tiny_run: Path, share: str, file_mode: int, directory_mode: int
) -> None:
    run_job(slurm_cluster, tiny_run, f"share={share}", "training.train_iters=1", "optimizer.lr_decay_iters=3")
    run_dir = tiny_run.parent / "run"
    for path in (run_dir, *run_dir.rglob("*")):
        mode = path.stat().st_mode & 0o777
        assert mode == (directory_mode if path.is_dir() else file_mode), path
    if share == "group":
        assert run_dir.stat().st_mode & 0o2000


def test_the_script_needs_no_other_file(slurm_cluster: SlurmCluster, tiny_run: Path) -> None:
    script = render(tiny_run, "training.train_iters=1", "optimizer.lr_decay_iters=3")
    tiny_run.unlink()
    (tiny_run.parent / "cluster.yaml").unlink()
    job_id = slurm_cluster.sbatch(script, cwd=Path("/"))
    assert slurm_cluster.wait(job_id, timeout_s=JOB_S) == "COMPLETED", log_of(tiny_run, job_id)
    [written] = (tiny_run.parent / "run" / "jobs" / job_id).glob("trainer.json")
    assert json.loads(written.read_text())["training"]["train_iters"] == 1
