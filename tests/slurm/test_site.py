"""A site's own templates on a real Slurm: its environment, modules, prologue and epilogue, and its launch line."""

from __future__ import annotations

import os
import re
import socket
import time
import urllib.request
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.slurm.cluster import FINAL_STATES, SlurmCluster, missing_slurm
from tests.slurm.conftest import curve, hpcgen, log_of, profile_text, short_sleeps, wait_for_steps

MODULES = Path("/usr/share/modules/init/bash")  # where Debian's environment-modules puts it

TEMPLATE = """\
{% extends "hpcgen/slurm/train.sbatch.j2" %}

{% block environment %}
{{ super() }}
export SITE_PROXY=http://proxy:3128
{% endblock %}

{% block site %}
site_prologue() {
    say "site prologue: $SITE_PROXY"
    source /usr/share/modules/init/bash
    module use @SITE@/modulefiles
    module load tools/1.2
    say "tools are in $TOOLS_HOME"
}

# This site starts each task through a program of its own.
launch() { run_step srun "${step[@]}" "${container[@]}" @SITE@/bin/wrap env "${task_environment[@]}" "$@"; }

prepare_node() { say "node $node has $scratch" >>@SITE@/nodes; }

site_epilogue() {
    say "site epilogue: the step ended with $rc, and the job with $verdict $exit_status"
    cp -- "$run_dir/metrics.jsonl" @SITE@/archived.jsonl
    cp -- "$log" @SITE@/archived.log
    scontrol requeue "$SLURM_JOB_ID" || say "not requeued"
}
{% endblock %}
"""

WRAP = """\
#!/bin/bash
echo "wrapped $SLURM_PROCID with $TOOLS_HOME and $SITE_PROXY"
exec "$@"
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A directory of templates, a module and a launcher, as an admin keeps them."""
    site = tmp_path / "site"
    files = {
        "slurm/train.sbatch.j2": TEMPLATE.replace("@SITE@", str(site)),
        "modulefiles/tools/1.2": "#%Module\nsetenv TOOLS_HOME /opt/tools/1.2\n",
        "bin/wrap": WRAP,
    }
    for name, text in files.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return site


@pytest.mark.skipif(not MODULES.exists(), reason="environment-modules is not installed")
@pytest.mark.parametrize("way", ["render", pytest.param("submit", marks=pytest.mark.slow)])
def test_a_sites_functions_apply_to_sbatch_and_to_submit(
    slurm_cluster: SlurmCluster,
    tiny_run: Path,
    site: Path,
    single_process_curve: dict[int, tuple[float, float]],
    way: str,
) -> None:
    command = (way, "train", "-c", str(tiny_run), "--templates", str(site))
    options = ("--set=slurm.train.ntasks_per_node=2", "--set=training.train_iters=2")
    printed = hpcgen(*command, *options, cwd=tiny_run.parent, env=slurm_cluster.env)
    if way == "render":
        assert f"{site}/slurm/train.sbatch.j2" in printed
        job_id = slurm_cluster.sbatch(printed, cwd=tiny_run.parent)
    else:
        job_id = printed.split()[0]
    state = slurm_cluster.wait(job_id)
    log = log_of(tiny_run, job_id)
    assert state == "COMPLETED", log
    assert "site prologue: http://proxy:3128" in log
    assert "tools are in /opt/tools/1.2" in log
    for rank in (0, 1):
        assert f"wrapped {rank} with /opt/tools/1.2 and http://proxy:3128" in log
    assert "site epilogue: the step ended with 0, and the job with done 0" in log
    assert "done: 2 iterations" in (site / "archived.log").read_text()
    assert "not requeued" in log
    job = slurm_cluster.show(job_id)
    assert (job["Restarts"], job["Requeue"]) == ("0", "1"), "only the user may start it once more"
    assert "node ndv5-1 has /tmp/hpcgen-" in (site / "nodes").read_text()
    assert (site / "archived.jsonl").read_bytes() == (tiny_run.parent / "run" / "metrics.jsonl").read_bytes()
    assert curve(tiny_run)[2] == pytest.approx(single_process_curve[2], rel=1e-3)


UNFIT_ONCE = """\
{% extends "hpcgen/slurm/train.sbatch.j2" %}

{% block site %}
prepare_node() { [[ -e @SITE@/fit ]] || { : >@SITE@/fit; echo "the disk of $node is full"; return 1; }; }
{% endblock %}
"""


