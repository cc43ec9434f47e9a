"""Training that queues jobs of the stage evaluate. In most tests, a stand-in takes the place of the evaluator."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

import hpcgen as interface
from hpcgen import api
from tests.slurm.cluster import SlurmCluster
from tests.slurm.conftest import hpcgen, log_of, profile_text, program_first, render
from trainer.contract.evaluation import evaluated, read_result, result_file

EVALUATOR = """\
import json, os, re, sys
from pathlib import Path

fail_once = Path(__file__).with_name("fail-once")
if fail_once.exists():
    fail_once.unlink()
    sys.exit("failing once")
config = json.loads(Path(sys.argv[-1]).read_text())
results = Path(config["run_dir"], "evaluation")
results.mkdir(exist_ok=True)
for complete in sorted(Path(config["checkpoint"]).glob("iter_*/COMPLETE")):
    result = results / f"{complete.parent.name}.json"
    if int(complete.parent.name[5:]) % config["settings"]["every"] == 0 and not result.exists():
        result.write_text(json.dumps({"job": os.environ["SLURM_JOB_ID"], "variables": sorted(os.environ)}))
"""
"""A program with the files of trainer.evaluate, which computes nothing."""


@pytest.fixture
def evaluated_run(tiny_run: Path, byte_corpus: Path, stand_in: str) -> Path:
    """The tiny run with a save after every second step, an evaluation of every fourth, and the stand-in."""
    be_evaluator(tiny_run, f'exec {stand_in} "$@"')
    section = f"evaluation: {{every: 4, data: [{{name: text, prefix: {byte_corpus}}}]}}\n"
    section += "slurm: {train: {time: '5:00'}, evaluate: {time: '7:00'}}\n"
    text = re.sub(r"slurm: .*\n", "", tiny_run.read_text())
    tiny_run.write_text(text.replace("save_interval: 4", "save_interval: 2, keep_last: 1") + section)
    return tiny_run


def be_evaluator(run: Path, trainer: str) -> None:
    """Has the cluster's Python run EVALUATOR for the evaluator, and these shell commands for all else."""
    (run.parent / "evaluator.py").write_text(EVALUATOR)
    python = run.parent / "python"
    evaluator = f'exec {sys.executable} {run.parent}/evaluator.py "$@"'
    python.write_text(f"#!/bin/bash\n[[ $2 != trainer.evaluate ]] || {evaluator}\n{trainer}\n")
    python.chmod(0o755)
    (run.parent / "cluster.yaml").write_text(profile_text(python))


def queued(run: Path) -> dict[str, str]:
    """Checkpoint -> job that training queued for it, from its file."""
    lines = (run.parent / "run/evaluation/queued").read_text().splitlines()
    jobs = dict(line.split() for line in lines)
    assert len(jobs) == len(lines), lines
    return jobs


def checkpoints(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run.parent / "run/checkpoints").glob("iter_*"))


def completed(cluster: SlurmCluster, run: Path, job_id: str) -> str:
    """The log of a training job that has succeeded."""
    assert cluster.wait(job_id) == "COMPLETED", log_of(run, job_id)
    return log_of(run, job_id)


def test_checkpoints_are_kept_until_they_are_evaluated_and_sbatch_may_fail(
    slurm_cluster: SlurmCluster, evaluated_run: Path
) -> None:
    run_dir = evaluated_run.parent / "run"
    sbatch = '#!/bin/bash\necho "sbatch: error: Unable to contact slurm controller" >&2; exit 1\n'
    failing = program_first(slurm_cluster, evaluated_run.parent / "failing", "sbatch", sbatch)
    log = completed(
        slurm_cluster, evaluated_run, slurm_cluster.sbatch(render(evaluated_run), failing, cwd=run_dir)
    )
    assert "WARNING: no job queued to evaluate iter_0000004: sbatch: error: Unable to contact" in log
    assert checkpoints(evaluated_run) == [4, 8]
    assert not (run_dir / "evaluation").exists()

    plan = api.plan(api.load_run(evaluated_run), ["evaluate"])
    job_id = slurm_cluster.sbatch(api.render(plan, "evaluate"), cwd=run_dir)
    assert slurm_cluster.wait(job_id) == "COMPLETED"
    assert evaluated(run_dir) == {4, 8}

    longer = render(evaluated_run, "training.train_iters=12", "optimizer.lr_decay_iters=8")
    completed(slurm_cluster, evaluated_run, slurm_cluster.sbatch(longer, cwd=run_dir))
    assert checkpoints(evaluated_run) == [12]
    assert [*queued(evaluated_run)] == ["iter_0000012"]
    assert slurm_cluster.wait(queued(evaluated_run)["iter_0000012"]) == "COMPLETED"
    assert evaluated(run_dir) == {4, 8, 12}


