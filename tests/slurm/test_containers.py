"""Every stage in real containers, through pyxis and through enroot alone, on a node set up as Azure's are.

They need enroot and mksquashfs on PATH and pyxis's plugin (make test-containers says how), and no network. One node:
two slurmd of one machine would share enroot's directories.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hpcgen.config.container import Mount
from hpcgen.planning.runtimes import CONTAINER_NAME, Container
from tests.enroot.registry import registry
from tests.runs import write_yaml
from tests.slurm.cluster import SlurmCluster
from tests.slurm.conftest import RUN, curve, hpcgen, log_of, profile_text, wait_for_steps
from tests.slurm.containers import (
    PLUGIN,
    ROOT,
    Node,
    extra_hooks,
    host_mounts,
    make_node,
    missing_containers,
    shown_of_host,
)

pytestmark = pytest.mark.slow
if (reason := missing_containers()) is not None:
    pytest.skip(reason, allow_module_level=True)

TP2 = ("slurm.train.ntasks_per_node=2", "parallelism.tensor_model_parallel_size=2")
LONG = ("training.train_iters=80", "optimizer.lr_decay_iters=80", "checkpoint.save_interval=1000")
RENDEZVOUS_AND_THREADS = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "OMP_NUM_THREADS")

# In place of Python: writes down what a task sees, then is Python. Each attempt to write must leave nothing behind.
PYTHON = """\
#!/bin/bash
if [[ "$*" != *--versions* ]]; then
    seen={run}/seen-$SLURM_PROCID
    tries() {{ if "$@" 2>/dev/null; then echo yes; else echo no; fi; }}
    {{
        echo "workdir $PWD"
        echo "home_is_mounted $(tries test -e {home}/.local)"
        echo "rootfs_is_written $(tries touch /written)"
        echo "code_is_written $(tries touch {code}/written)"
        echo "run_is_written $(tries touch {run}/written)"
        echo "scratch_is_written $(tries touch "$HOME/written" "$TMPDIR/written")"
    }} >"$seen.txt"
    env -0 >"$seen.env"
else
    : >{run}/asked-for-versions
fi
exec {python} "$@"
"""


@dataclass(frozen=True)
class Seen:
    """Report of one task in its container."""

    rank: int
    said: dict[str, str]
    environment: dict[str, str]


@dataclass(frozen=True)
class Trained:
    """A finished job of two ranks."""

    job_id: str
    run: Path
    log: str
    tasks: list[Seen]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Node:
    return make_node(tmp_path_factory.mktemp("node"))


@pytest.fixture(scope="module")
def container_cluster(node: Node) -> Iterator[SlurmCluster]:
    plugin = f"required {os.environ[PLUGIN]} runtime_path={{directory}}/pyxis"
    with SlurmCluster(1, plugins=[plugin], programs=node.programs, kill_wait_s=30) as cluster:
        cluster.env["HOME"] = str(node.home)
        yield cluster


@pytest.fixture(scope="module", params=["pyxis", "enroot"])
def runtime(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def trained(
    runtime: str,
    node: Node,
    container_cluster: SlurmCluster,
    byte_corpus: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Trained:
    """Tensor parallelism of two on one node, through the rendered script."""
    run = make_run(tmp_path_factory.mktemp(runtime), node, runtime, byte_corpus)
    job_id = submit(container_cluster, run, "train", *TP2)
    assert container_cluster.wait(job_id) == "COMPLETED", log_of(run, job_id)
    return Trained(job_id, run, log_of(run, job_id), seen_by_tasks(run))


@pytest.fixture
def run(tmp_path: Path, node: Node, runtime: str, byte_corpus: Path) -> Path:
    """A run file next to its cluster profile, for one task in a container."""
    return make_run(tmp_path, node, runtime, byte_corpus)


@pytest.fixture
def on_cluster(container_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> SlurmCluster:
    """This process talks to the private cluster, as a login shell would."""
    for name, value in container_cluster.env.items():
        monkeypatch.setenv(name, value)
    return container_cluster


def make_run(directory: Path, node: Node, runtime: str, corpus: Path, **container: Any) -> Path:
    """The tiny run, in a container whose Python writes down what it sees."""
    for name in ("run", "bin", "scratch"):
        (directory / name).mkdir()
    profile = dict(line.split(": ", 1) for line in profile_text().splitlines())
    python = directory / "bin/python"
    words = {"run": directory / "run", "home": node.home, "code": ROOT, "python": profile["python"]}
    python.write_text(PYTHON.format(**words))
    python.chmod(0o755)
    container = {
        "runtime": runtime,
        "image": str(node.image),
        "mounts": [*host_mounts(), {"source": str(python.parent), "read_only": True}],
        **container,
    }
    values = {
        **profile,
        "python": str(python),
        "scratch": str(directory / "scratch"),
        "startup_time_s": 1,
        "environment": {"NCCL_DEBUG": "JOB", "WITH_SPACES": ' a "b" $HOME \\ # c'},
        "container": container,
    }
    write_yaml(directory / "cluster.yaml", values)
    run = directory / "run.yaml"
    run.write_text(RUN.replace("CORPUS", str(corpus)))
    return run


def submit(cluster: SlurmCluster, run: Path, stage: str, *overrides: str) -> str:
    """Pipes the rendered script into sbatch; the job id."""
    script = hpcgen("render", stage, "-c", str(run), *(f"--set={each}" for each in overrides), cwd=run.parent)
    return cluster.sbatch(script, cwd=run.parent)


def planned_corpus(run: Path) -> str:
    """The override that names a planned corpus of one output file, so that its array has one task."""
    override = "data.corpus={directory: data, source: {directory: text}, num_output_files: 1}"
    if not (run.parent / "text").exists():
        (run.parent / "text").mkdir()
        lines = "".join(json.dumps({"text": f"line {index}"}) + "\n" for index in range(20))
        (run.parent / "text" / "corpus.jsonl").write_text(lines)
        hpcgen("data", "plan", "-c", str(run), f"--set={override}", cwd=run.parent)
    return override


def prepare(cluster: SlurmCluster, run: Path, *overrides: str) -> tuple[str, str]:
    """Runs the stage prepare, a cheap one: nothing of it imports torch. The job's state and its log."""
    job_id = submit(cluster, run, "prepare", planned_corpus(run), *overrides)
    state = cluster.wait(job_id)
    return state, (run.parent / "run" / f"prepare-{job_id}_0.log").read_text()


