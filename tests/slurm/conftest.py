"""The real Slurm that every test in this folder may use, and a tiny GPT to train on it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcgen import api
from tests.patience import wait_until
from tests.slurm.cluster import SlurmCluster, missing_accounting, missing_slurm

HPCGEN = (sys.executable, "-m", "hpcgen")
"""The command as a process of its own, for tests of its signals and children."""

_forked = HPCGEN

CLUSTER = """\
extends: local
python: PYTHON
startup_time_s: 1
"""

RUN = """\
name: tiny
cluster: ./cluster.yaml
paths: {run_dir: run}
slurm: {train: {time: "5:00"}}
data: {tokenizer: {kind: bytes}, datasets: [{prefix: CORPUS}], split: "9,1,0", num_workers: 0}
model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4, seq_length: 64}
training: {micro_batch_size: 4, global_batch_size: 8, train_iters: 8, precision: fp32, eval_iters: 1}
optimizer: {lr: 1.0e-3, lr_warmup_iters: 2, lr_decay_iters: 8}
checkpoint: {save_interval: 4}
"""

TRAINERS = ("trainer\0--config", "submitit.core._submit")
"""The module that a rank runs with its first arguments: in a rendered script, and in a job of submitit."""
TWO_RANKS = ("slurm.train.nodes=2", "slurm.train.ntasks_per_node=1")
TWO_NODES = ("slurm.train.nodes=2", "slurm.train.ntasks_per_node=2")
TP2_PP2 = ("parallelism.tensor_model_parallel_size=2", "parallelism.pipeline_model_parallel_size=2")


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    """Two nodes with 8 GPUs each, started once for all tests; each test waits for the jobs it submits."""
    if (reason := missing_slurm()) is not None:
        pytest.skip(reason)
    with SlurmCluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def accounting_cluster() -> Iterator[SlurmCluster]:
    """Like `slurm_cluster`, with accounting (slurmdbd) for `sacct` and `sacctmgr`, and its limits."""
    if (reason := missing_slurm() or missing_accounting()) is not None:
        pytest.skip(reason)
    limits = "AccountingStorageEnforce=associations,limits,qos"
    with SlurmCluster(accounting=True, settings=[limits]) as cluster:
        yield cluster


@pytest.fixture(scope="session", autouse=True)
def fork_commands(stand_in: str) -> Iterator[None]:
    """Makes the function `hpcgen` run forks, and what they start with their own Python, such as a local training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "_forked", (stand_in, *HPCGEN[1:]))
        yield


@pytest.fixture(scope="session")
def byte_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prefix of a tokenized corpus: half a megabyte of the standard library, one id a byte."""
    directory = tmp_path_factory.mktemp("corpus")
    hpcgen("data", "sample", "corpus.jsonl", "--max-mb=0.5", cwd=directory)
    hpcgen("data", "tokenize", "corpus.jsonl", "--output-prefix=corpus", "--tokenizer=bytes", cwd=directory)
    return directory / "corpus"


@pytest.fixture
def tiny_run(tmp_path: Path, byte_corpus: Path, stand_in: str) -> Path:
    """A run file next to its cluster profile, and its run directory. Its ranks are stand-ins."""
    return make_run(tmp_path, byte_corpus, stand_in)


@pytest.fixture
def real_run(tmp_path: Path, byte_corpus: Path) -> Path:
    """Like `tiny_run`, with ranks that `python -m trainer` starts."""
    return make_run(tmp_path, byte_corpus)


@pytest.fixture(scope="session")
def single_process_run(tmp_path_factory: pytest.TempPathFactory, byte_corpus: Path, stand_in: str) -> Path:
    """The run file of a tiny run that one process has finished, without Slurm."""
    run = make_run(tmp_path_factory.mktemp("single"), byte_corpus, stand_in)
    stage = api.plan(api.load_run(run), ["train"]).stages["train"]
    config = run.parent / str(stage.kind.config_file)
    config.write_text(stage.files[config.name])
    environment = {**os.environ, **{variable.name: variable.value for variable in stage.environment}}
    subprocess.run([stand_in, *stage.arguments, "--config", config], env=environment, check=True)
    return run


@pytest.fixture(scope="session")
def single_process_curve(single_process_run: Path) -> dict[int, tuple[float, float]]:
    """Steps of the tiny run in one process."""
    return curve(single_process_run)


def profile_text(python: str | Path = sys.executable) -> str:
    """The text of a cluster profile with this Python."""
    return CLUSTER.replace("PYTHON", str(python))


def python_by_rank(directory: Path, rank: int, stand_in: str) -> str:
    """A program that is Python for this rank of a job, and the stand-in for the other ranks."""
    program = directory / "python-by-rank"
    program.write_text(
        f'#!/bin/bash\n[[ $SLURM_PROCID = {rank} ]] && exec {sys.executable} "$@"\nexec {stand_in} "$@"\n'
    )
    program.chmod(0o755)
    return str(program)


def make_run(directory: Path, corpus: Path, python: str = sys.executable) -> Path:
    (directory / "cluster.yaml").write_text(profile_text(python))
    (directory / "run").mkdir()
    run = directory / "run.yaml"
    run.write_text(RUN.replace("CORPUS", str(corpus)))
    return run


def hpcgen(*arguments: str, cwd: Path, env: dict[str, str] | None = None) -> str:
    """Runs the command as a user would; what it prints on standard output."""
    done = subprocess.run(
        [*_forked, *arguments],
        cwd=cwd,
        env=env or dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def render(run: Path, *overrides: str) -> str:
    """The script of the training stage."""
    return api.render(api.plan(api.load_run(run, overrides), ["train"]), "train")


def log_of(run: Path, job_id: str) -> str:
    """The job's log, and its tasks' logs where submitit wrote them apart."""
    tasks = sorted(run.parent.glob(f"run/submitit/{job_id}_*_log.out"))
    return "\n".join(path.read_text() for path in (run.parent / "run" / f"train-{job_id}.log", *tasks))


def curve(run: Path) -> dict[int, tuple[float, float]]:
    """Iteration -> loss and gradient norm."""
    lines = [json.loads(line) for line in (run.parent / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "step"]
    assert [step["iteration"] for step in steps] == list(range(1, len(steps) + 1)), (
        "each step stands there once"
    )
    return {step["iteration"]: (step["loss"], step["grad_norm"]) for step in steps}


def run_job(cluster: SlurmCluster, run: Path, *overrides: str) -> str:
    """Pipes the rendered script into sbatch and waits for the job's success; its log."""
    job_id = cluster.sbatch(render(run, *overrides), cwd=run.parent)
    state = cluster.wait(job_id)
    log = log_of(run, job_id)
    assert state == "COMPLETED", log
    return log


