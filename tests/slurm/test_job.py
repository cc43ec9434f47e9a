"""Training jobs with errors: their behavior and the files they leave."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpcgen.runs.attempts import read_attempts
from tests.patience import wait_until
from tests.slurm.cluster import SlurmCluster
from tests.slurm.conftest import (
    TWO_RANKS,
    curve,
    log_of,
    make_run,
    profile_text,
    program_first,
    ranks_of,
    render,
    run_job,
    wait_for_steps,
)


def test_a_trainer_that_cannot_be_imported_ends_the_job_with_one_clear_line(
    slurm_cluster: SlurmCluster, tiny_run: Path
) -> None:
    cluster = tiny_run.parent / "cluster.yaml"
    cluster.write_text(profile_text("/usr/bin/python3"))
    job_id = slurm_cluster.sbatch(render(tiny_run), cwd=tiny_run.parent)
    assert slurm_cluster.wait(job_id) == "FAILED"
    last = log_of(tiny_run, job_id).splitlines()[-1]
    assert "/usr/bin/python3 cannot run the trainer (above)" in last
    assert "hpcgen install-code" in last


@pytest.mark.slow
def test_three_attempts_without_progress_end_the_job(slurm_cluster: SlurmCluster, tiny_run: Path) -> None:
    end_training_with(7, tiny_run)
    job_id = slurm_cluster.sbatch(render(tiny_run), cwd=tiny_run.parent)
    assert slurm_cluster.wait(job_id) == "FAILED"
    log = log_of(tiny_run, job_id)
    assert log.count("broken") == 3
    last = log.splitlines()[-1]
    assert "failed with status 7: three attempts without progress beyond iteration 0; not requeued" in last


def test_a_refusal_is_final_where_the_trainer_cannot_write_the_reason(
    slurm_cluster: SlurmCluster, tiny_run: Path, stand_in: str
) -> None:
    end_training_with(2, tiny_run, versions=f'{stand_in} "$@"')
    job_id = slurm_cluster.sbatch(render(tiny_run), cwd=tiny_run.parent)
    assert slurm_cluster.wait(job_id) == "FAILED"
    log = log_of(tiny_run, job_id)
    assert log.count("broken") == 1
    assert "not requeued, since it would fail again (status 2, reason above)" in log


def end_training_with(status: int, run: Path, versions: str = 'echo "trainer 0"') -> None:
    """A Python that passes the import check and dies when it is to train, as with a bug in the start-up.

    The check runs `versions`, since the imports of the real trainer would take most of the job's CPU time.
    """
    python = run.parent / "python"
    python.write_text(
        f'#!/bin/bash\n[[ "$*" == *--versions* ]] && {{ {versions}; exit; }}\necho broken\nexit {status}\n'
    )
    python.chmod(0o755)
    (run.parent / "cluster.yaml").write_text(profile_text(python))


def test_a_loss_that_is_not_a_number_ends_the_job_in_its_first_attempt(
    slurm_cluster: SlurmCluster, tiny_run: Path
) -> None:
    """The first of two ranks that leaves has srun end the other, so the exit status tells nothing."""
    diverging = "model.init_method_std=1e30"
    job_id = slurm_cluster.sbatch(render(tiny_run, *TWO_RANKS, diverging), cwd=tiny_run.parent)
    assert slurm_cluster.wait(job_id) == "FAILED"
    log = log_of(tiny_run, job_id)
    assert "ERROR: not requeued, since it would fail again: the " in log
    assert "is nan at iteration" in log
    assert "back into the queue" not in log


@pytest.mark.slow
def test_a_second_job_in_the_same_run_directory_ends_at_once(
    slurm_cluster: SlurmCluster, tiny_run: Path
) -> None:
    script = render(tiny_run, "training.train_iters=100000", "optimizer.lr_decay_iters=100000")
    first = slurm_cluster.sbatch(script, cwd=tiny_run.parent)
    wait_for_steps(tiny_run, 1)
    second = slurm_cluster.sbatch(script, cwd=tiny_run.parent)
    assert slurm_cluster.wait(second) == "FAILED"
    assert f"job {first} is running in" in log_of(tiny_run, second)
    slurm_cluster.run("scancel", first)
    slurm_cluster.wait(first)


@pytest.mark.parametrize(
    ("failures", "last"),
    [
        (2, "NOT_EXPORTED is not set: export it where you submit"),
        (99, "squeue cannot tell whether job 424242 is still running in"),
    ],
)
def test_a_failing_squeue_is_retried_and_never_counts_as_no_other_job(
    slurm_cluster: SlurmCluster, tiny_run: Path, failures: int, last: str
) -> None:
    """RUNNING names a job that Slurm does not know, as after a restart of the controller."""
    programs, asked = tiny_run.parent / "programs", tiny_run.parent / "asked"
    (tiny_run.parent / "run" / "RUNNING").write_text("424242\n")
    squeue = shutil.which("squeue", path=slurm_cluster.env["PATH"])
    fails = f"""\
