"""One task of a stage: what it does, what it says, and how it ends."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcgen.data import task as module
from hpcgen.data.manifest import manifest_path, read_manifest
from hpcgen.data.progress import Progress, Step, progress_path
from hpcgen.data.task import run_task
from hpcgen.errors import HpcgenError
from tests.cli.command import hpcgen
from tests.patience import PATIENCE_S
from tests.runs import minimal_run, write_yaml

from .data_runs import (
    documents,
    json_lines,
    left_behind,
    make_units,
    pairs,
    planned_corpus,
    published,
    run_stages,
    write_file,
    write_job,
)

NAMES = ["a.jsonl.zst", "b.jsonl.gz", "c.jsonl"]


@pytest.fixture
def corpus(tmp_path):
    for seed, name in enumerate(NAMES):
        write_file(tmp_path / "source" / name, json_lines(documents(20 + seed, seed)))
    return planned_corpus(tmp_path / "source", tmp_path / "corpus", NAMES, num_output_files=2)


def command(*arguments: object, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hpcgen", "data", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        **options,
    )


@pytest.mark.process
def test_report_and_progress(corpus):
    seen: list[Progress] = []
    manifest = read_manifest(manifest_path(corpus.directory))
    report = run_task(
        "extract", corpus, manifest, on_progress=lambda progress: seen.append(dataclasses.replace(progress))
    )
    packed = sum((Path(corpus.corpus.source.directory) / name).stat().st_size for name in NAMES[:2])
    assert str(report).splitlines()[:2] == [
        "extract task 0 of 1: 2 made, 0 already done",
        "documents  41 in = 41 out + 0 skipped + 0 rejected",
    ]
    assert f"read       {packed:,} bytes in " in str(report)
    assert (seen[0].units, seen[0].units_done, seen[0].bytes, seen[0].bytes_done) == (2, 0, packed, 0)
    last = seen[-1]
    assert (last.units_done, last.bytes, last.bytes_done, last.bytes_new) == (2, packed, packed, packed)
    assert (last.documents, last.failed) == (41, 0)

    # concat reads what extract wrote: its size is known from the records, not from the manifest
    concat = run_task("concat", corpus, manifest, on_progress=seen.append)
    size = (
        sum(record.outputs[0].size for record in report.records)
        + (Path(corpus.corpus.source.directory) / "c.jsonl").stat().st_size
    )
    assert (seen[-1].bytes, seen[-1].bytes_done, concat.bytes_read) == (size, size, size)

    again = run_task("extract", corpus, manifest)
    assert str(again).splitlines()[0] == "extract task 0 of 1: 0 made, 2 already done"
    assert again.counts == report.counts
    assert (again.bytes_read, again.to_dict()["made"]) == (0, 0)


@pytest.mark.process
def test_progress_file(corpus):
    run_stages(corpus, "extract", num_tasks=2)
    path = progress_path(corpus.directory, "extract", 1, 2)
    assert path == corpus.directory / "progress/extract-00001-of-00002.json"
    status = json.loads(path.read_text())
    assert {
        name: status[name] for name in ("stage", "task_id", "num_tasks", "units", "units_done", "failed")
    } == {
        "stage": "extract",
        "task_id": 1,
        "num_tasks": 2,
        "units": 1,
        "units_done": 1,
        "failed": 0,
    }
    assert (status["ended"], status["errors"], status["documents"]) == (True, [], 21)
    assert status["updated"] >= status["started"]


@pytest.mark.process
def test_the_progress_directory_is_scanned_once(corpus, monkeypatch):
    """It holds a file of every task, and every task writes one every five seconds."""
    looks, written, scandir, replace = [], [], os.scandir, Path.replace
    monkeypatch.setattr(os, "scandir", lambda path: (looks.append(Path(path).name), scandir(path))[1])
    monkeypatch.setattr(
        Path, "replace", lambda path, target: (written.append(target.parent.name), replace(path, target))[1]
    )
    monkeypatch.setattr(module, "_WRITE_INTERVAL_S", 0.0)
    run_stages(corpus, "extract")
    assert written.count("progress") > 2
    assert looks.count("progress") == 1


@pytest.mark.process
def test_a_unit_that_fails_does_not_stop_the_others(corpus):
    source = Path(corpus.corpus.source.directory)
    content = (source / "a.jsonl.zst").read_bytes()
    planned = (source / "a.jsonl.zst").stat()
    (source / "a.jsonl.zst").write_bytes(content[:-9] + b"123456789")
    os.utime(source / "a.jsonl.zst", ns=(planned.st_atime_ns, planned.st_mtime_ns))
    job_file = write_job(corpus, corpus.directory / "corpus.json")
    done = command("extract", "-c", job_file, "--workers", 1)
    assert done.returncode == 1
    assert done.stdout.startswith("extract task 0 of 1: 1 made, 0 already done, 1 failed\n")
    assert "extract/a.jsonl: " in done.stderr
    assert "damaged .zst data" in done.stderr
    assert "Traceback" not in done.stderr
    assert published(corpus.directory) == ["extract/b.jsonl", "extract/b.jsonl.record.json"]
    status = json.loads(progress_path(corpus.directory, "extract", 0, 1).read_text())
    assert (status["failed"], len(status["errors"]), status["units_done"]) == (1, 1, 1)

    (source / "a.jsonl.zst").write_bytes(content)
    os.utime(source / "a.jsonl.zst", ns=(planned.st_atime_ns, planned.st_mtime_ns))
    again = command("extract", "-c", job_file, "--workers", 1)
    assert (again.returncode, again.stdout.splitlines()[0]) == (
        0,
        "extract task 0 of 1: 1 made, 1 already done",
    )


@pytest.mark.process
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("concat", "--task-id", 3, "--num-tasks", 3), "task 3 is out of range for 3 tasks; use 0 to 2"),
        (("tokenize",), r"concat/corpus-00000-of-00002.jsonl does not exist; run the stage concat first"),
        (("extract", "-c", "nowhere.yaml"), "nowhere.yaml: no such file"),
        (("extract", "-c", "nowhere.json"), "cannot read nowhere.json: No such file or directory"),
        (("extract", "-c", "other.json"), "\nother.json: unknown key 'keys'; known are "),
        (("extract", "--set", "data.corpus.json_key=x"), "--set cannot change "),
    ],
    ids=["task-id", "order", "no-run-file", "no-job-file", "other-file", "set-of-a-job"],
)
def test_mistakes_are_reported_in_one_line(corpus, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job_file = write_job(corpus, tmp_path / "corpus.json")
    (tmp_path / "other.json").write_text('{"keys": 1}')
    done = hpcgen("data", *arguments[:1], "-c", job_file, *arguments[1:])
    assert done.status == (1 if arguments[0] == "tokenize" else 2)
    assert message in f"\n{done.stderr}"
    assert "Traceback" not in done.stderr


@pytest.mark.process
def test_the_run_file_of_the_folder_is_the_default(corpus, tmp_path, monkeypatch):
    """As a user types it: plan, then the stages, one task after the other or all at once."""
    settings = {"directory": "made", "source": {"directory": "source"}, "num_output_files": 2}
    tokenizer = {"kind": "bytes"}
    write_yaml(tmp_path / "run.yaml", minimal_run(data={"corpus": settings, "tokenizer": tokenizer}))
    monkeypatch.chdir(tmp_path)
    assert hpcgen("data", "plan").status == 0
    for task_id in (0, 1):
        done = hpcgen("data", "extract", "--task-id", task_id, "--num-tasks", 2, "--json")
        assert done.status == 0, done.stderr
        report = json.loads(done.stdout)
        assert (report["units"], report["made"], report["errors"]) == (1, 1, [])
        assert report["counts"]["documents_in"] == report["counts"]["documents_out"] == 20 + task_id
    done = hpcgen("data", "prepare", "--set", "data.corpus.num_output_files=1")
    assert (done.status, done.stderr) == (0, "")
    assert "documents  63 in = 63 out + 0 skipped + 0 rejected\ntokens     " in done.stdout
    assert sorted(pairs(tmp_path / "made")) == ["corpus-00000-of-00001.bin", "corpus-00000-of-00001.idx"]


@pytest.mark.process
def test_an_unplanned_corpus_is_an_error(corpus, tmp_path):
    manifest_path(corpus.directory).unlink()
    done = hpcgen("data", "extract", "-c", write_job(corpus, tmp_path / "corpus.json"))
    assert done.status == 2
    assert (
        done.stderr
        == f"{manifest_path(corpus.directory)}: the corpus has no manifest; run hpcgen data plan first\n"
    )


@pytest.mark.process
def test_two_concurrent_copies_write_the_same_outputs(corpus, tmp_path):
    job_file = write_job(corpus, tmp_path / "corpus.json")
    arguments = [sys.executable, "-m", "hpcgen", "data", "prepare", "-c", str(job_file), "--workers", "1"]
    copies = [
        subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    outputs = [copy.communicate()[0] for copy in copies]
    assert [copy.returncode for copy in copies] == [0, 0], outputs
    assert left_behind(corpus.directory) == []
    found = pairs(corpus.directory)
    alone = planned_corpus(tmp_path / "source", tmp_path / "alone", NAMES, num_output_files=2)
    make_units(alone, "prepare")
    assert found == pairs(alone.directory)
    assert run_stages(corpus, "prepare")[0].done_before == 2


@pytest.mark.process
def test_no_space_left(corpus, tmp_path):
    """On a file system of 64 KiB (a tmpfs in a user namespace) nothing appears, and the message says why.

    The text compresses better than the estimate of the space expects, so that the stage does start.
    """
    for name in NAMES[:2]:
        write_file(tmp_path / "source" / name, json_lines(["the same words again " * 50] * 200))
    job = planned_corpus(tmp_path / "source", tmp_path / "corpus", NAMES[:2], num_output_files=2)
    job_file = write_job(job, tmp_path / "corpus.json")
    script = (
        'set -e; manifest=$(cat "$1/manifest.jsonl"); mount -t tmpfs -o size=64k none "$1"; '
        'printf "%s\\n" "$manifest" > "$1/manifest.jsonl"; shift; '
        'status=0; "$@" || status=$?; find ./corpus -type f; exit $status'
    )
    for stage in ("extract", "prepare"):
        arguments = [sys.executable, "-m", "hpcgen", "data", stage, "-c", str(job_file), "--workers", "1"]
        namespace = ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c", script, "bash"]
        if not shutil.which("unshare") or subprocess.run([*namespace[:4], "true"], check=False).returncode:
            pytest.skip("no user namespaces here")
        done = subprocess.run(
            [*namespace, str(job.directory), *arguments],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
        )
        assert done.returncode == 1, done.stderr
        assert "No space left on device" in done.stderr
        assert "Traceback" not in done.stderr
        files = [line for line in done.stdout.splitlines() if line.startswith("./corpus/")]
        assert [file for file in files if "/progress/" not in file] == ["./corpus/manifest.jsonl"]


@pytest.mark.process
def test_a_file_that_may_not_grow(corpus, tmp_path):
    """RLIMIT_FSIZE simulates quotas: the write fails at once, and an older output is unchanged."""
    make_units(corpus, "extract", "concat")
    before = {name: (corpus.directory / name).read_bytes() for name in published(corpus.directory)}
    for seed, name in enumerate(NAMES):
        write_file(tmp_path / "source" / name, json_lines(documents(600, seed + 50)))
    job = planned_corpus(tmp_path / "source", tmp_path / "corpus", NAMES, num_output_files=2)
    job_file = write_job(job, tmp_path / "corpus.json")
    done = command(
        "extract",
        "-c",
        job_file,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000)),
    )
    assert done.returncode == 1
    assert os.strerror(errno.EFBIG) in done.stderr
    assert {name: (corpus.directory / name).read_bytes() for name in published(corpus.directory)} == before
    assert left_behind(corpus.directory) == []


def hooked(counter: Path, at: int, how: str) -> dict[str, str]:
    """The environment in which something happens at an operation on files (see kill_hook)."""
    hook = {"PYTHONPATH": str(Path(__file__).parent / "kill_hook"), "KILL_COUNTER": str(counter)}
    return {**os.environ, **hook, "KILL_AT": str(at), "KILL_HOW": how}


@pytest.mark.process
def test_a_worker_that_is_killed(corpus, tmp_path):
    """Like the kernel when memory runs out: the killed worker's unit fails with a message. The other one is made."""
    job_file = write_job(corpus, tmp_path / "corpus.json")
    done = command("extract", "-c", job_file, "--workers", 1, env=hooked(tmp_path / "counter", 8, "self"))
    assert done.returncode == 1
    assert done.stdout.startswith("extract task 0 of 1: 1 made, 0 already done, 1 failed\n")
    assert re.fullmatch(
        r"extract/.\.jsonl: its worker process was killed \(SIGKILL\), probably because memory ran out; "
        r"run it again with fewer --workers or more memory\n",
        done.stderr,
    )
    assert left_behind(corpus.directory) == []
    assert [report.done_before for report in run_stages(corpus, "extract")] == [1]


