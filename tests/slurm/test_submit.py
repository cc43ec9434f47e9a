"""Stages submitted through submitit, to Slurm and on this machine."""

from __future__ import annotations

import getpass
import io
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

import pytest
import zstandard
from submitit.slurm.slurm import _make_sbatch_string

import hpcgen as interface
from hpcgen.slurm import sbatch
from hpcgen.slurm.refusal import advice
from hpcgen.slurm.rendering.script import CALL, Script, render_stage
from hpcgen.slurm.submit import submitit_parameters
from tests.patience import PATIENCE_S, wait_until
from tests.slurm.cluster import SlurmCluster
from tests.slurm.conftest import HPCGEN, TP2_PP2, TWO_RANKS, curve, hpcgen, log_of, wait_for_steps


@pytest.fixture
def on_cluster(slurm_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> SlurmCluster:
    """This process talks to the private cluster, as a login shell would."""
    for name, value in slurm_cluster.env.items():
        monkeypatch.setenv(name, value)
    return slurm_cluster


def test_submitting_from_python_trains_on_both_nodes_on_the_same_curve(
    on_cluster: SlurmCluster,
    tiny_run: Path,
    single_process_curve: dict[int, tuple[float, float]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PYXIS_CONTAINER_IMAGE", "/nowhere.sqsh")  # pyxis would start the batch script in it
    plan = interface.plan(interface.load_run(tiny_run, [*TWO_RANKS, TP2_PP2[1]]))
    [job] = interface.submit(plan)
    assert on_cluster.wait(job.job_id) == "COMPLETED", log_of(tiny_run, job.job_id)
    assert job.submitit_job.results() == [None] * 2
    assert "PYXIS_CONTAINER_IMAGE" in capsys.readouterr().err
    assert "PYXIS_CONTAINER_IMAGE" not in job.log.read_text()
    assert os.environ["PYXIS_CONTAINER_IMAGE"] == "/nowhere.sqsh"
    found = curve(tiny_run)
    assert found.keys() == single_process_curve.keys()
    for iteration, expected in single_process_curve.items():
        assert found[iteration] == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_a_warned_job_of_submitit_requeues_itself_and_resumes(
    on_cluster: SlurmCluster, tiny_run: Path
) -> None:
    longer = ("training.train_iters=80", "optimizer.lr_decay_iters=80", "checkpoint.save_interval=1000")
    run = interface.load_run(tiny_run, longer)
    [job] = interface.submit(interface.plan(run))
    wait_for_steps(tiny_run, 3)
    on_cluster.run("scancel", "--batch", "--signal=USR2", job.job_id)
    assert on_cluster.wait(job.job_id) == "COMPLETED", log_of(tiny_run, job.job_id)
    assert "back into the queue (restart 1 of at most 100)" in log_of(tiny_run, job.job_id)
    assert len(curve(tiny_run)) == 80


def test_a_mistake_found_by_the_trainer_is_not_retried_through_submitit(
    on_cluster: SlurmCluster, tiny_run: Path
) -> None:
    """Two ranks on two nodes, so that srun reports another status than the trainer's."""
    torn = tiny_run.parent / "old"
    torn.mkdir()
    (torn / "latest_checkpointed_iteration.txt").write_text("torn")
    run = interface.load_run(tiny_run, [f"checkpoint.load={torn}", "slurm.train.nodes=2"])
    [job] = interface.submit(interface.plan(run))
    assert on_cluster.wait(job.job_id) == "FAILED"
    log = job.log.read_text()
    assert f"not requeued, since it would fail again: checkpoint.load = '{torn}' holds no" in log
    assert f"the tasks' own logs, once they run: {tiny_run.parent}/run/submitit/{job.job_id}_*_log.out" in log
    assert "back into the queue" not in log


CORPUS = "data.corpus={directory: corpus, source: {directory: text}, num_output_files: 2}"
"""In place of pairs that are there."""


def plan_corpus(run: Path, copies: int = 1) -> tuple[str, ...]:
    """Options for a corpus of one compressed file, which is planned: a small text, some times over."""
    (run.parent / "text").mkdir()
    hpcgen("data", "sample", "sample.jsonl", "--max-mb=0.3", cwd=run.parent)
    text = (run.parent / "sample.jsonl").read_bytes() * copies
    (run.parent / "text" / "sample.jsonl.zst").write_bytes(zstandard.compress(text))
    options = ("-c", str(run), "--set", CORPUS, "--set", "data.datasets=[]")
    hpcgen("data", "plan", *options, cwd=run.parent)
    return options


def test_training_waits_for_its_corpus_the_index_cache_and_the_memory_test(
    on_cluster: SlurmCluster, tiny_run: Path
) -> None:
    options = plan_corpus(tiny_run)
    short = ("--set", "training.train_iters=2", "--set", "optimizer.lr_decay_iters=3")
    stages = ("prepare", "index-cache", "memory-test", "train")
    lines = hpcgen("submit", *stages, *options, *short, cwd=tiny_run.parent).splitlines()
    jobs = {stage: job_id for job_id, stage, _ in map(str.split, lines)}
    assert tuple(jobs) == stages
    assert on_cluster.show(jobs["index-cache"])["Dependency"].startswith(f"afterok:{jobs['prepare']}")
    for job_id in jobs.values():
        assert on_cluster.wait(job_id) == "COMPLETED", log_of(tiny_run, job_id)
    assert len(curve(tiny_run)) == 2
    memory_test = tiny_run.parent / "run" / "memory-test.json"
    [stage] = json.loads(memory_test.read_text())["stages"]
    assert (stage["rank"], stage["error"]) == (0, "")


def test_only_the_owner_can_read_or_write_pickles(on_cluster: SlurmCluster, tiny_run: Path) -> None:
    run = interface.load_run(tiny_run, ["training.train_iters=1", "optimizer.lr_decay_iters=3"])
    [job] = interface.submit(interface.plan(run))
    assert on_cluster.wait(job.job_id) == "COMPLETED", log_of(tiny_run, job.job_id)
    folder = tiny_run.parent / "run" / "submitit"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o077 for path in folder.iterdir()} == {0}


def test_a_shared_run_has_no_pickles(on_cluster: SlurmCluster, tiny_run: Path) -> None:
    """Another user could replace them. The jobs run the commands of their scripts."""
    short = ("share=group", "training.train_iters=1", "optimizer.lr_decay_iters=3")
    options = plan_corpus(tiny_run)
    lines = hpcgen(
        "submit", "prepare", "train", *options, *(f"--set={value}" for value in short), cwd=tiny_run.parent
    )
    for job_id in (line.split()[0] for line in lines.splitlines()):
        assert on_cluster.wait(job_id) == "COMPLETED", log_of(tiny_run, job_id)
    run_dir = tiny_run.parent / "run"
    assert len(curve(tiny_run)) == 1
    assert not [*run_dir.glob("submitit*"), *run_dir.rglob("*.pkl")]


AZURE = """\
name: big
cluster: azure-ndv5
preset: 175b
paths: {run_dir: /absent/runs/big}
secrets: [WANDB_API_KEY]
slurm: {train: {nodes: 16, time: 2-00:00:00, account: team, extra_directives: [--mail-type=FAIL]}}
data: {datasets: [{prefix: /absent/data/corpus}]}
training: {train_iters: 100000}
"""


def directives(text: str) -> set[str]:
    return {
        line.replace("'", "").replace('"', "") for line in text.splitlines() if line.startswith("#SBATCH")
    }


def test_submitit_and_the_rendered_script_request_the_same_resources(tmp_path: Path) -> None:
    """Resources, environment, container flags and signals, for pyxis on 16 nodes."""
    run = tmp_path / "big.yaml"
    run.write_text(AZURE)
    plan = interface.plan(interface.load_run(run))
    stage, script = plan.stages["train"], render_stage(plan, "train")
    command = f"{stage.python} -u -m submitit.core._submit {tmp_path}"
    theirs = _make_sbatch_string(command, tmp_path, **submitit_parameters(stage, script, None))
    assert directives(theirs) == directives(script.text)
    assert_the_same_job(script, theirs)


CORPUS_ON_AZURE = """
  corpus:
    directory: /absent/corpus
    source: {huggingface: {repo_id: owner/corpus}, token_variable: HF_TOKEN}
    num_output_files: 72
"""


@pytest.mark.parametrize("stage_name", ["download", "prepare"])
@pytest.mark.parametrize(
    ("tasks", "array"), [(tuple(range(12)), "--array=0-11%3"), ((2, 5, 7), "--array=0-2%3"), ((5,), None)]
)
def test_a_complete_and_a_partial_array_request_the_same_resources(
    tmp_path: Path, stage_name: str, tasks: tuple[int, ...], array: str | None
) -> None:
    """submitit counts the tasks that it is given from 0, and makes no array of a single one; nothing else differs."""
    run = tmp_path / "big.yaml"
    sections = f"slurm: {{{stage_name}: {{num_tasks: 12, array_parallelism: 3, mem: 64G}}}}"
    run.write_text(
        re.sub("(?m)^slurm: .*$", sections, AZURE).replace(
            "{datasets: [{prefix: /absent/data/corpus}]}", CORPUS_ON_AZURE
        )
    )
    plan = interface.plan(interface.load_run(run), [stage_name])
    stage, script = plan.stages[stage_name], render_stage(plan, stage_name)
    assert "#SBATCH --array=0-11%3" in directives(script.text)
    parameters = submitit_parameters(stage, script, None, tasks)
    command = f"{stage.python} -u -m submitit.core._submit {tmp_path}"
    count = {"map_count": len(tasks)} if len(tasks) > 1 else {}
    theirs = _make_sbatch_string(command, tmp_path, **count, **parameters)
    # near the time limit submitit's tasks get a signal, which they ignore (hpcgen.slurm.tasks)
    added = {"#SBATCH --signal=USR2@90", *([f"#SBATCH {array}"] if array else [])}
    assert (
        directives(theirs)
        - directives(script.text)
        - {f"#SBATCH --output=/absent/runs/big/{stage_name}-%j_0.log"}
        <= added
    )
    missed = directives(script.text) - directives(theirs)
    assert {line.split("=")[0] for line in missed} <= {"#SBATCH --array", "#SBATCH --output"}
    assert ("#SBATCH --array=0-11%3" in missed) == (len(tasks) < 12)
    assert f"task_ids=({' '.join(map(str, tasks))})" in theirs
    assert_the_same_job(script, theirs)


def assert_the_same_job(script: Script, theirs: str) -> None:
    """Every line between the directives and the call of `main`, whose place submitit's launch line takes."""
    ours = [line for line in script.text.splitlines() if not line.startswith("#SBATCH")]
    assert ours[-1] == CALL
    assert "\n".join(ours[1:-1]) in theirs
    assert CALL not in theirs.splitlines()
    *_, launch = [line for line in theirs.splitlines() if line]
    assert re.fullmatch(r"srun --unbuffered --output \S+ --hpcgen-task python3 -u -m submitit\S+ \S+", launch)


def test_the_quickstart_runs_without_slurm(tiny_run: Path) -> None:
    """submit --launcher local: the corpus, training, the loss as text and as a picture, and the paths of all files."""
    options = plan_corpus(tiny_run)
    out = hpcgen("submit", "prepare", "train", *options, "--launcher=local", cwd=tiny_run.parent)
    losses = [loss for loss, _ in curve(tiny_run).values()]
    assert losses[-1] < losses[0]
    run_dir = tiny_run.parent / "run"
    assert (run_dir / "loss.png").read_bytes().startswith(b"\x89PNG")
    last = out.strip().splitlines()[-1]
    assert last.startswith(f"run {run_dir}: checkpoints, metrics.jsonl, tensorboard")


def test_two_ways_to_the_same_files_are_refused(tiny_run: Path) -> None:
    plan = interface.plan(
        interface.load_run(tiny_run, [CORPUS]), ["tokenize", "prepare"], exists=lambda path: True
    )
    with pytest.raises(interface.HpcgenError, match="tokenize and prepare produce the same files"):
        interface.submit(plan)


def test_a_failed_local_stage_shows_the_end_of_its_log_and_exits_1(tiny_run: Path, stand_in: str) -> None:
    prefix = (
        next(line for line in tiny_run.read_text().splitlines() if "prefix" in line)
        .split("prefix: ")[1]
        .split("}")[0]
    )
    linked = tiny_run.parent / "linked"
    for suffix in (".idx", ".bin"):
        linked.with_suffix(suffix).symlink_to(f"{prefix}{suffix}")
    # one pair under two names, which the trainer finds
    datasets = ("--set", f"data.train=[{{prefix: {prefix}}}]", "--set", f"data.valid=[{{prefix: {linked}}}]")
    done = subprocess.run(
        [
            stand_in,
            *HPCGEN[1:],
            "submit",
            "train",
            "-c",
            tiny_run,
            "--launcher=local",
            "--set",
            "data.datasets=[]",
            "--set",
            "data.split=99990,8,2",
            *datasets,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "stage train failed (task 0); its log is" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_data_stage_that_is_ended_leaves_no_process_and_no_private_file(tiny_run: Path, name: str) -> None:
    """In the middle of a pair, by Ctrl-C, which a terminal sends to all, or by SIGTERM to the command alone."""
    options = plan_corpus(tiny_run, copies=60)
    slowly = ("--set", "data.tokenizer={kind: gpt2}", "--set", "data.corpus.verify_fraction=0.99")
    pairs = tiny_run.parent / "corpus" / "tokens"
    with on_this_machine("prepare", *options, *slowly, cwd=tiny_run.parent) as process:
        wait_until(lambda: process.poll() is not None or bool(list(pairs.glob(".*.tmp"))))
        (process.send_signal if name == "SIGTERM" else ctrl_c(process))(signal.Signals[name])
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == {"SIGINT": 130, "SIGTERM": 143}[name]
        assert "Traceback" not in errors
        wait_until(lambda: not of_session(process.pid))
    assert list(pairs.rglob("*")) == []


def test_the_second_ctrl_c_ends_a_training_that_hangs(real_run: Path) -> None:
    """Two ranks, one of which hangs: they cannot save."""
    with on_this_machine(
        "train", "-c", str(real_run), "--set=slurm.train.ntasks_per_node=2", cwd=real_run.parent
    ) as process:
        wait_until(lambda: process.poll() is not None or len(ranks(process.pid)) == 2)
        os.kill(ranks(process.pid)[0], signal.SIGSTOP)
        ctrl_c(process)(signal.SIGINT)
        assert process.stderr is not None
        while "interrupt again to end at once" not in (line := process.stderr.readline()):
            assert line, "it has ended"
        ctrl_c(process)(signal.SIGINT)
        assert process.wait(timeout=PATIENCE_S) == 130
        wait_until(lambda: not of_session(process.pid))


@contextmanager
def on_this_machine(*arguments: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """`hpcgen submit --launcher local`, a session of its own, of which nothing is left at the end."""
    process = subprocess.Popen(
        [*HPCGEN, "submit", *arguments, "--launcher=local"],
        cwd=cwd,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            for pid in of_session(process.pid):
                os.kill(pid, signal.SIGKILL)


def ctrl_c(process: subprocess.Popen[str]) -> Callable[[signal.Signals], None]:
    """Sends a signal to all processes of the terminal's foreground."""
    return lambda number: os.killpg(process.pid, number)


def of_session(leader: int) -> dict[int, str]:
    """Number and command line of the processes of a session that run."""
    found = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, session = (directory / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                found[int(directory.name)] = (directory / "cmdline").read_text()
        except OSError:
            continue
    return found


def ranks(leader: int) -> list[int]:
    """Processes in which submitit runs the stage."""
    return sorted(pid for pid, words in of_session(leader).items() if "submitit.core._submit" in words)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("slurm.train.partition=nope", "slurm.train.partition = nope (--set slurm.train.partition)"),
        (
            "slurm.defaults.reservation=r1",
            "slurm.defaults.reservation = r1 (--set slurm.defaults.reservation)",
        ),
        ("slurm.train.constraint=a100", "slurm.train.constraint = a100 (--set slurm.train.constraint)"),
        ("slurm.train.mem=9000G", "slurm.train.mem = 9000G (--set slurm.train.mem)"),
        (
            "slurm.train.extra_directives=[--licenses=none]",
            "slurm.train.extra_directives = --licenses=none (--set slurm.train.extra_directives)",
        ),
    ],
)
def test_the_answer_of_slurm_comes_with_the_key_that_decides_it(
    on_cluster: SlurmCluster, tiny_run: Path, override: str, key: str
) -> None:
    run = interface.load_run(tiny_run, [override])
    with pytest.raises(interface.HpcgenError, match=r"stage train was not submitted: sbatch: ") as found:
        interface.submit(interface.plan(run))
    assert re.search(f"; this depends on .*{re.escape(key)}", str(found.value)), str(found.value)


def test_a_limit_of_jobs_in_the_queue_leaves_the_earlier_ones_and_says_what_to_do(
    accounting_cluster: SlurmCluster,
    tiny_run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def limit(number: int) -> None:
        accounting_cluster.run(
            "sacctmgr", "-i", "modify", "user", getpass.getuser(), "set", f"MaxSubmitJobs={number}"
        )

    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, accounting_cluster.env[name])
    limit(1)
    held = interface.load_run(tiny_run, ["slurm.defaults.extra_directives=[--hold]"])
    with pytest.raises(interface.HpcgenError, match="AssocMaxSubmitJobLimit") as found:
        interface.submit(interface.plan(held, ["index-cache", "train"]))
    limit(-1)
    assert (
        "submit again when jobs have ended (squeue --me); this depends on slurm.train.qos (not set)"
        in str(found.value)
    )
    [job_id] = re.findall(r"^already queued: (\d+) \(index-cache\)", capsys.readouterr().err, re.MULTILINE)
    accounting_cluster.run("scancel", job_id)


def test_an_array_that_slurm_finds_too_large_names_the_profile(tiny_run: Path) -> None:
    plan = interface.plan(interface.load_run(tiny_run))
    answer = "sbatch: error: Batch job submission failed: Invalid job array specification"
    assert advice(answer, plan, plan.stages["train"]) == (
        f"set max_array_size in the cluster profile (1001 now, {tiny_run.parent}/cluster.yaml) to MaxArraySize of "
        "`scontrol show config`"
    )


@pytest.mark.parametrize(
    ("answer", "keys"),
    [
        ("Requested time limit is invalid (missing or exceeds some limit)", ["time"]),
        ("Socket timed out on send/recv operation", []),
        ("Node expected shutdown during run time", []),
        ("Invalid account or account/partition combination specified", ["account"]),
        ("Invalid wckey specification", ["extra_directives"]),
        ("QOSMaxWallDurationPerJobLimit\nJob violates accounting/QOS policy", ["time"]),
        ("QOSMaxSubmitJobPerUserLimit\nJob violates accounting/QOS policy", ["qos"]),
        ("AssocGrpSubmitJobsLimit\nJob violates accounting/QOS policy", ["qos"]),
        ("AssocMaxNodePerJobLimit\nJob violates accounting/QOS policy", ["nodes"]),
    ],
)
def test_advice_names_the_first_key_that_decides_also_if_it_is_not_set(
    tiny_run: Path, answer: str, keys: list[str]
) -> None:
    """Messages of slurm_errno.c, and reasons of job limits."""
    plan = interface.plan(interface.load_run(tiny_run))
    found = advice(f"sbatch: error: Batch job submission failed: {answer}", plan, plan.stages["train"])
    assert re.findall(r"slurm\.(?:train|defaults)\.(\w+) (?:=|\(not set\))", found) == keys
    assert " =  (" not in found


@pytest.mark.parametrize(
    ("sbatch", "message"),
    [
        (r"printf 'sbatch: error: Zugriff verweigert f\xfcr x\n' >&2; exit 1", r"f\xfcr x\n'"),
        (r"printf 'Submitted batch job 7\xff\n'", r"not UTF-8: b'Submitted batch job 7"),
        ("kill -9 $$", "sbatch ended without a message"),
    ],
    ids=["refusal in Latin-1", "acceptance with garbage", "killed"],
)
def test_an_unreadable_answer_of_sbatch_is_shown(
    tiny_run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sbatch: str, message: str
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "sbatch").write_text(f"#!/bin/bash\n{sbatch}\n")
    (programs / "sbatch").chmod(0o700)
    (programs / "srun").symlink_to("sbatch")  # submitit looks for it
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    shown = io.StringIO()
    with redirect_stderr(shown), pytest.raises(interface.HpcgenError) as found:
        interface.submit(interface.plan(interface.load_run(tiny_run)))
    assert message in str(found.value)
    assert "Slurm may have accepted train before: look for" in shown.getvalue()


def test_a_silent_sbatch_is_said_to_be_waited_for(
    tiny_run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As one that retries because Slurm has no place for more jobs. It waits until the message is there."""
    programs, shown = tmp_path / "programs", tmp_path / "shown"
    programs.mkdir()
    (programs / "sbatch").write_text(
        f"#!/bin/bash\nuntil grep -q MaxJobCount {shown}; do sleep 0.1; done\necho Submitted batch job 7\n"
    )
    (programs / "sbatch").chmod(0o700)
    (programs / "srun").symlink_to("sbatch")  # submitit looks for it
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr(sbatch, "PATIENCE_S", 0.0)
    with shown.open("w") as stream, redirect_stderr(stream):
        [job] = interface.submit(interface.plan(interface.load_run(tiny_run)))
    assert job.job_id == "7"
    assert "waiting for sbatch to submit train." in shown.read_text()
