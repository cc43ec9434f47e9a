"""The private cluster behaves as a cluster of two NDv5 nodes does, and leaves nothing behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S, wait_until
from tests.slurm.cluster import NODES, SlurmCluster, client_environment, stop_abandoned

ALL_GPUS = "0,1,2,3,4,5,6,7"
RUNNING = frozenset({"RUNNING"})
CHECKOUT = Path(__file__).parents[2]
BESIDE_A_CLUSTER = (sys.executable, "-m", "tests.slurm.cluster", "--")

# The batch shell waits in the background, so that its trap runs as soon as the signal comes.
SIGNAL_JOB = """\
#!/bin/bash
#SBATCH --output=job.log {directive}
trap 'echo "the batch shell got USR2"; kill $step; exit 0' USR2
srun bash -c 'trap "echo the step got USR2" USR2; while :; do sleep 0.1; done' &
step=$!
echo ready
while kill -0 $step; do wait $step; done
"""


@pytest.fixture
def own_cluster(slurm_cluster: SlurmCluster) -> SlurmCluster:
    """A second cluster, not started (where there is Slurm). What is to end is killed after a second."""
    return SlurmCluster(kill_wait_s=1)


def wait_for_line(log: Path, line: str, cluster: SlurmCluster, job_id: str) -> None:
    cluster.wait(job_id, states=RUNNING)
    wait_until(lambda: log.exists() and line in log.read_text().splitlines())


def test_sixteen_tasks_on_two_nodes_see_eight_gpus_each(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    script = """\
#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --exclusive --mem=0 --output=job.log
srun --label bash -c 'echo $SLURMD_NODENAME $SLURM_PROCID $CUDA_VISIBLE_DEVICES'
"""
    assert slurm_cluster.wait(slurm_cluster.sbatch(script, cwd=tmp_path)) == "COMPLETED"
    lines = [line.split()[1:] for line in (tmp_path / "job.log").read_text().splitlines()]
    expected = [[NODES[rank // 8], str(rank), ALL_GPUS] for rank in range(16)]
    assert sorted(lines, key=lambda line: int(line[1])) == expected


def test_gpus_may_be_requested_with_or_without_a_type(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    for request in ("--gres=gpu:8", "--gres=gpu:h100:8", "--gpus-per-node=8"):
        found = slurm_cluster.run("srun", request, "bash", "-c", "echo $CUDA_VISIBLE_DEVICES", cwd=tmp_path)
        assert found.stdout.strip() == ALL_GPUS, request


def test_the_address_of_a_node_needs_no_name_service(slurm_cluster: SlurmCluster) -> None:
    for node in NODES:
        assert " NodeAddr=127.0.0.1 " in slurm_cluster.run("scontrol", "show", "node", "-o", node).stdout


def test_a_requeued_job_runs_again_under_its_id(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    script = """\
#!/bin/bash
#SBATCH --requeue --open-mode=append --output=job.log
echo "attempt ${SLURM_RESTART_COUNT:-unset} of job $SLURM_JOB_ID"
if [ -z "${SLURM_RESTART_COUNT:-}" ]; then scontrol requeue "$SLURM_JOB_ID"; sleep 60; fi
"""
    job_id = slurm_cluster.sbatch(script, cwd=tmp_path)
    assert slurm_cluster.wait(job_id) == "COMPLETED"
    attempts = [
        line for line in (tmp_path / "job.log").read_text().splitlines() if line.startswith("attempt")
    ]
    assert attempts == [f"attempt unset of job {job_id}", f"attempt 1 of job {job_id}"]
    assert slurm_cluster.show(job_id)["Restarts"] == "1"


@pytest.mark.parametrize("sender", [pytest.param("time limit", marks=pytest.mark.slow), "scancel"])
def test_usr2_reaches_the_batch_shell_and_not_the_step(
    slurm_cluster: SlurmCluster, tmp_path: Path, sender: str
) -> None:
    # slurmctld checks the limits every 30 s; a lead of a full minute brings the signal at its next check.
    directive = "--time=1 --signal=B:USR2@60" if sender == "time limit" else "--time=5"
    job_id = slurm_cluster.sbatch(SIGNAL_JOB.format(directive=directive), cwd=tmp_path)
    if sender == "scancel":
        wait_for_line(tmp_path / "job.log", "ready", slurm_cluster, job_id)
        slurm_cluster.run("scancel", "--batch", "--signal=USR2", job_id)
    assert slurm_cluster.wait(job_id) == "COMPLETED"
    log = (tmp_path / "job.log").read_text()
    assert "the batch shell got USR2" in log
    assert "the step got USR2" not in log


def test_test_only_judges_a_script_without_queueing_it(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    script = "#!/bin/bash\n#SBATCH --nodes={} --gpus-per-node=8 --hold --job-name=only-tested\n"
    fits = slurm_cluster.run("sbatch", "--test-only", input=script.format(2), cwd=tmp_path)
    assert "ndv5-[1-2]" in fits.stderr
    too_large = slurm_cluster.run("sbatch", "--test-only", input=script.format(3), cwd=tmp_path, check=False)
    assert too_large.returncode != 0
    assert "only-tested" not in slurm_cluster.run("squeue", "--format=%j").stdout


def test_accounting_keeps_how_a_job_ended(accounting_cluster: SlurmCluster, tmp_path: Path) -> None:
    job_id = accounting_cluster.sbatch("#!/bin/bash\n#SBATCH --output=job.log\nexit 3\n", cwd=tmp_path)
    accounting_cluster.wait(job_id)
    query = (
        "sacct",
        "--noheader",
        "--parsable2",
        "--allocations",
        "--format=State,ExitCode",
        f"--jobs={job_id}",
    )
    wait_until(lambda: accounting_cluster.run(*query).stdout.strip() == "FAILED|3:0")


def test_two_clusters_run_side_by_side(
    slurm_cluster: SlurmCluster, own_cluster: SlurmCluster, tmp_path: Path
) -> None:
    with own_cluster:
        script = "#!/bin/bash\n#SBATCH --nodes=2 --output=%x.log\nsrun bash -c 'echo $SLURM_CONF'\n"
        jobs = {
            name: (cluster, cluster.sbatch(script, f"--job-name={name}", cwd=tmp_path))
            for name, cluster in (("first", slurm_cluster), ("second", own_cluster))
        }
        for name, (cluster, job_id) in jobs.items():
            assert cluster.wait(job_id) == "COMPLETED"
            assert set((tmp_path / f"{name}.log").read_text().split()) == {cluster.env["SLURM_CONF"]}
    assert slurm_cluster.run("sinfo", "--noheader", "--format=%D").stdout.strip() == "2"


def test_a_killed_node_takes_its_tasks_along_and_no_others(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    script = """\
#!/bin/bash
#SBATCH --nodes=3 --no-kill --output=job.log
srun --no-kill --wait=0 bash -c 'echo $$ > $SLURMD_NODENAME.pid; env -i sleep 300'
"""
    with SlurmCluster(3) as cluster:
        job_id = cluster.sbatch(script, cwd=tmp_path)
        cluster.wait(job_id, states=RUNNING)
        files = [tmp_path / f"{node}.pid" for node in cluster.nodes]
        wait_until(lambda: all(file.exists() and file.read_text() for file in files))
        cluster.kill_node("ndv5-2")
        assert [is_running(int(file.read_text())) for file in files] == [True, False, True]
        assert cluster.show(job_id)["JobState"] == "RUNNING"
        cluster.start_node("ndv5-2")
        assert (
            "ndv5-2"
            in cluster.run(
                "srun",
                "--nodelist=ndv5-2",
                "--overlap",
                f"--jobid={job_id}",
                "bash",
                "-c",
                "echo $SLURMD_NODENAME",
            ).stdout
        )


def test_stopping_ends_running_jobs_and_removes_everything(own_cluster: SlurmCluster, tmp_path: Path) -> None:
    own_cluster.start()
    directory = own_cluster.directory
    pids = [int(file.read_text()) for file in directory.glob("*.pid")]
    script = """\
