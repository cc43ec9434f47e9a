from __future__ import annotations

import dataclasses
import json

import pytest
import zstandard

from hpcgen.config.corpus import CorpusConfig, CorpusJob, SourceConfig, SplitPatterns
from hpcgen.config.tokenizer import TokenizerConfig
from hpcgen.data.corpus_plan import plan_corpus
from hpcgen.data.progress import Progress, progress_path
from hpcgen.data.record import record_path
from hpcgen.data.status import STALLED_S, corpus_status
from hpcgen.data.task import run_task

NOW = 1_800_000_000.0


@pytest.fixture
def job(tmp_path):
    """Five compressed files of train and one of valid, three documents in each."""
    folder = tmp_path / "source"
    for name in ("train/0", "train/1", "train/2", "train/3", "train/4", "valid/0"):
        path = folder / f"{name}.jsonl.zst"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps({"text": f"{name} {line}"}) + "\n" for line in range(3))
        path.write_bytes(zstandard.ZstdCompressor().compress(lines.encode()))
    return CorpusJob(
        corpus=CorpusConfig(
            directory=str(tmp_path / "data"),
            source=SourceConfig(directory=str(folder)),
            splits=SplitPatterns(train=("train/*",), valid=("valid/*",)),
            num_output_files=2,
        ),
        tokenizer=TokenizerConfig(kind="bytes"),
    )


@pytest.fixture
def manifest(job):
    return plan_corpus(job).manifest


def word(job, stage, task_id, num_tasks, *, age=1.0, **values):
    """The progress that a task wrote `age` seconds before NOW, 10 s after it began."""
    progress = dataclasses.asdict(Progress(stage, task_id, num_tasks, started=NOW - age - 10))
    told = {"host": "node-7", "pid": 1, "updated": NOW - age, "errors": [], "ended": False}
    path = progress_path(job.directory, stage, task_id, num_tasks)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(progress | told | values))


def one(job, manifest, stage):
    [status] = corpus_status(job, manifest, [stage], NOW)
    assert status.done + status.running + status.failed + status.missing == status.units
    return status


def test_status_before_any_task_started(job, manifest):
    [status] = corpus_status(job, manifest, [], NOW)  # no file needs to be downloaded
    assert (status.stage, status.units, status.missing, status.bytes_done) == ("prepare", 3, 3, 0)
    assert status.bytes == sum(file.size for file in manifest.files)
    assert (status.remaining_s, status.tasks) == (None, ())


@pytest.mark.process
@pytest.mark.usefixtures("forks")
def test_the_three_stages_as_tasks_leave_them(job, manifest):
    source = job.directory.parent / "source"
    (source / "train/1.jsonl.zst").write_bytes((source / "train/1.jsonl.zst").read_bytes()[:-5])
    run_task("extract", job, manifest, task_id=0, num_tasks=2, workers=1)
    run_task("extract", job, manifest, task_id=1, num_tasks=2, workers=1)
    found = {status.stage: status for status in corpus_status(job, manifest, [], 0.0)}
    assert list(found) == ["extract", "concat", "tokenize"]
    extract = found["extract"]
    assert (extract.units, extract.done, extract.failed, extract.missing) == (6, 5, 1, 0)
    assert (extract.counts.documents_in, extract.documents, extract.tokens) == (15, 15, 0)
    [task] = extract.tasks
    assert (task.task_id, task.num_tasks, task.state, task.units_left) == (1, 2, "failed", 1)
    assert task.errors[0].startswith("extract/train/1.jsonl: ")
    # records give the sizes of extracted files; compressed sizes are used for the rest
    sizes = sum(path.stat().st_size for path in job.directory.glob("extract/*/*.jsonl"))
    assert found["concat"].bytes == sizes + next(
        file.size for file in manifest.files if file.name == "train/1.jsonl.zst"
    )
    assert found["concat"].missing == 3


@pytest.mark.process
@pytest.mark.usefixtures("forks")
def test_pairs_and_the_tokens_of_each_split(job, manifest):
    report = run_task("prepare", job, manifest, workers=1)
    status = one(job, manifest, "prepare")
    assert (status.done, status.documents) == (3, 18)
    assert status.tokens == report.counts.tokens == sum(status.tokens_of_split.values())
    text = len("train/0 0") + 1
    assert status.tokens_of_split == {"train": 15 * text, "valid": 3 * text}
    assert status.bytes_done == status.bytes == sum(file.size for file in manifest.files)
    # without the record of a pair it is not done, whatever files are there
    record_path(job.directory / "tokens/train-00001-of-00002").unlink()
    status = one(job, manifest, "prepare")
    assert (status.done, status.missing) == (2, 1)
    assert status.tokens_of_split["train"] < 15 * text


def test_running_tasks_give_rate_and_remaining_time(job, manifest):
    total = sum(file.size for file in manifest.files)
    word(job, "extract", 0, 3, bytes_done=40, bytes_new=40, documents=4)
    word(job, "extract", 1, 3, bytes_done=60, bytes_new=60, documents=6, failed=1)
    status = one(job, manifest, "extract")
    assert (status.running, status.failed, status.missing) == (3, 1, 2)
    assert (status.bytes_done, status.documents) == (100, 10)
    assert status.bytes_per_second == pytest.approx(10)
    assert status.remaining_s == pytest.approx((total - 100) / 10)


def test_a_task_that_went_silent_is_stalled(job, manifest):
    word(job, "extract", 0, 2, age=STALLED_S + 1, bytes_new=40, bytes_done=40)
    status = one(job, manifest, "extract")
    assert (status.running, status.missing, status.bytes_per_second, status.remaining_s) == (0, 6, 0, None)
    [task] = status.tasks
    assert (task.state, task.host, task.silent_s) == ("stalled", "node-7", STALLED_S + 1)


def test_a_task_that_ended_without_a_message(job, manifest):
    word(job, "extract", 0, 2, ended=True)
    status = one(job, manifest, "extract")
    assert (status.missing, status.tasks[0].state) == (6, "ended")


@pytest.mark.process
@pytest.mark.usefixtures("forks")
def test_the_last_report_counts_and_finished_outputs_are_not_failed(job, manifest):
    word(
        job,
        "extract",
        0,
        1,
        age=900,
        ended=True,
        failed=2,
        errors=["extract/train/0.jsonl: a", "extract/valid/0.jsonl: b"],
    )
    run_task("extract", job, manifest, task_id=0, num_tasks=6, workers=1)
    progress_path(job.directory, "extract", 0, 6).unlink()
    status = one(job, manifest, "extract")
    assert (status.done, status.failed, status.missing) == (1, 1, 4)
    assert status.tasks[0].errors == ("extract/valid/0.jsonl: b",)
    word(job, "extract", 5, 6, age=3)  # makes the failed file again
    status = one(job, manifest, "extract")
    assert (status.done, status.running, status.failed, status.missing) == (1, 1, 0, 4)
    assert [(task.num_tasks, task.state) for task in status.tasks] == [(1, "ended"), (6, "running")]


def test_unrelated_files_are_ignored(job, manifest):
    word(job, "extract", 0, 2)
    for name, text in (("a.json", "{"), ("b.json", '{"stage": "extract"}'), ("c.txt", "")):
        (job.directory / "progress" / name).write_text(text)
    assert one(job, manifest, "extract").running == 3
