"""Programs of a user on two real Slurm nodes: their variables, stops, requeues, and the progress guard."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcgen import api
from hpcgen.runs.attempts import read_attempts
from tests.patience import wait_until
from tests.slurm.cluster import SlurmCluster
from tests.slurm.conftest import failing_requeue, profile_text, short_sleeps

EXAMPLES = Path(__file__).parents[2] / "examples"
TWO_NODES = {"nodes": 2, "ntasks_per_node": 2}

STEPS = """\
#!/bin/sh
# Counts to $1 and saves each step. Resumes; stops after a step if asked to. In attempt 0, waits for that at step 8.
trap 'stop=1' USR1
mkdir -p checkpoints
step=$(ls checkpoints | sed 's/step_//' | sort -n | tail -n 1)
while [ "${step:-0}" -lt "$1" ]; do
    step=$((${step:-0} + 1))
    [ "$RANK" != 0 ] || { echo "at step $step of $1"; : >"checkpoints/step_$step"; }
    [ "$RANK $step $2" != "0 3 0" ] || kill -KILL $$
    sleep 0.1
    while [ "$2" = 0 ] && [ "$step" -ge 8 ] && [ -z "$stop" ]; do sleep 0.1; done
    [ -z "$stop" ] || { echo "rank $RANK stops"; exit 0; }