def program_first(cluster: SlurmCluster, directory: Path, name: str, text: str) -> str:
    """The option of sbatch with which the job finds a program of this name and text before Slurm's own."""
    directory.mkdir(exist_ok=True)
    program = directory / name
    program.write_text(text)
    program.chmod(0o755)
    return f"--export=ALL,PATH={directory}:{cluster.env['PATH']}"


def short_sleeps(cluster: SlurmCluster, directory: Path) -> str:
    """Like `program_first`: a sleep of a tenth of a second, for scripts that wait before they try again."""
    return program_first(cluster, directory, "sleep", "#!/bin/bash\nexec /bin/sleep 0.1\n")


def slow_requeue(cluster: SlurmCluster, directory: Path) -> str:
    """As `program_first`: a scontrol whose answer to a requeue comes after Slurm's SIGTERM, as on a busy controller."""
    scontrol = shutil.which("scontrol", path=cluster.env["PATH"])
    text = f"""\
#!/bin/bash
{scontrol} "$@" || exit
[[ $1 != requeue ]] || sleep 2
"""
    return program_first(cluster, directory / "slow", "scontrol", text)


def failing_requeue(cluster: SlurmCluster, directory: Path) -> str:
    """Like `short_sleeps`, with a scontrol that cannot requeue a job until the third call."""
    short_sleeps(cluster, directory)
    scontrol = shutil.which("scontrol", path=cluster.env["PATH"])
    text = f"""\
#!/bin/bash
if [[ $1 == requeue ]] && echo >>{directory}/asked && (($(wc -l <{directory}/asked) < 3)); then
    echo "slurm_requeue error: Unable to contact slurm controller (connect failure)" >&2
    exit 1
fi
exec {scontrol} "$@"
"""
    return program_first(cluster, directory, "scontrol", text)


def ranks_of(cluster: SlurmCluster, job_id: str) -> list[int]:
    """PIDs of a job's training processes, by rank."""
    found = {}
    job = {f"SLURM_JOB_ID={job_id}", f"SLURM_CONF={cluster.env['SLURM_CONF']}"}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (process / "cmdline").read_text()
            if not any(f"\0-m\0{program}\0" in command for program in TRAINERS):
                continue
            environ = (process / "environ").read_text(errors="replace").split("\0")
            if job <= set(environ) and any(each.startswith("SLURM_STEP_ID=") for each in environ):
                [rank] = [each for each in environ if each.startswith("SLURM_PROCID=")]
                found[int(rank.partition("=")[2])] = int(process.name)
    return [found[rank] for rank in sorted(found)]


def wait_for_steps(run: Path, count: int) -> None:
    """Waits until the metrics hold `count` steps."""
    metrics = run.parent / "run" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count('"event": "step"') >= count)