def seen_by_tasks(run: Path) -> list[Seen]:
    """Report of each task, by rank."""
    found = []
    for path in sorted((run.parent / "run").glob("seen-*.env")):
        said = dict(line.split(" ", 1) for line in path.with_suffix(".txt").read_text().splitlines())
        pairs = (pair.partition("=") for pair in path.read_text().split("\0") if pair)
        environment = {name: value for name, _, value in pairs}
        found.append(Seen(int(path.stem.rpartition("-")[2]), said, environment))
    return found


def record(image: Path, content: bytes) -> None:
    """Write the record of an image with this content, like the image stage, with the file's size and time."""
    status = image.stat()
    lines = {
        "sha256": hashlib.sha256(content).hexdigest(),
        "size": status.st_size,
        "mtime": int(status.st_mtime),
    }
    image.with_name(image.name + ".record").write_text("".join(f"{k} {v}\n" for k, v in lines.items()))


def own_image(run: Path, node: Node) -> Path:
    """A copy of the image with its record, named by the run."""
    image = run.parent / "own.sqsh"
    image.write_bytes(node.image.read_bytes())
    record(image, image.read_bytes())
    profile = run.parent / "cluster.yaml"
    profile.write_text(profile.read_text().replace(str(node.image), str(image)))
    return image


def test_without_hpcgens_options_home_is_mounted_and_image_and_hooks_override(
    container_cluster: SlurmCluster, node: Node
) -> None:
    """The premise of the other tests: on this node, a plain srun gets none of it right."""
    mounts = ",".join(f"{mount['source']}:{mount['source']}:ro" for mount in host_mounts())
    plain = container_cluster.run(
        "env",
        "NCCL_DEBUG=JOB",
        "MASTER_PORT=1",
        "srun",
        f"--container-image={node.image}",
        f"--container-mounts={mounts}",
        *("bash", "-c", 'touch /written && ls -d "$HOME/.local" && env'),
    ).stdout.splitlines()
    assert str(node.home / ".local") in plain
    assert "NCCL_DEBUG=IMAGE" in plain
    if extra_hooks():
        assert "MASTER_PORT=1" not in plain


def test_training_computes_what_one_process_does(
    trained: Trained, single_process_curve: dict[int, tuple[float, float]]
) -> None:
    assert "TP 2 x PP 1" in trained.log
    assert not (trained.run.parent / "run/asked-for-versions").exists(), "that is a container of its own"
    found = curve(trained.run)
    assert found.keys() == single_process_curve.keys()
    for iteration, expected in single_process_curve.items():
        assert found[iteration] == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_each_task_has_a_rank_of_its_own(trained: Trained) -> None:
    assert [task.rank for task in trained.tasks] == [0, 1]
    assert [task.environment["SLURM_LOCALID"] for task in trained.tasks] == ["0", "1"]