done
"""


def program_run(directory: Path, program: dict[str, Any], **settings: Any) -> Path:
    """A run file with this program, its profile, and a program steps.sh."""
    (directory / "cluster.yaml").write_text(profile_text())
    (directory / "run").mkdir()
    (directory / "steps.sh").write_text(STEPS)
    values = {
        "name": "mine",
        "cluster": "./cluster.yaml",
        "paths": {"run_dir": "run"},
        "slurm": {"run": {"time": "10:00", **settings}},
        "program": program,
    }
    run = directory / "run.yaml"
    run.write_text(json.dumps(values))
    return run


def recorder(run: Path) -> str:
    """The override that adds the name of each event to the file told."""
    script = run.parent / "notify.sh"
    script.write_text(f"jq --raw-output .event >>{run.parent}/told\n")
    return f"notify.command=[sh, {script}]"


def told(run: Path) -> list[str]:
    return (run.parent / "told").read_text().split()


def submit(cluster: SlurmCluster, run: Path, *overrides: str, options: Sequence[str] = ()) -> str:
    plan = api.plan(api.load_run(run, overrides))
    return cluster.sbatch(api.render(plan, "run"), *options, cwd=Path("/"))


def log_of(run: Path, job_id: str) -> str:
    return next(run.parent.glob(f"*/run-{job_id}.log")).read_text()


def ended(cluster: SlurmCluster, run: Path, job_id: str, state: str = "COMPLETED") -> str:
    """The log of a job once it ended in this state."""
    found = cluster.wait(job_id)
    log = log_of(run, job_id)
    assert found == state, log
    return log


NODE_SCRIPT = """\
set -eu
echo it says so
export PATH=/nowhere SET_BY_SCRIPT="\\$(id) $READ_BY_SCRIPT" READ_BY_SCRIPT=changed PATH_OF_SCRIPT=$BASH_SOURCE
unset UNWANTED
not_exported=1
"""


def with_rules_of_a_site(directory: Path) -> None:
    """Adds a rule for the rendezvous to the profile, and an environment script to its node type."""
    profile = directory / "cluster.yaml"
    rules = "node_type: scripted\nrendezvous: {interface: lo}\n"
    profile.write_text(profile.read_text() + rules)
    (directory / "topologies").mkdir()
    facts = f"extends: cpu\nenvironment_script: {directory}/node.sh\n"
    (directory / "topologies/scripted.yaml").write_text(facts)
    (directory / "node.sh").write_text(NODE_SCRIPT)


def test_every_rank_gets_its_variables_and_arguments_are_data(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    shown = "rank={RANK} local={LOCAL_RANK} node={NODE_RANK} of={WORLD_SIZE} nodes={NNODES}x{RANKS_PER_NODE}"
    hostile = "it's; $(touch hacked) `touch hacked` {{x}}"
    command = ["sh", "-c", 'echo "$@" "env $RANK $LOCAL_RANK $MASTER_ADDR:$MASTER_PORT in $PWD"', "sh"]
    command += [shown, "at={MASTER_ADDR}:{MASTER_PORT}", "restart={RESTART} {RUN_DIR}", hostile]
    command[2] += '; echo "script $SET_BY_SCRIPT, $READ_BY_SCRIPT, $PATH_OF_SCRIPT, $UNWANTED"'
    run = program_run(tmp_path, {"command": command}, **TWO_NODES)
    with_rules_of_a_site(tmp_path)
    given = [f"environment.{name}=of the run" for name in ("READ_BY_SCRIPT", "UNWANTED")]
    job_id = submit(slurm_cluster, run, *given)
    log = ended(slurm_cluster, run, job_id)
    assert log.count(f"script $(id) of the run, of the run, {tmp_path}/node.sh, of the run\n") == 4
    assert f"{tmp_path}/node.sh set PATH_OF_SCRIPT SET_BY_SCRIPT (values: " in log
    assert f"not taken from {tmp_path}/node.sh: PATH READ_BY_SCRIPT UNWANTED" in log
    assert "it says so\n" in log
    values = (tmp_path / f"run/jobs/{job_id}/node-environment").read_text()
    assert values == f"PATH_OF_SCRIPT={tmp_path}/node.sh\nSET_BY_SCRIPT=$(id) of the run\n"
    port = 10_000 + int(job_id) * 8 % 20_000
    for rank in range(4):
        expected = (
            f"{rank}: rank={rank} local={rank % 2} node={rank // 2} of=4 nodes=2x2 at=127.0.0.1:{port} "
        )
        expected += f"restart=0 {tmp_path}/run it's; $(touch hacked) `touch hacked` {{x}} "
        assert f"{expected}env {rank} {rank % 2} 127.0.0.1:{port} in {tmp_path}\n" in log
    assert log.endswith("hpcgen: done\n")
    assert not (tmp_path / "hacked").exists()


def test_a_warned_program_gets_the_signal_and_a_killed_one_resumes(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    """The first attempt loses rank 0 at step 3, starts again in its allocation, and is warned. The second is done."""
    program = {
        "command": ["sh", "steps.sh", "12", "{RESTART}"],
        "progress": {"log": "at step ([0-9]+) of"},
        "stop": {"signal": "USR1"},
    }
    run = program_run(tmp_path, program, **TWO_NODES)
    job_id = submit(slurm_cluster, run, recorder(run))
    fifth = tmp_path / "checkpoints" / "step_5"
    wait_until(lambda: slurm_cluster.state(job_id) == "RUNNING" and fifth.exists(), interval_s=0.3)
    slurm_cluster.run("scancel", "--batch", "--signal=USR2", job_id)
    log = ended(slurm_cluster, run, job_id)
    assert re.search(
        r"ended with status 1[0-9]+ after progress to 3: starting it again in this job \(restart 1 of", log
    )
    assert all(f"{rank}: rank {rank} stops" in log for rank in range(4))
    assert "stopped with status 0 before the time limit at progress " in log
    assert "(restart 2 of at most 100)" in log
    assert log.endswith("hpcgen: done at progress 12\n")
    assert log.count("0: at step 3 of 12\n") == 1
    assert log.count("0: at step 12 of 12\n") == 1
    assert told(run) == ["start", "restart", "requeue", "start", "done"]
    ends = [(each.verdict, each.status) for each in read_attempts(tmp_path / "run")]
    assert ends == [("requeued", 0), ("done", 0)]


def test_three_attempts_without_progress_end_the_job_and_a_refused_requeue_is_retried(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    """The controller refuses the first requeue twice. The expression for the progress is useless."""
    program = {"command": ["sh", "-c", "echo broken; kill -BUS $$"], "progress": {"log": "step ([0-9]+)"}}
    run = program_run(tmp_path, program)
    job_id = submit(slurm_cluster, run, options=[failing_requeue(slurm_cluster, tmp_path / "failing")])
    log = ended(slurm_cluster, run, job_id, "FAILED")
    assert log.count("0: broken\n") == 3
    assert log.count("Unable to contact slurm controller") == 2
    first = log.partition("back into the queue")[0]
    assert (
        f"no line that this attempt wrote to {tmp_path}/run/run-{job_id}.log matches step ([0-9]+)" in first
    )
    [status] = {int(each) for each in re.findall(r"failed with status ([0-9]+)", log)}
    assert status in (7, 135), log
    assert f"failed with status {status}: three attempts without progress beyond 0; not requeued" in log
    ends = [(each.verdict, each.status) for each in read_attempts(tmp_path / "run")]
    assert ends == [("requeued", status), ("requeued", status), ("failed", status)]


def test_a_command_that_does_not_exist_is_tried_once(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    run = program_run(tmp_path, {"command": ["no-such-command", "x"]}, **TWO_NODES)
    job_id = submit(slurm_cluster, run, options=[short_sleeps(slurm_cluster, tmp_path / "programs")])
    log = ended(slurm_cluster, run, job_id, "FAILED")
    assert (
        "not requeued, since it would fail again: the command no-such-command does not exist"
        in log.splitlines()[-1]
    )
    assert "back into the queue" not in log


def test_a_canceled_program_stays_canceled(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    """Its command is told so, and does not keep the job although it hangs."""
    run = program_run(tmp_path, {"command": ["sh", "steps.sh", "10000", "1"]})
    job_id = submit(slurm_cluster, run, recorder(run))
    wait_until(lambda: (tmp_path / "checkpoints" / "step_2").exists())
    second = submit(slurm_cluster, run)
    assert f"job {job_id} is running in" in ended(slurm_cluster, run, second, "FAILED")
    script = tmp_path / "notify.sh"
    script.write_text(f"{script.read_text()}sleep 600\n")
    slurm_cluster.run("scancel", job_id)
    log = ended(slurm_cluster, run, job_id, "CANCELLED")
    assert "requeueing is Slurm's decision" in log
    assert told(run) == ["start", "stopped"]


def test_a_step_that_fails_because_its_job_is_canceled_revives_nothing(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    """The step fails before the batch script has SIGTERM, which its daemon (slurmstepd) delivers."""
    waits = "trap '' TERM; touch begun; until [ -e go ]; do sleep 0.1; done; exit 1"
    run = program_run(tmp_path, {"command": ["sh", "-c", waits]})
    job_id = submit(slurm_cluster, run)
    wait_until((tmp_path / "begun").exists)
    daemon = batch_daemon(slurm_cluster, job_id)
    os.kill(daemon, signal.SIGSTOP)
    try:
        slurm_cluster.run("scancel", job_id)
        (tmp_path / "go").touch()
        verdict = re.compile("ended by Slurm|back into the queue|failed with status")
        wait_until(lambda: verdict.search(log_of(run, job_id)))
    finally:
        os.kill(daemon, signal.SIGCONT)
    log = ended(slurm_cluster, run, job_id, "CANCELLED")
    before, _, _ = log.partition("ended by Slurm (canceled)")
    assert before != log
    assert "SIGTERM" not in before
    assert "back into the queue" not in log


def batch_daemon(cluster: SlurmCluster, job_id: str) -> int:
    """The process ID of the slurmstepd that runs the job's batch script: another cluster may have this number, too."""
    job = {f"SLURM_JOB_ID={job_id}", f"SLURM_CONF={cluster.env['SLURM_CONF']}"}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environ = (process / "environ").read_text(errors="replace").split("\0")
            if "/slurm_script\0" in (process / "cmdline").read_text() and job <= set(environ):
                [parent] = re.findall(r"^PPid:\t(\d+)$", (process / "status").read_text(), re.MULTILINE)
                if Path(f"/proc/{parent}/comm").read_text() == "slurmstepd\n":
                    return int(parent)
    raise LookupError(job_id)