def test_a_node_that_cannot_be_prepared_fails_only_the_attempt(
    slurm_cluster: SlurmCluster, tiny_run: Path
) -> None:
    templates = tiny_run.parent / "site" / "slurm"
    templates.mkdir(parents=True)
    (templates / "train.sbatch.j2").write_text(UNFIT_ONCE.replace("@SITE@", str(templates)))
    command = ("render", "train", "-c", str(tiny_run), "--templates", str(templates.parent))
    job_id = slurm_cluster.sbatch(hpcgen(*command, cwd=tiny_run.parent), cwd=tiny_run.parent)
    assert slurm_cluster.wait(job_id) == "COMPLETED"
    log = log_of(tiny_run, job_id)
    assert log.count("the disk of ndv5-1 is full") == 1, log
    assert "the site's prepare_node failed with status 1" in log
    assert log.count("failed with status 1 at iteration 0 (began at 0): back into the queue") == 1
    assert "cannot run the trainer" not in log


BROKEN = """\
{% extends "hpcgen/slurm/train.sbatch.j2" %}

{% block site %}
site_epilogue() {
    say "the verdict is $verdict"
    cp -- /nonexistent /tmp/
    sleep 300 &
    [[ "$SITE_WEBHOK" ]] && say "never reached"
}
{% endblock %}
"""


def test_broken_hooks_prevent_neither_the_requeue_nor_the_conclusion(
    slurm_cluster: SlurmCluster, tiny_run: Path
) -> None:
    """A step that fails, then an epilogue with an unset variable: the job still requeues itself."""
    profile, python = tiny_run.parent / "cluster.yaml", tiny_run.parent / "python"
    python.write_text('#!/bin/bash\n[[ "$*" == *--versions* ]] || exit 7\n')
    python.chmod(0o755)
    profile.write_text(profile_text(python))
    templates = tiny_run.parent / "site" / "slurm"
    templates.mkdir(parents=True)
    (templates / "train.sbatch.j2").write_text(BROKEN)
    command = ("render", "train", "-c", str(tiny_run), "--templates", str(templates.parent))
    job_id = slurm_cluster.sbatch(hpcgen(*command, cwd=tiny_run.parent), cwd=tiny_run.parent)
    slurm_cluster.wait(job_id, states=FINAL_STATES | {"RUNNING"})
    slurm_cluster.wait(job_id, states=FINAL_STATES | {"PENDING"})
    restarts = int(slurm_cluster.show(job_id)["Restarts"])
    slurm_cluster.run("scancel", job_id)
    log = log_of(tiny_run, job_id)
    assert restarts >= 1, log
    assert "WARNING: site_epilogue: status 1 of: cp -- /nonexistent /tmp/" in log
    assert "SITE_WEBHOK: unbound variable" in log
    assert "WARNING: site_epilogue ended early with status 1" in log
    verdict = log.index("failed with status 7 at iteration 0 (began at 0): back into the queue")
    assert log.index("the verdict is requeued") > verdict


BROKEN_PROLOGUE = """\
case ${SLURM_RESTART_COUNT-0} in
0) set -e; false || true; cd "$SITE_DIRECTRY" ;;
1) exit 2 ;;
2) set -e; module() { return 3; }; module load nccl ;;
esac
"""


def test_a_broken_prologue_is_a_failure_that_is_requeued_until_the_third_attempt(
    slurm_cluster: SlurmCluster, tiny_run: Path
) -> None:
    """An unset variable, then an exit, then a command that fails."""
    job_id = submit_with_prologue(slurm_cluster, tiny_run, "train", BROKEN_PROLOGUE)
    assert slurm_cluster.wait(job_id) == "FAILED"
    log = log_of(tiny_run, job_id)
    said = ("SITE_DIRECTRY: unbound variable", "ended the job with status 2", "ended the job with status 3")
    assert [log.count(each) for each in said] == [1, 1, 1], log
    assert log.count("ERROR: site_prologue ended the job with status") == 3
    assert log.count("failed with status 1 at iteration 0 (began at 0): back into the queue") == 2
    assert "without progress beyond iteration 0; not requeued" in log.splitlines()[-1]