def test_a_requeued_training_does_not_queue_an_evaluation_twice(
    slurm_cluster: SlurmCluster, evaluated_run: Path
) -> None:
    """In the first attempt, the job for iteration 4 fails. In the second one, the job for 8 also evaluates 4."""
    fail_once = evaluated_run.parent / "fail-once"
    fail_once.touch()
    run_dir = evaluated_run.parent / "run"
    script = render(evaluated_run)
    [fingerprint] = re.findall(r"^fingerprint=(\w+)$", script, re.MULTILINE)
    trainer = f"""\
save() {{ mkdir -p {run_dir}/checkpoints/$1; : >{run_dir}/checkpoints/$1/COMPLETE; }}
if [[ ! ${{SLURM_RESTART_COUNT-}} ]]; then
    save iter_0000002
    save iter_0000004
    while [[ -e {fail_once} ]]; do /bin/sleep 0.1; done
    echo 4 >{run_dir}/checkpoints/latest_checkpointed_iteration.txt
    exit 7
fi
save iter_0000008
printf '8\\n{fingerprint}\\n' >{run_dir}/DONE
"""
    be_evaluator(evaluated_run, trainer)
    often = program_first(
        slurm_cluster, evaluated_run.parent / "often", "sleep", "#!/bin/bash\nexec /bin/sleep 0.5\n"
    )
    job_id = slurm_cluster.sbatch(script, f"{often},SBATCH_TIMELIMIT=3", cwd=run_dir)
    log = completed(slurm_cluster, evaluated_run, job_id)
    assert "failed with status 7 at iteration 4" in log
    assert "WARNING" not in log
    jobs = queued(evaluated_run)
    assert [*jobs] == ["iter_0000004", "iter_0000008"]
    for evaluation, state in zip(jobs.values(), ("FAILED", "COMPLETED"), strict=True):
        assert slurm_cluster.wait(evaluation) == state
        assert slurm_cluster.show(evaluation)["TimeLimit"] == "00:07:00"
        assert slurm_cluster.show(evaluation)["JobName"] == "tiny-evaluate"
    assert evaluated(run_dir) == {4, 8}
    for iteration in (4, 8):
        result = json.loads((run_dir / f"evaluation/iter_{iteration:07}.json").read_text())
        assert result["job"] == jobs["iter_0000008"]
        assert not {"TRAINER_CONFIG", "TRAINER_STOP_FILE", "SBATCH_TIMELIMIT"} & set(result["variables"])


