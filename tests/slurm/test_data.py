"""A corpus made by job arrays on a real Slurm: the same bytes whichever way they are started, and after a death."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data.data_runs import documents, json_lines, pairs, write_file
from tests.http_server import Behaviour, Handler, Server, cut, http_server, serve, status
from tests.patience import PATIENCE_S, wait_until
from tests.slurm import conftest
from tests.slurm.cluster import FINAL_STATES, SlurmCluster
from tests.slurm.conftest import HPCGEN, hpcgen

CHAIN = ("download", "extract", "concat", "tokenize")
SHORT_CHAIN = ("download", "prepare")
SECTIONS = """\
slurm:
  download: {num_tasks: 2}
  extract: {num_tasks: 2}
  concat: {num_tasks: 2}
  tokenize: {num_tasks: 2}
  prepare: {num_tasks: 2, array_parallelism: 1}
data:
  tokenizer: {kind: bytes}
  corpus:
    directory: corpus
    source: {url: {template: "SERVER/part-{index}.jsonl.zst", count: 3}}
    num_output_files: 2
"""


HELD = "/part-1.jsonl.zst"
"""The file that the server holds back on request. One task downloads it, another one the others."""


class BadDay:
    """Downloads are refused, broken off and kept back; a look at a file's size always works."""

    def __init__(self) -> None:
        self.asked_for = threading.Event()
        """Somebody waits for the file that is kept back."""
        self.released = threading.Event()
        self._bad_answers: dict[str, list[Behaviour]] = {}

    def __call__(self, handler: Handler, content: bytes) -> None:
        """Answers a request."""
        if handler.command == "HEAD" or handler.headers.get("Range") == "bytes=0-0":
            serve(handler, content)
            return
        if handler.file == HELD and not self.released.is_set():
            self.asked_for.set()
            self.released.wait(2 * PATIENCE_S)
        busy = status(503, {"Retry-After": "0"})
        bad = self._bad_answers.setdefault(handler.file, [busy, cut(len(content) // 2)])
        (bad.pop(0) if bad else serve)(handler, content)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Three files of a corpus."""
    with http_server() as server:
        for index in range(3):
            name = f"part-{index}.jsonl.zst"
            lines = json_lines(documents(40, seed=index), last_newline=index != 1)
            server.files[f"/{name}"] = write_file(tmp_path_factory.mktemp("files") / name, lines).read_bytes()
        yield server


def make_run(directory: Path, server: Server, python: str) -> Path:
    """A run file whose corpus is planned."""
    (directory / "cluster.yaml").write_text(conftest.profile_text(python))
    (directory / "run").mkdir()
    kept = [line for line in conftest.RUN.splitlines() if not line.startswith(("slurm:", "data:"))]
    run = directory / "run.yaml"
    run.write_text("\n".join([*kept, SECTIONS.replace("SERVER", server.url)]))
    hpcgen("data", "plan", "-c", str(run), cwd=directory)
    return run


@pytest.fixture(scope="module")
def made_here(tmp_path_factory: pytest.TempPathFactory, server: Server, stand_in: str) -> Path:
    """The corpus as this machine makes it without Slurm: downloaded, and prepared in one pass."""
    directory = tmp_path_factory.mktemp("here")
    run = make_run(directory, server, stand_in)
    hpcgen("submit", "download", "prepare", "-c", str(run), "--launcher=local", cwd=directory)
    return directory / "corpus"


def submit(run: Path, cluster: SlurmCluster, python: str, *stages: str) -> tuple[dict[str, str], str]:
    """Stage -> its job, and the output of the command."""
    done = subprocess.run(
        [python, *HPCGEN[1:], "submit", *stages, "-c", run],
        cwd=run.parent,
        env=cluster.env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {line.split()[1]: line.split()[0] for line in done.stdout.splitlines()}, done.stderr


def states(cluster: SlurmCluster, job_id: str) -> list[str]:
    """States of the tasks of an array, in order. Pending tasks share one state."""
    shown = cluster.run("scontrol", "--oneliner", "show", "job", job_id).stdout
    by_task = re.findall(r"ArrayTaskId=(\S+) .*?JobState=(\w+)", shown) or re.findall(
        r"()JobState=(\w+)", shown
    )
    return [state for _, state in sorted(by_task)]


def wait_for_array(cluster: SlurmCluster, run: Path, job_id: str) -> list[str]:
    wait_until(
        lambda: set(states(cluster, job_id)) <= FINAL_STATES,
        lambda: f"{states(cluster, job_id)}\n{logs(run)}\n{cluster.logs()}",
        interval_s=0.2,
    )
    return states(cluster, job_id)


def wait_for_all(cluster: SlurmCluster, run: Path, job_ids: dict[str, str]) -> None:
    for stage, job_id in job_ids.items():
        found = wait_for_array(cluster, run, job_id)
        assert set(found) == {"COMPLETED"}, f"{stage}: {found}\n{logs(run)}"


def logs(run: Path) -> str:
    """Logs of all jobs and tasks."""
    paths = [*(run.parent / "run").glob("*.log"), *(run.parent / "run/submitit").glob("*.out")]
    return "\n".join(f"== {path.name}\n{path.read_text()}" for path in sorted(paths))


def kill_processes_of(cluster: SlurmCluster, array_job_id: str, index: int) -> None:
    """kill -9 for every process of the task's step, as the kernel does it when memory runs out.

    Steps 0 and 1 look after the nodes.
    """
    marks = {f"SLURM_ARRAY_JOB_ID={array_job_id}", f"SLURM_ARRAY_TASK_ID={index}", "SLURM_STEP_ID=2"}
    marks.add(f"SLURM_CONF={cluster.env['SLURM_CONF']}")
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if marks <= set((process / "environ").read_text(errors="replace").split("\0")):
                os.kill(int(process.name), signal.SIGKILL)


def test_a_task_that_dies_is_the_only_one_submitted_again(
    slurm_cluster: SlurmCluster, server: Server, made_here: Path, stand_in: str, tmp_path: Path
) -> None:
    """download and prepare through submitit, one after the other."""
    run = make_run(tmp_path, server, stand_in)
    server.usually = day = BadDay()
    try:
        jobs, said = submit(run, slurm_cluster, stand_in, *SHORT_CHAIN)
        assert [line for line in said.splitlines() if " of " in line] == [
            f"{stage}: submitted 2 of 2 tasks" for stage in SHORT_CHAIN
        ]
        prepare = slurm_cluster.show(jobs["prepare"])
        assert prepare["ArrayTaskThrottle"] == "1"
        assert prepare["Dependency"].startswith(f"afterok:{jobs['download']}_*")
        assert day.asked_for.wait(PATIENCE_S), logs(run)
        kill_processes_of(slurm_cluster, jobs["download"], index=1)
        assert wait_for_array(slurm_cluster, run, jobs["download"]) == ["COMPLETED", "FAILED"], logs(run)
    finally:
        day.released.set()
    assert set(wait_for_array(slurm_cluster, run, jobs["prepare"])) == {"CANCELLED"}
    assert "task 0 of 2 is done" in (tmp_path / "run" / f"download-{jobs['download']}_0.log").read_text()
    assert (
        "task 1 of 2 failed with status "
        in (tmp_path / "run" / f"download-{jobs['download']}_1.log").read_text()
    )

    jobs, said = submit(run, slurm_cluster, stand_in, *SHORT_CHAIN)
    assert "download: submitted 1 of 2 tasks; the others have nothing to do\n" in said
    wait_for_all(slurm_cluster, run, jobs)
    assert "task 1 of 2 is done" in (tmp_path / "run" / f"download-{jobs['download']}_0.log").read_text()
    assert pairs(tmp_path / "corpus") == pairs(made_here)

    requests = server.asked(HELD)
    jobs, said = submit(run, slurm_cluster, stand_in, *SHORT_CHAIN)
    assert server.asked(HELD) == requests
    assert jobs == {}
    assert said.splitlines() == [f"{stage}: complete; not submitted" for stage in SHORT_CHAIN]


@pytest.mark.slow
def test_rendered_scripts_make_the_same_bytes(
    slurm_cluster: SlurmCluster, server: Server, made_here: Path, stand_in: str, tmp_path: Path
) -> None:
    """hpcgen render STAGE | sbatch, with another number of tasks."""
    run = make_run(tmp_path, server, stand_in)
    jobs: dict[str, str] = {}
    for stage in CHAIN:
        script = hpcgen("render", stage, "-c", str(run), f"--set=slurm.{stage}.num_tasks=1", cwd=tmp_path)
        after = [f"--dependency=afterok:{jobs[before]}" for before in list(jobs)[-1:]]
        jobs[stage] = slurm_cluster.sbatch(script, *after, cwd=tmp_path)
    wait_for_all(slurm_cluster, run, jobs)
    assert pairs(tmp_path / "corpus") == pairs(made_here)


def test_prepare_makes_the_same_bytes_and_again_what_is_missing(
    slurm_cluster: SlurmCluster, server: Server, made_here: Path, stand_in: str, tmp_path: Path
) -> None:
    run = make_run(tmp_path, server, stand_in)
    shutil.copytree(made_here / "download", tmp_path / "corpus/download")
    script = hpcgen("render", "prepare", "-c", str(run), cwd=tmp_path)
    wait_for_all(slurm_cluster, run, {"prepare": slurm_cluster.sbatch(script, cwd=tmp_path)})
    assert pairs(tmp_path / "corpus") == pairs(made_here)
    log = sorted((tmp_path / "run").glob("prepare-*_1.log"))[0].read_text()
    assert "task 1 of 2 is done" in log

    (tmp_path / "corpus/tokens/corpus-00001-of-00002.bin").unlink()
    missing = hpcgen("data", "status", "--missing=prepare", "-c", str(run), cwd=tmp_path).strip()
    again = slurm_cluster.sbatch(script, f"--array={missing}", cwd=tmp_path)
    wait_for_all(slurm_cluster, run, {"prepare": again})
    assert [path.name for path in (tmp_path / "run").glob(f"prepare-{again}_*")] == [f"prepare-{again}_1.log"]
    assert pairs(tmp_path / "corpus") == pairs(made_here)