#!/bin/bash
echo >>{asked}
if (($(wc -l <{asked}) <= {failures})); then
    echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2
    exit 1
fi
exec {squeue} "$@"
"""
    program_first(slurm_cluster, programs, "sleep", "#!/bin/bash\n")
    option = program_first(slurm_cluster, programs, "squeue", fails)
    job_id = slurm_cluster.sbatch(render(tiny_run, "secrets=[NOT_EXPORTED]"), option, cwd=tiny_run.parent)
    assert slurm_cluster.wait(job_id) == "FAILED"
    log = log_of(tiny_run, job_id)
    assert last in log.splitlines()[-1]
    assert log.count("asking again in 30 s") == min(failures, 10)


def test_cancelling_saves_and_leaves_the_decision_to_slurm(
    slurm_cluster: SlurmCluster, tiny_run: Path
) -> None:
    """Both ranks get SIGTERM, on two nodes: each learns that the other one has it too."""
    scratch = tiny_run.parent / "scratch"
    scratch.mkdir()
    with (tiny_run.parent / "cluster.yaml").open("a") as profile:
        profile.write(f"scratch: {scratch}\n")
    endless = ("training.train_iters=100000", "optimizer.lr_decay_iters=100000")
    job_id = slurm_cluster.sbatch(render(tiny_run, *TWO_RANKS, *endless), cwd=tiny_run.parent)
    wait_for_steps(tiny_run, 3)
    assert list(scratch.iterdir()) != []
    slurm_cluster.run("scancel", job_id)
    assert slurm_cluster.wait(job_id) == "CANCELLED"
    log = log_of(tiny_run, job_id)
    assert re.search(
        r"asked to stop \((SIGTERM|by a signal to another rank)\)", log
    )  # rank 0 may get its signal later
    assert "ended by Slurm (canceled); the newest checkpoint" in log
    [attempt] = read_attempts(tiny_run.parent / "run")
    assert (attempt.verdict, attempt.cause) == ("terminated", "canceled")
    assert (tiny_run.parent / "run" / "STOPPED").exists()
    assert list(scratch.iterdir()) == []


def test_a_killed_rank_costs_neither_the_queue_nor_more_than_a_save_interval(
    slurm_cluster: SlurmCluster, tiny_run: Path, single_process_curve: dict[int, tuple[float, float]]
) -> None:
    longer = ("training.train_iters=60", "checkpoint.save_interval=3")
    job_id = slurm_cluster.sbatch(render(tiny_run, *TWO_RANKS, *longer), cwd=tiny_run.parent)
    wait_for_steps(tiny_run, 5)
    os.kill(ranks_of(slurm_cluster, job_id)[1], signal.SIGKILL)
    state = slurm_cluster.wait(job_id)
    log = log_of(tiny_run, job_id)
    assert state == "COMPLETED", log
    assert "starting it again in this job (restart 1 of at most 100)" in log
    assert slurm_cluster.show(job_id)["Restarts"] == "0"
    [attempt] = read_attempts(tiny_run.parent / "run")
    launches = [each["time"] for each in attempt.events if each["event"] == "launch"]
    metrics = (tiny_run.parent / "run" / "metrics.jsonl").read_text().splitlines()
    killed, again = [each for each in map(json.loads, metrics) if each["event"] == "start"]
    assert killed["time"] < launches[1] < again["time"]
    assert again["iteration"] >= 3
    steps = curve(tiny_run)
    assert len(steps) == 60
    for iteration, expected in single_process_curve.items():
        assert steps[iteration] == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
def test_a_preempted_job_saves_in_its_grace_time_and_says_so(tiny_run: Path) -> None:
    """Slurm sends SIGTERM to the tasks at once, and to the batch shell at the end of the grace time."""
    endless = ("training.train_iters=100000", "optimizer.lr_decay_iters=100000")
    run_dir = tiny_run.parent / "run"
    settings = (
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        "PartitionName=low Nodes=ALL PriorityTier=1 GraceTime=60",
        "PartitionName=high Nodes=ALL PriorityTier=2",
    )
    with SlurmCluster(settings=settings) as cluster:
        script = render(tiny_run, *TWO_RANKS, *endless, "slurm.train.partition=low")
        job_id = cluster.sbatch(script, cwd=tiny_run.parent)
        wait_for_steps(tiny_run, 3)
        urgent = "#!/bin/bash\n#SBATCH --nodes=2 --exclusive --partition=high --output=/dev/null\ntrue\n"
        assert cluster.wait(cluster.sbatch(urgent, cwd=tiny_run.parent)) == "COMPLETED"
        wait_until(lambda: cluster.state(job_id) == "RUNNING" and len(read_attempts(run_dir)) == 2)
        cluster.run("scancel", job_id)
        cluster.wait(job_id)
    first, _ = read_attempts(run_dir)
    assert (first.verdict, first.cause, first.planned) == ("requeued", "preempted", True)
    stopped = re.search(r"^stopped at iteration (\d+) of 100000, because it was preempted", first.reason)
    assert stopped is not None
    assert f"from iteration {stopped[1]} of 100000" in log_of(tiny_run, job_id)


def test_a_missing_secret_ends_the_job_before_it_trains(slurm_cluster: SlurmCluster, tiny_run: Path) -> None:
    job_id = slurm_cluster.sbatch(render(tiny_run, "secrets=[WANDB_API_KEY]"), cwd=tiny_run.parent)
    assert slurm_cluster.wait(job_id) == "FAILED"
    assert "WANDB_API_KEY is not set: export it where you submit" in log_of(tiny_run, job_id)


ONE_STEP = ("training.train_iters=1", "optimizer.lr_decay_iters=3")


@dataclass(frozen=True)
class Finished:
    """A job that has trained a single step of a shared run, which saves its checkpoints elsewhere."""

    run: Path
    job_id: str
    log: str

    @property
    def checkpoints(self) -> Path:
        return self.run.parent / "elsewhere" / "checkpoints"


@pytest.fixture(scope="module")
def one_step(
    slurm_cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory, byte_corpus: Path, stand_in: str
) -> Finished:
    """Submitted from another directory and from a shell with variables. The job cannot read its run file."""
    directory = tmp_path_factory.mktemp("one-step")
    run = make_run(directory, byte_corpus, stand_in)
    save = f"checkpoint.save={directory}/elsewhere/checkpoints"
    script = render(run, *ONE_STEP, save, "share=group", "secrets=[HF_TOKEN]")
    leaky = {"NCCL_IB_HCA": "mlx5_0:1", "PYTHONPATH": "/nowhere", "PYXIS_CONTAINER_NAME": "other"}
    leaky["HF_TOKEN"] = "hf_planted_secret"
    hidden = [(path, path.with_suffix(".hidden")) for path in (run, directory / "cluster.yaml")]
    for path, other in hidden:
        path.rename(other)
    job = slurm_cluster.run(
        "env",
        "--unset=OMP_NUM_THREADS",  # set for all tests
        *(f"{name}={value}" for name, value in leaky.items()),
        "sbatch",
        "--parsable",
        input=script,
        cwd=Path("/"),
    )
    job_id = job.stdout.strip()
    assert slurm_cluster.wait(job_id) == "COMPLETED", log_of(run, job_id)
    for path, other in hidden:
        other.rename(path)
    return Finished(run, job_id, log_of(run, job_id))


def test_the_script_needs_no_other_file(one_step: Finished) -> None:
    [written] = (one_step.run.parent / "run" / "jobs" / one_step.job_id).glob("trainer.json")
    assert json.loads(written.read_text())["training"]["train_iters"] == 1


def test_directories_that_the_job_writes_to_are_made_before_a_container_would_mount_them(
    one_step: Finished,
) -> None:
    assert (one_step.checkpoints / "latest_checkpointed_iteration.txt").read_text() == "1"
    again = render(one_step.run, f"checkpoint.save={one_step.checkpoints}", "optimizer.lr_decay_iters=3")
    assert re.search(rf"striped_directories=\(\s*{one_step.checkpoints}\s*\)\n", again)


def test_variables_leaked_by_the_submitting_shell_are_unset_and_secrets_are_inherited(
    one_step: Finished,
) -> None:
    unset = one_step.log.partition("unset these variables of the submitting shell: ")[2].splitlines()[0]
    assert {"NCCL_IB_HCA", "PYTHONPATH", "PYXIS_CONTAINER_NAME"} <= set(unset.split())
    assert "HF_TOKEN" not in unset
    written = [path for path in one_step.run.parent.rglob("*") if path.is_file()]
    assert not [path for path in written if b"hf_planted_secret" in path.read_bytes()]


def test_files_of_a_shared_run_belong_to_the_group(one_step: Finished) -> None:
    require_modes(one_step.run.parent / "run", 0o660, 0o770)
    assert (one_step.run.parent / "run").stat().st_mode & 0o2000


@pytest.mark.slow
def test_files_of_a_private_run_belong_to_their_owner(slurm_cluster: SlurmCluster, tiny_run: Path) -> None:
    run_job(slurm_cluster, tiny_run, "share=private", *ONE_STEP)
    require_modes(tiny_run.parent / "run", 0o600, 0o700)


def require_modes(run_dir: Path, file_mode: int, directory_mode: int) -> None:
    for path in (run_dir, *run_dir.rglob("*")):
        mode = path.stat().st_mode & 0o777
        if run_dir / "jobs" in path.parents or path.name == "RUNNING":  # the job's own
            assert not mode & 0o022, path
        else:
            assert mode == (directory_mode if path.is_dir() else file_mode), path