@pytest.mark.process
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_task_that_is_ended_leaves_nothing_behind(corpus, tmp_path, name):
    """The worker is in the middle of its first file."""
    job_file = write_job(corpus, tmp_path / "corpus.json")
    counter = tmp_path / "counter"
    process = subprocess.Popen(
        [sys.executable, "-m", "hpcgen", "data", "extract", "-c", str(job_file), "--workers", "1"],
        env=hooked(counter, 8, "sleep"),
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (counter.exists() and counter.stat().st_size >= 8):
        assert process.poll() is None
        time.sleep(0.01)
    assert left_behind(corpus.directory)
    os.killpg(process.pid, signal.Signals[name])
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == {"SIGTERM": 143, "SIGINT": 130}[name]
    assert "Traceback" not in errors
    assert left_behind(corpus.directory) == []
    status = json.loads(progress_path(corpus.directory, "extract", 0, 1).read_text())
    assert (status["ended"], status["units_done"]) == (True, 0)
    assert status["errors"][0].startswith("ended by ")


def test_steps_are_gathered(monkeypatch):
    """The parent gets progress twice a second, not for every block."""
    told: list[Step] = []
    meter = module._Meter(told.append)
    for _ in range(1000):
        meter.add(Step(bytes=1, documents=2, tokens=3))
    meter.flush()
    assert sum(told, Step()) == Step(1000, 2000, 3000)
    assert len(told) < 10


def test_task_out_of_range(corpus):
    manifest = read_manifest(manifest_path(corpus.directory))
    with pytest.raises(HpcgenError, match="task 2 is out of range for 2 tasks"):
        run_task("extract", corpus, manifest, task_id=2, num_tasks=2)
