"""Bad nodes, on a real Slurm of three: one that fails the check is left out, and a spare takes over from a dead one."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.patience import wait_until
from tests.slurm.cluster import SlurmCluster, missing_slurm
from tests.slurm.conftest import (
    curve,
    log_of,
    make_run,
    render,
    short_sleeps,
    slow_requeue,
    wait_for_steps,
)
from tests.slurm.test_run import program_run
from tests.slurm.test_run import submit as submit_program

HEALTH_COMMAND = """\
#!/bin/bash
# What a site's own check may be: it knows one node that is not well.
if [[ $SLURMD_NODENAME == "$(cat "${BASH_SOURCE%/*}/sick")" ]]; then
    echo "GPU 3 fell off the bus"
    exit 1
fi
"""

LAYOUT = (
    "slurm.train.nodes=2",
    "slurm.train.ntasks_per_node=1",
    "parallelism.tensor_model_parallel_size=2",
)


@pytest.fixture(scope="module")
def three_nodes() -> Iterator[SlurmCluster]:
    if (reason := missing_slurm()) is not None:
        pytest.skip(reason)
    with SlurmCluster(num_nodes=3) as cluster:
        yield cluster


@pytest.fixture
def checked_run(tmp_path: Path, byte_corpus: Path, stand_in: str) -> Path:
    """A run whose cluster profile has a health command. The file `sick` next to it contains the bad node's name."""
    run = make_run(tmp_path, byte_corpus, stand_in)
    command = tmp_path / "check-node"
    command.write_text(HEALTH_COMMAND)
    command.chmod(0o755)
    (tmp_path / "sick").write_text("nobody")
    profile = tmp_path / "cluster.yaml"
    profile.write_text(profile.read_text() + f"health_command: [{command}]\n")
    return run


def submit(cluster: SlurmCluster, run: Path, *overrides: str, options: Sequence[str] = ()) -> str:
    return cluster.sbatch(render(run, *LAYOUT, *overrides), *options, cwd=run.parent)


def trained_on(log: str) -> list[set[str]]:
    """The nodes of each start, in order."""
    return [set(found.split()) for found in re.findall(r"(?:running on|in this job, on) (.*)", log)]


def test_a_node_that_fails_its_check_is_excluded_and_the_job_continues(
    three_nodes: SlurmCluster,
    checked_run: Path,
    single_process_curve: dict[int, tuple[float, float]],
) -> None:
    (checked_run.parent / "sick").write_text("ndv5-2")
    # a node that is known as bad and has left the cluster since: Slurm would refuse a list with its name
    (checked_run.parent / "run" / "excluded_nodes").write_text(f"ghost-7 {int(time.time()) + 3600}\n")
    options = (slow_requeue(three_nodes, checked_run.parent), "--nodelist=ndv5-2", "--hold")
    job_id = submit(three_nodes, checked_run, "preflight.node_health=true", options=options)
    jobs = checked_run.parent / "run" / "jobs"
    for directory in (jobs, jobs / job_id):
        directory.mkdir(mode=0o700)
    (jobs / job_id / "excluded_by_user").write_text("ghost-[8-9]\n")  # also left the cluster since
    three_nodes.run("scontrol", "release", job_id)
    state = three_nodes.wait(job_id)
    log = log_of(checked_run, job_id)
    assert state == "COMPLETED", log
    assert "dropping the request for ndv5-2" in log
    assert "GPU 3 fell off the bus" in log
    assert "back into the queue without ndv5-2 (exclusion 1 of at most 3)" in log
    assert trained_on(log) == [{"ndv5-1", "ndv5-3"}]
    shown = three_nodes.show(job_id)
    excluded, required = shown["ExcNodeList"], shown["ReqNodeList"]
    assert (excluded, required, shown["Restarts"]) == ("ndv5-2", "(null)", "1")
    steps = curve(checked_run)
    assert steps.keys() == single_process_curve.keys()
    assert all(steps[i] == pytest.approx(expected, rel=1e-3) for i, expected in single_process_curve.items())


@pytest.mark.slow
def test_a_spare_takes_the_place_of_a_node_that_fails_its_check(
    three_nodes: SlurmCluster, checked_run: Path
) -> None:
    (checked_run.parent / "sick").write_text("ndv5-1")
    job_id = submit(three_nodes, checked_run, "preflight.spare_nodes=1")
    state = three_nodes.wait(job_id)
    log = log_of(checked_run, job_id)
    assert state == "COMPLETED", log
    assert trained_on(log) == [{"ndv5-2", "ndv5-3"}]
    assert three_nodes.show(job_id)["Restarts"] == "0"


@pytest.mark.slow
def test_a_bad_node_does_not_split_a_segment(checked_run: Path) -> None:
    """Slurm 22.05 has switches in place of blocks, and no --segment."""
    (checked_run.parent / "sick").write_text("ndv5-2")
    script = render(checked_run, *LAYOUT, "preflight.spare_nodes=2", "slurm.train.segment=2")
    with SlurmCluster(num_nodes=4, switches={"s1": "ndv5-[1-2]", "s2": "ndv5-[3-4]"}) as cluster:
        job_id = cluster.sbatch(script.replace("#SBATCH --segment=2\n", ""), cwd=checked_run.parent)
        state = cluster.wait(job_id)
    log = log_of(checked_run, job_id)
    assert state == "COMPLETED", log
    assert trained_on(log) == [{"ndv5-3", "ndv5-4"}]


def test_a_missing_dataset_ends_the_job_before_its_nodes_are_checked(
    three_nodes: SlurmCluster, checked_run: Path, tmp_path: Path, byte_corpus: Path
) -> None:
    for suffix in (".bin", ".idx"):
        (tmp_path / f"own{suffix}").write_bytes(byte_corpus.with_suffix(suffix).read_bytes())
    overrides = (f"data.datasets=[{{prefix: {tmp_path}/own}}]", "preflight.node_health=true")
    script = render(checked_run, *LAYOUT, *overrides)
    (tmp_path / "own.bin").unlink()
    job_id = three_nodes.sbatch(script, cwd=checked_run.parent)
    assert three_nodes.wait(job_id) == "FAILED"
    last = log_of(checked_run, job_id).splitlines()[-1]
    assert f"ERROR: {tmp_path}/own.bin is missing or not readable on ndv5-1" in last
    assert not (checked_run.parent / "run" / "excluded_nodes").exists()


def test_a_path_that_no_node_has_is_the_runs_mistake(
    three_nodes: SlurmCluster, checked_run: Path, tmp_path: Path
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    profile = tmp_path / "cluster.yaml"
    profile.write_text(profile.read_text() + f"code_dir: {code}\n")
    script = render(checked_run, *LAYOUT, "preflight.node_health=true")
    code.rmdir()
    job_id = three_nodes.sbatch(script, cwd=checked_run.parent)
    assert three_nodes.wait(job_id) == "FAILED"
    log = log_of(checked_run, job_id)
    assert f"expected {code} to be readable" in log
    assert "no node is fit: that is a mistake in the run rather than in its nodes" in log
    assert not (checked_run.parent / "run" / "excluded_nodes").exists()


def test_too_many_exclusions_end_the_job(three_nodes: SlurmCluster, checked_run: Path) -> None:
    (checked_run.parent / "sick").write_text("ndv5-2")
    overrides = ("preflight.node_health=true", "preflight.max_exclusions=0")
    job_id = submit(three_nodes, checked_run, *overrides)
    assert three_nodes.wait(job_id) == "FAILED"
    assert "bad nodes: ndv5-2; the job excluded nodes 0 times already: giving up" in log_of(
        checked_run, job_id
    )


@pytest.mark.slow
def test_a_spare_takes_over_when_a_node_dies(
    three_nodes: SlurmCluster,
    checked_run: Path,
    single_process_curve: dict[int, tuple[float, float]],
) -> None:
    long = ("preflight.spare_nodes=1", "training.train_iters=60", "checkpoint.save_interval=3")
    job_id = submit(three_nodes, checked_run, *long)
    wait_for_steps(checked_run, 5)
    three_nodes.kill_node("ndv5-2")
    try:
        state = three_nodes.wait(job_id)
    finally:
        three_nodes.start_node("ndv5-2")
    log = log_of(checked_run, job_id)
    assert state == "COMPLETED", log
    assert trained_on(log) == [{"ndv5-1", "ndv5-2"}, {"ndv5-1", "ndv5-3"}]
    assert three_nodes.show(job_id)["Restarts"] == "0"
    steps = curve(checked_run)
    assert len(steps) == 60
    for iteration in (1, 2, 3):
        assert steps[iteration] == pytest.approx(single_process_curve[iteration], rel=1e-3)


def test_a_spare_takes_the_place_of_a_node_without_the_command_of_a_program(
    three_nodes: SlurmCluster, tmp_path: Path
) -> None:
    """The nodes share their files, so the command appears as soon as the second node has reported it as missing.

    Until then, the first node's command waits to be ended.
    """
    run = program_run(tmp_path, {"command": ["./mine-{NODE_RANK}"]}, nodes=2, ntasks_per_node=1)

    def make_command(rank: int) -> None:
        command = tmp_path / f"mine-{rank}"
        command.write_text(f"#!/bin/sh\n[ -e {tmp_path}/mine-1 ] || exec /bin/sleep infinity\n")
        command.chmod(0o755)

    make_command(0)
    options = [short_sleeps(three_nodes, tmp_path / "programs")]
    job_id = submit_program(three_nodes, run, "preflight.spare_nodes=1", options=options)
    unfit = tmp_path / "run" / "jobs" / job_id / "unfit-ndv5-2"
    wait_until(unfit.exists)
    make_command(1)
    state = three_nodes.wait(job_id)
    log = (tmp_path / "run" / f"run-{job_id}.log").read_text()
    assert state == "COMPLETED", log
    assert "1: the command ./mine-1 does not exist on ndv5-2" in log
    assert "bad nodes: ndv5-2 " in log
    assert "continuing in this job, on ndv5-1 ndv5-3" in log