def test_the_jobs_variables_win_over_the_images_and_over_the_hooks(trained: Trained) -> None:
    [rendezvous] = re.findall(r"rendezvous at (.*):(\d+), world size (\d+)", trained.log)
    for task in trained.tasks:
        assert task.environment["NCCL_DEBUG"] == "JOB"
        assert task.environment["PYTORCH_VERSION"] == "2.7"
        assert task.environment["WITH_SPACES"] == ' a "b" $HOME \\ # c'
        found = tuple(task.environment[name] for name in RENDEZVOUS_AND_THREADS)
        assert found == (*rendezvous, "1")


def test_home_and_temporary_files_are_on_the_nodes_scratch(trained: Trained) -> None:
    scratch = str(trained.run.parent / "scratch")
    for task in trained.tasks:
        assert task.environment["HOME"].startswith(f"{scratch}/hpcgen-")
        assert task.environment["TMPDIR"].startswith(f"{scratch}/hpcgen-")
        assert task.said["scratch_is_written"] == "yes"
    assert list((trained.run.parent / "scratch").iterdir()) == []


def test_only_output_directories_are_writable(trained: Trained) -> None:
    for task in trained.tasks:
        assert task.said["workdir"] == str(trained.run.parent / "run")
        assert task.said["home_is_mounted"] == "no"
        assert task.said["rootfs_is_written"] == "no"
        assert task.said["code_is_written"] == "no"
        assert task.said["run_is_written"] == "yes"


def test_a_writable_container_leaves_the_image_as_it_is(
    container_cluster: SlurmCluster, run: Path, node: Node
) -> None:
    before = node.image.read_bytes()
    state, log = prepare(container_cluster, run, "container.writable=true")
    assert state == "COMPLETED", log
    [task] = seen_by_tasks(run)
    assert task.said["rootfs_is_written"] == "yes"
    assert task.said["home_is_mounted"] == "no"
    assert node.image.read_bytes() == before


def test_no_container_is_left_behind(trained: Trained, container_cluster: SlurmCluster) -> None:
    assert container_cluster.run("enroot", "list").stdout == ""


def test_a_warned_job_resumes_from_its_checkpoint_on_the_identical_curve(
    container_cluster: SlurmCluster, run: Path, undisturbed: dict[int, tuple[float, float]]
) -> None:
    job_id = submit(container_cluster, run, "train", *LONG)
    wait_for_steps(run, 3)
    container_cluster.run("scancel", "--batch", "--signal=USR2", job_id)
    assert container_cluster.wait(job_id) == "COMPLETED", log_of(run, job_id)
    assert "back into the queue (restart 1 of at most 100)" in log_of(run, job_id)
    assert curve(run) == undisturbed


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, node: Node, byte_corpus: Path
) -> dict[int, tuple[float, float]]:
    """The curve of the same run without container and Slurm."""
    directory = tmp_path_factory.mktemp("undisturbed")
    (directory / "cluster.yaml").write_text(profile_text())
    run = directory / "run.yaml"
    run.write_text(RUN.replace("CORPUS", str(byte_corpus)))
    sets = [f"--set={each}" for each in LONG]
    hpcgen("submit", "train", "-c", str(run), "--launcher=local", *sets, cwd=directory)
    return curve(run)


def test_cancelling_saves_and_takes_the_container_away(container_cluster: SlurmCluster, run: Path) -> None:
    job_id = submit(
        container_cluster, run, "train", "training.train_iters=100000", "optimizer.lr_decay_iters=100000"
    )
    wait_for_steps(run, 3)
    container_cluster.run("scancel", job_id)
    assert container_cluster.wait(job_id) == "CANCELLED"
    assert "requeueing is Slurm's decision" in log_of(run, job_id)
    assert (run.parent / "run" / "STOPPED").exists()
    assert list((run.parent / "scratch").iterdir()) == []
    assert container_cluster.run("enroot", "list").stdout == ""