@pytest.mark.parametrize(
    ("stage", "last"), [("nccl-test", "the test came to no result"), ("node-health", "no node was checked")]
)
def test_a_broken_prologue_ends_another_stage_with_its_own_message(
    slurm_cluster: SlurmCluster, tiny_run: Path, stage: str, last: str
) -> None:
    job_id = submit_with_prologue(slurm_cluster, tiny_run, stage, "exit 0")
    assert slurm_cluster.wait(job_id) == "FAILED"
    log = (tiny_run.parent / "run" / f"{stage}-{job_id}.log").read_text()
    assert "ERROR: site_prologue ended the job with status 0" in log
    assert last in log.splitlines()[-1]


def submit_with_prologue(cluster: SlurmCluster, run: Path, stage: str, prologue: str) -> str:
    """The job of a stage whose site has this prologue."""
    templates = run.parent / "site" / "slurm"
    templates.mkdir(parents=True)
    block = f"{{% block site %}}\nsite_prologue() {{\n{prologue}\n}}\n{{% endblock %}}\n"
    (templates / f"{stage}.sbatch.j2").write_text(
        f'{{% extends "hpcgen/slurm/{stage}.sbatch.j2" %}}\n{block}'
    )
    command = ("render", stage, "-c", str(run), "--templates", str(templates.parent))
    return cluster.sbatch(hpcgen(*command, cwd=run.parent), cwd=run.parent)


HANGING = """\
{% extends "hpcgen/slurm/train.sbatch.j2" %}
{% block site %}
site_epilogue() {
    say "the epilogue begins: $verdict $exit_status"
    trap '' TERM
    /bin/sleep 300
}
{% endblock %}
"""


def test_an_epilogue_that_hangs_cannot_keep_a_canceled_job_from_its_conclusion(tiny_run: Path) -> None:
    """KillWait is Slurm's default here: the job must have concluded before."""
    if (reason := missing_slurm()) is not None:
        pytest.skip(reason)
    templates = tiny_run.parent / "site" / "slurm"
    templates.mkdir(parents=True)
    (templates / "train.sbatch.j2").write_text(HANGING)
    command = ("render", "train", "-c", str(tiny_run), "--templates", str(templates.parent))
    endless = ("--set=training.train_iters=100000", "--set=optimizer.lr_decay_iters=100000")
    script = hpcgen(*command, *endless, cwd=tiny_run.parent)
    with SlurmCluster(1, kill_wait_s=30) as cluster:
        short = short_sleeps(cluster, tiny_run.parent / "programs")
        job_id = cluster.sbatch(script, short, cwd=tiny_run.parent)
        wait_for_steps(tiny_run, 1)
        cluster.run("scancel", job_id)
        cluster.wait(job_id)
    log = log_of(tiny_run, job_id)
    assert "the epilogue begins" in log
    assert "WARNING: site_epilogue took too long and was ended" in log
    assert log.index("requeueing is Slurm's decision") < log.index("the epilogue begins: terminated 143")


def test_the_tensorboard_stage_answers_on_the_node_and_says_how_to_reach_it(
    slurm_cluster: SlurmCluster, tiny_run: Path, tmp_path: Path
) -> None:
    left = [Path(f"/tmp/hpcgen-{slurm_cluster.directory.name}-{number}") for number in (999998, 999999)]
    left[0].mkdir()
    os.utime(left[0], (time.time() - 3600,) * 2)  # a new one may be of a job that starts
    left[1].symlink_to(tmp_path)
    script = hpcgen("render", "tensorboard", "-c", str(tiny_run), cwd=tiny_run.parent)
    job_id = slurm_cluster.sbatch(script, "--hold", cwd=tiny_run.parent)
    log = tiny_run.parent / "run" / f"tensorboard-{job_id}.log"
    taken = socket.create_server(("127.0.0.1", 10_000 + int(job_id) % 20_000))
    try:
        slurm_cluster.run("scontrol", "release", job_id)
        end, page = time.monotonic() + PATIENCE_S, b""
        while time.monotonic() < end and b"TensorBoard" not in page:
            time.sleep(0.5)
            text = log.read_text() if log.exists() else ""
            if found := re.search(r"ssh -N -J LOGIN_HOST -L 6006:127.0.0.1:(\d+) (ndv5-\d)", text):
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{found[1]}/", timeout=5) as answer:
                        page = answer.read()
                except OSError:
                    continue
        assert b"TensorBoard" in page, text
        assert not left[0].exists(), "scratch of a job that is gone"
        assert left[1].is_symlink(), "nothing of ours"
    finally:
        taken.close()
        slurm_cluster.run("scancel", job_id)
        left[1].unlink()
    assert slurm_cluster.wait(job_id) == "CANCELLED"