def test_an_end_without_the_file_of_done_is_a_failure(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    program = {
        "command": ["sh", "-c", "[ {RESTART} = 0 ] || touch finished"],
        "progress": {"file": "counter"},
        "done": {"file": "finished"},
    }
    run = program_run(tmp_path, program)
    log = ended(slurm_cluster, run, submit(slurm_cluster, run))
    first = log.partition("back into the queue")[0]
    assert f"the program ended with status 0, but {tmp_path}/finished does not exist" in first
    assert f"{tmp_path}/counter has no number in its first line" in first
    assert log.endswith("hpcgen: done at progress 0\n")
    again = ended(slurm_cluster, run, submit(slurm_cluster, run))
    assert f"done already: {tmp_path}/finished exists" in again


def test_a_spare_takes_the_place_of_a_bad_node(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    run = program_run(tmp_path, {"command": ["sh", "-c", "echo on $SLURMD_NODENAME of {NNODES}"]})
    check = tmp_path / "check-node"
    check.write_text('#!/bin/sh\n[ "$SLURMD_NODENAME" != ndv5-1 ] || { echo sick; exit 1; }\n')
    check.chmod(0o755)
    with (tmp_path / "cluster.yaml").open("a") as profile:
        profile.write(f"health_command: [{check}]\n")
    log = ended(slurm_cluster, run, submit(slurm_cluster, run, "preflight.spare_nodes=1", recorder(run)))
    assert told(run) == ["start", "done"]
    assert "hpcgen: running on ndv5-2\n" in log
    assert "0: on ndv5-2 of 1\n" in log


def test_submitit_queues_the_same_job_without_its_python(
    slurm_cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """submitit asks for a signal that would kill the program, and for its own command."""
    for name, value in slurm_cluster.env.items():
        monkeypatch.setenv(name, value)
    run = program_run(tmp_path, {"command": ["sh", "-c", "echo rank {RANK} of {WORLD_SIZE}"]}, **TWO_NODES)
    (tmp_path / "cluster.yaml").write_text(profile_text("/no/python"))
    [job] = api.submit(api.plan(api.load_run(run)))
    log = ended(slurm_cluster, run, job.job_id)
    assert all(f"{rank}: rank {rank} of 4\n" in log for rank in range(4))
    script = tmp_path / "run" / "submitit" / f"{job.job_id}_submission.sh"
    assert "#SBATCH --signal=B:CONT@1\n" in script.read_text()


def example(name: str, directory: Path, python: str) -> Path:
    """A copy of an example, with `python` for python3 and for torchrun."""
    for path in EXAMPLES.glob(f"{name}.*"):
        shutil.copy(path, directory)
    run = directory / f"{name}.yaml"
    text = run.read_text().replace("cluster: local", "cluster: ./cluster.yaml")
    run.write_text(text.replace("python3", python))
    (directory / "cluster.yaml").write_text(profile_text(python))
    (directory / "runs" / name.replace("_", "-")).mkdir(parents=True)
    return run


def test_the_example_with_srun_meets_on_two_nodes(
    slurm_cluster: SlurmCluster, tmp_path: Path, stand_in: str
) -> None:
    run = example("program_hello", tmp_path, stand_in)
    job_id = submit(slurm_cluster, run, "slurm.run.nodes=2", "slurm.run.ntasks_per_node=1")
    assert slurm_cluster.wait(job_id) == "COMPLETED"
    log = (tmp_path / "runs" / "program-hello" / f"run-{job_id}.log").read_text()
    assert all(f"hello from rank {rank} of 2 on " in log for rank in (0, 1))


def test_the_example_with_torchrun_stops_and_resumes(
    slurm_cluster: SlurmCluster, tmp_path: Path, stand_in: str
) -> None:
    run = example("program_torchrun", tmp_path, stand_in)
    slow = "program.command=[program_torchrun.py, '--checkpoints={RUN_DIR}/checkpoints', "
    slow += "'--stop-file={RUN_DIR}/stop', --steps=40, --step-s=0.1]"
    job_id = submit(slurm_cluster, run, "slurm.run.nodes=2", "slurm.run.ntasks_per_node=1", slow)
    run_dir = tmp_path / "runs" / "program-torchrun"
    wait_until(lambda: (run_dir / "checkpoints" / "step_10.pt").exists())
    slurm_cluster.run("scancel", "--batch", "--signal=USR2", job_id)
    state = slurm_cluster.wait(job_id)
    log = (run_dir / f"run-{job_id}.log").read_text()
    assert state == "COMPLETED", log
    assert "stopped with status 0 before the time limit at progress " in log
    assert "0: resuming from step " in log
    assert "0: step 40, weight " in log
    assert log.endswith("hpcgen: done at progress 40\n")
    assert not (run_dir / "stop").exists()