def test_submitit_trains_in_the_container_on_the_same_curve(
    on_cluster: SlurmCluster,
    run: Path,
    single_process_curve: dict[int, tuple[float, float]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYXIS_CONTAINER_IMAGE", "/nowhere.sqsh")
    sets = [f"--set={each}" for each in TP2]
    job_id = hpcgen("submit", "train", "-c", str(run), *sets, cwd=run.parent).split()[0]
    assert on_cluster.wait(job_id) == "COMPLETED", log_of(run, job_id)
    found = curve(run)
    assert found.keys() == single_process_curve.keys()
    for iteration, expected in single_process_curve.items():
        assert found[iteration] == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_an_image_that_is_missing_ends_the_job_with_its_name(
    container_cluster: SlurmCluster, run: Path
) -> None:
    state, log = prepare(container_cluster, run, "container.image=/nowhere/image.sqsh")
    assert state == "FAILED"
    assert "ERROR: /nowhere/image.sqsh is missing or not readable" in log.splitlines()[-1]


def test_an_image_that_its_record_does_not_name_ends_the_job_with_one_line(
    container_cluster: SlurmCluster, run: Path, node: Node
) -> None:
    image = own_image(run, node)
    image.write_bytes(image.read_bytes()[:-1] + b"x")
    os.utime(image, (0, 0))
    state, log = prepare(container_cluster, run)
    assert state == "FAILED"
    assert f"ERROR: {image} is not the image that {image}.record names" in log.splitlines()[-1]
    assert seen_by_tasks(run) == []


def test_an_image_of_another_time_is_read_again_and_runs(
    container_cluster: SlurmCluster, run: Path, node: Node
) -> None:
    image = own_image(run, node)
    state, log = prepare(container_cluster, run)
    assert (state, "hashing it" in log) == ("COMPLETED", False), log
    os.utime(image, (0, 0))
    state, log = prepare(container_cluster, run)
    assert (state, "hashing it" in log) == ("COMPLETED", True), log


def test_the_image_is_copied_to_the_node_once(container_cluster: SlurmCluster, run: Path, node: Node) -> None:
    image = own_image(run, node)
    for copied in (True, False):
        state, log = prepare(container_cluster, run, "container.copy_image=true")
        assert (state, f"ndv5-1: copied {image}" in log) == ("COMPLETED", copied), log
    [copy] = (run.parent / "scratch" / f"hpcgen-images-{os.getuid()}").glob("*.sqsh")
    assert copy.name.endswith(image.name)
    assert copy.read_bytes() == image.read_bytes()


def test_the_fabric_is_measured_between_containers(container_cluster: SlurmCluster, run: Path) -> None:
    job_id = submit(container_cluster, run, "nccl-test", "slurm.nccl_test.ntasks_per_node=2")
    state = container_cluster.wait(job_id)
    log = (run.parent / "run" / f"nccl-test-{job_id}.log").read_text()
    assert state == "COMPLETED", log
    assert json.loads((run.parent / "run" / "jobs" / job_id / "nccl-test.json").read_text())["samples"]


def test_a_nodes_health_is_checked_on_the_host_and_in_the_container(
    container_cluster: SlurmCluster, run: Path
) -> None:
    job_id = submit(container_cluster, run, "node-health")
    state = container_cluster.wait(job_id)
    log = (run.parent / "run" / f"node-health-{job_id}.log").read_text()
    assert state == "COMPLETED", log
    assert re.search(r"^ndv5-1 +good +good$", log, re.MULTILINE), log


def test_tasks_start_in_turn_however_long_the_hooks_take(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight tasks of runtime enroot on a node, as Slurm starts them. enroot's own lock ends a task after 30 s."""
    hook = node.directory / "config/hooks.d/99-slow.sh"
    mounts = tuple(Mount(source=path, target=path, read_only=True) for path in map(str, shown_of_host()))
    container = Container(
        runtime="enroot",
        image=str(node.image),
        mounts=(*mounts, Mount(source=str(tmp_path), target=str(tmp_path))),
        workdir=str(tmp_path),
        writable=False,
        environment=(),
        copy_image=False,
    )
    monkeypatch.setenv("PATH", f"{node.programs}:{os.environ['PATH']}")
    monkeypatch.setenv("ENROOT_DATA_PATH", str(tmp_path / "data"))
    subprocess.run(["enroot", "create", "--name", CONTAINER_NAME, node.image], check=True)
    hook.write_text("#!/bin/bash\nsleep 5\n")
    hook.chmod(0o755)
    try:
        tasks = [
            subprocess.Popen(
                [*container.words(), "bash", "-c", "exit $((10 + SLURM_LOCALID))"],
                env={**os.environ, "SLURM_STEP_ID": "0", "SLURM_LOCALID": str(index)},
            )
            for index in range(8)
        ]
        statuses = [task.wait() for task in tasks]
    finally:
        hook.unlink()
    assert statuses == list(range(10, 18))


def test_pyxis_pulls_an_image_by_its_digest(
    container_cluster: SlurmCluster, tmp_path: Path, node: Node, byte_corpus: Path
) -> None:
    """The registry has another tag than the reference: only the digest names the image."""
    with registry(node.rootfs, "team/empty", "newest") as (address, digest):
        reference = f"{address}#team/empty:stable@{digest}"
        run = make_run(tmp_path, node, "pyxis", byte_corpus, image=reference)
        state, log = prepare(container_cluster, run)
    assert state == "COMPLETED", log
    assert (run.parent / "data/tokens/corpus-00000-of-00001.idx").exists()