#!/bin/bash
#SBATCH --output=job.log
trap '' TERM
echo $$; echo ready
while :; do sleep 0.1; done
"""
    job_id = own_cluster.sbatch(script, cwd=tmp_path)
    wait_for_line(tmp_path / "job.log", "ready", own_cluster, job_id)
    pids.append(int((tmp_path / "job.log").read_text().split()[0]))
    own_cluster.stop()
    assert len(pids) == 5
    assert not any(is_running(pid) for pid in pids)
    assert not directory.exists()


def test_the_cluster_of_a_killed_run_is_stopped_by_the_next(
    own_cluster: SlurmCluster, slurm_cluster: SlurmCluster
) -> None:
    command = (*BESIDE_A_CLUSTER, "bash", "-c", "echo $SLURM_CONF; read")
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=CHECKOUT, stdin=pipe, stdout=pipe, text=True) as killed:
        assert killed.stdout is not None
        directory = Path(killed.stdout.readline().strip()).parent
        pids = [int(file.read_text()) for file in directory.glob("*.pid")]
        killed.kill()
    assert len(pids) == 4
    stop_abandoned()
    assert not directory.exists()
    assert not any(is_running(pid) for pid in pids)
    assert slurm_cluster.directory.exists()


@pytest.mark.parametrize(
    ("command", "status"),
    [("test -f $SLURM_CONF", 0), ("exit 7", 7), ("kill -TERM $PPID; exec sleep 60", 128 + signal.SIGTERM)],
)
def test_the_command_run_with_a_cluster_returns_its_status(
    own_cluster: SlurmCluster, command: str, status: int
) -> None:
    ended = subprocess.run((*BESIDE_A_CLUSTER, "bash", "-c", command), cwd=CHECKOUT, timeout=PATIENCE_S)
    assert ended.returncode == status


def test_clients_see_nothing_of_a_surrounding_job() -> None:
    surrounding = {"SLURM_JOB_ID": "1", "SBATCH_PARTITION": "hpc", "SLURM_CONF": "/etc/slurm/slurm.conf"}
    env = client_environment(Path("/tmp/cluster"), surrounding | {"HOME": "/root"})
    assert env.pop("PATH")
    assert env == {"SLURM_CONF": "/tmp/cluster/slurm.conf", "HOME": "/root"}


def is_running(pid: int) -> bool:
    """True if a process runs and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
