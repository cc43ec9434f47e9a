"""The same stages through submitit: on Slurm like the rendered script, and on this machine without Slurm."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from submitit.slurm.slurm import _make_sbatch_string

import hpcgen as interface
from hpcgen.launchers.slurm import submitit_parameters, task_python
from hpcgen.rendering.script import render_stage
from tests.slurm.cluster import SlurmCluster
from tests.slurm.conftest import TP2_PP2, TWO_NODES, curve, hpcgen, log_of
from tests.slurm.test_train import JOB_S, wait_for_steps


@pytest.fixture
def on_cluster(slurm_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> SlurmCluster:
    """This process talks to the private cluster, as a login shell would."""
    for name, value in slurm_cluster.env.items():
        monkeypatch.setenv(name, value)
    return slurm_cluster


def test_submitting_from_python_trains_on_both_nodes_on_the_same_curve(
    on_cluster: SlurmCluster, tiny_run: Path, single_process_curve: dict[int, tuple[float, float]]
) -> None:
    plan = interface.plan(interface.load_run(tiny_run, [*TWO_NODES, *TP2_PP2]))
    [job] = interface.submit(plan)
    assert on_cluster.wait(job.job_id, timeout_s=JOB_S) == "COMPLETED", log_of(tiny_run, job.job_id)
    assert job.submitit_job.results() == [None] * 4
    found = curve(tiny_run)
    assert found.keys() == single_process_curve.keys()
    for iteration, expected in single_process_curve.items():
        assert found[iteration] == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_a_warned_job_of_submitit_requeues_itself_and_goes_on(
    on_cluster: SlurmCluster, tiny_run: Path
) -> None:
    run = interface.load_run(tiny_run, ["training.train_iters=60", "optimizer.lr_decay_iters=60"])
    [job] = interface.submit(interface.plan(run))
    wait_for_steps(tiny_run, 3)
    on_cluster.run("scancel", "--batch", "--signal=USR2", job.job_id)
    assert on_cluster.wait(job.job_id, timeout_s=JOB_S) == "COMPLETED", log_of(tiny_run, job.job_id)
    assert "back into the queue (restart 1 of at most 100)" in log_of(tiny_run, job.job_id)
    assert len(curve(tiny_run)) == 60


def test_a_mistake_found_by_the_trainer_is_not_tried_again_through_submitit(
    on_cluster: SlurmCluster, tiny_run: Path
) -> None:
    """Two ranks on two nodes, so that srun reports another status than the trainer's."""
    torn = tiny_run.parent / "old"
    torn.mkdir()
    (torn / "latest_checkpointed_iteration.txt").write_text("torn")
    run = interface.load_run(tiny_run, [f"checkpoint.load={torn}", "slurm.train.nodes=2"])
    [job] = interface.submit(interface.plan(run))
    assert on_cluster.wait(job.job_id, timeout_s=JOB_S) == "FAILED"
    log = job.log.read_text()
    assert (
        f"not requeued, since it would fail again: {torn}/latest_checkpointed_iteration.txt holds 'torn'"
        in log
    )
    assert f"the tasks' own logs: {tiny_run.parent}/run/submitit/{job.job_id}_*_log.out" in log
    assert "back into the queue" not in log


def test_the_training_stage_waits_for_the_tokenizing_stage(on_cluster: SlurmCluster, tiny_run: Path) -> None:
    hpcgen("data", "sample", "corpus.jsonl.zst", "--max-mb=0.3", cwd=tiny_run.parent)
    tokens = "data.tokenize={input: [corpus.jsonl.zst], output_prefix: tokens/corpus}"
    sets = (
        "--set",
        tokens,
        "--set",
        "data.datasets=[]",
        "--set",
        "training.train_iters=2",
        "--set",
        "optimizer.lr_decay_iters=3",
    )
    lines = hpcgen(
        "submit", "tokenize", "train", "-c", str(tiny_run), *sets, cwd=tiny_run.parent
    ).splitlines()
    job_ids = [line.split()[0] for line in lines]
    assert [line.split()[1] for line in lines] == ["tokenize", "train"]
    for job_id in job_ids:
        assert on_cluster.wait(job_id, timeout_s=JOB_S) == "COMPLETED", log_of(tiny_run, job_id)
    assert len(curve(tiny_run)) == 2