@pytest.mark.slow
def test_a_submitted_training_queues_the_same_jobs(
    slurm_cluster: SlurmCluster, evaluated_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in slurm_cluster.env.items():
        monkeypatch.setenv(name, value)
    run = interface.load_run(evaluated_run, ["training.train_iters=4"])
    [job] = interface.submit(interface.plan(run))
    completed(slurm_cluster, evaluated_run, job.job_id)
    [evaluation] = queued(evaluated_run).values()
    assert slurm_cluster.wait(evaluation) == "COMPLETED"
    assert evaluated(evaluated_run.parent / "run") == {4}


@pytest.mark.slow
def test_the_queued_job_computes_the_perplexity_of_the_checkpoint(
    slurm_cluster: SlurmCluster, evaluated_run: Path, stand_in: str
) -> None:
    run_dir = evaluated_run.parent / "run"
    (evaluated_run.parent / "cluster.yaml").write_text(profile_text(stand_in))
    script = render(evaluated_run, "training.train_iters=4", "evaluation.limit=8")
    completed(slurm_cluster, evaluated_run, slurm_cluster.sbatch(script, cwd=run_dir))
    [evaluation] = queued(evaluated_run).values()
    log = run_dir / f"evaluate-{evaluation}.log"
    assert slurm_cluster.wait(evaluation) == "COMPLETED", log.read_text()
    [text] = read_result(result_file(run_dir, 4)).data
    assert text.loss is not None
    assert 3 < text.loss < 7  # a model of bytes that has barely been trained: log(257) = 5.5


def test_the_newest_checkpoint_is_evaluated_on_this_machine(
    single_process_run: Path, byte_corpus: Path
) -> None:
    data = f"evaluation={{limit: 8, data: [{{name: text, prefix: {byte_corpus}}}]}}"
    arguments = ("submit", "evaluate", "-c", str(single_process_run), "--launcher=local", "--set", data)
    run_dir = single_process_run.parent / "run"
    out = hpcgen(*arguments, cwd=single_process_run.parent)
    assert out == f"evaluate: results are in {run_dir}/evaluation\n"
    assert evaluated(run_dir) == {8}


def test_an_evaluation_that_slurm_accepted_in_silence_is_not_queued_again(
    slurm_cluster: SlurmCluster, evaluated_run: Path
) -> None:
    """Each sbatch fails after Slurm accepted the job. squeue fails, then shows nothing. Training is requeued once."""
    run_dir = evaluated_run.parent / "run"
    programs = evaluated_run.parent / "late"
    path = slurm_cluster.env["PATH"]
    sbatch = f"""\
{shutil.which("sbatch", path=path)} --begin=now+1hour "$@" >>{run_dir}/accepted
echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2; exit 1
"""
    squeue = f"""\
[[ "$*" != *--states=all* || -e {programs}/asked ]] || {{ : >{programs}/asked; exit 1; }}
[[ "$*" != *--states=all* || ! -e {run_dir}/accepted || -e {programs}/silent ]] || {{ : >{programs}/silent; exit 0; }}
exec {shutil.which("squeue", path=path)} "$@"
"""
    for name, text in (("squeue", squeue), ("sleep", "exec /bin/sleep 0.2\n"), ("sbatch", sbatch)):
        late = program_first(slurm_cluster, programs, name, f"#!/bin/bash\n{text}")
    trainer = f"""\
mkdir -p {run_dir}/checkpoints/iter_0000004; : >{run_dir}/checkpoints/iter_0000004/COMPLETE
echo 4 >{run_dir}/checkpoints/latest_checkpointed_iteration.txt
until [[ -s {run_dir}/evaluation/queued ]]; do /bin/sleep 0.1; done
if [[ ! ${{SLURM_RESTART_COUNT-}} ]]; then rm {run_dir}/evaluation/queued; echo 4 >{run_dir}/STOPPED; exit 0; fi
printf '8\\n%s\\n' $(sed -n 's/^fingerprint=//p' {run_dir}/script) >{run_dir}/DONE
"""
    be_evaluator(evaluated_run, trainer)
    script = render(evaluated_run)
    (run_dir / "script").write_text(script)
    job_id = slurm_cluster.sbatch(script, late, cwd=run_dir)
    log = completed(slurm_cluster, evaluated_run, job_id)
    [accepted] = (run_dir / "accepted").read_text().split()
    assert queued(evaluated_run) == {"iter_0000004": accepted}
    assert log.count(f"queued job {accepted} to evaluate iter_0000004") == 2
    warning = "WARNING: no job queued to evaluate iter_0000004: "
    assert f"{warning}sbatch: error: Batch job submission failed" in log
    assert f"{warning}squeue does not show this job" in log
    slurm_cluster.run("scancel", accepted)