def test_pickles_are_nobody_elses_to_read_or_write(on_cluster: SlurmCluster, tiny_run: Path) -> None:
    run = interface.load_run(tiny_run, ["training.train_iters=1", "optimizer.lr_decay_iters=3"])
    [job] = interface.submit(interface.plan(run))
    assert on_cluster.wait(job.job_id, timeout_s=JOB_S) == "COMPLETED", log_of(tiny_run, job.job_id)
    folder = tiny_run.parent / "run" / "submitit"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o077 for path in folder.iterdir()} == {0}


AZURE = """\
name: big
cluster: azure-ndv5
preset: 175b
paths: {run_dir: /lustre/runs/big}
secrets: [WANDB_API_KEY]
slurm: {train: {nodes: 16, time: 2-00:00:00, account: team, extra_directives: [--mail-type=FAIL]}}
data: {datasets: [{prefix: /lustre/data/corpus}]}
training: {train_iters: 100000}
"""


def test_submitit_and_the_rendered_script_ask_slurm_for_the_same(tmp_path: Path) -> None:
    """Resources, environment, container flags and signals, for pyxis on 16 nodes."""
    run = tmp_path / "big.yaml"
    run.write_text(AZURE)
    plan = interface.plan(interface.load_run(run))
    stage, script = plan.stages["train"], render_stage(plan, "train")
    command = f"{task_python(stage)} -u -m submitit.core._submit {tmp_path}"
    theirs = _make_sbatch_string(command, tmp_path, **submitit_parameters(stage, script, after=None))

    def directives(text: str) -> set[str]:
        return {
            line.replace("'", "").replace('"', "") for line in text.splitlines() if line.startswith("#SBATCH")
        }

    assert directives(theirs) == directives(script.text)
    exports = re.compile(r"^export .*$", re.MULTILINE)
    assert set(exports.findall(script.text)) <= set(exports.findall(theirs))
    for line in script.text.splitlines():
        if line.startswith("trap "):
            assert line in theirs
    [launch] = [line for line in theirs.splitlines() if line.startswith("srun --unbuffered")]
    assert '"${container[@]}" env "${task_environment[@]}" python3 ' in launch
    assert "((terminated)) || launch" in theirs
    for option in stage.allocation.srun_options():
        assert option in launch.replace("'", "")
    for word in (*stage.allocation.srun_options(), *stage.container.words()):  # type: ignore[union-attr]
        assert word in script.text
        assert word in theirs


def test_the_quickstart_runs_without_slurm(tiny_run: Path) -> None:
    """submit --launcher local: tokenize, train, the loss as text and as a picture, and where everything lies."""
    hpcgen("data", "sample", "corpus.jsonl.zst", "--max-mb=0.3", cwd=tiny_run.parent)
    tokens = "data.tokenize={input: [corpus.jsonl.zst], output_prefix: tokens/corpus}"
    command = ("submit", "tokenize", "train", "-c", str(tiny_run), "--launcher=local")
    out = hpcgen(*command, "--set", tokens, "--set", "data.datasets=[]", cwd=tiny_run.parent)
    losses = [loss for loss, _ in curve(tiny_run).values()]
    assert losses[-1] < losses[0]
    run_dir = tiny_run.parent / "run"
    assert (run_dir / "loss.png").read_bytes().startswith(b"\x89PNG")
    last = out.strip().splitlines()[-1]
    assert last.startswith(f"run {run_dir}: checkpoints, metrics.jsonl, tensorboard")


def test_a_failed_local_stage_shows_the_end_of_its_log_and_exits_1(tiny_run: Path) -> None:
    import subprocess
    import sys

    prefix = (
        next(line for line in tiny_run.read_text().splitlines() if "prefix" in line)
        .split("prefix: ")[1]
        .split("}")[0]
    )
    broken = tiny_run.parent / "broken"
    broken.with_suffix(".idx").write_bytes(b"not an index")
    broken.with_suffix(".bin").write_bytes(Path(f"{prefix}.bin").read_bytes())
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "hpcgen",
            "submit",
            "train",
            "-c",
            str(tiny_run),
            "--launcher=local",
            "--set",
            f"data.datasets=[{{prefix: {broken}}}]",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "stage train failed (task 0); its log is" in done.stderr
