from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from tests.cli.command import hpcgen

RUN = """\
name: tiny
cluster: local
paths: {run_dir: run}
slurm: {prepare: {num_tasks: 4, array_parallelism: 2}}
data:
  tokenizer: {kind: bytes}
  corpus: {directory: data, source: {directory: source}, num_output_files: 4}
model: {num_layers: 2, hidden_size: 32, num_attention_heads: 2, seq_length: 32}
training: {micro_batch_size: 2, global_batch_size: 8, train_iters: 2, precision: fp32, eval_iters: 0}
optimizer: {lr: 1.0e-3}
"""
SKIP = ("--set", "data.corpus.bad_documents=skip")


@pytest.fixture(autouse=True)
def corpus(workplace: Path) -> None:
    """Four files, planned; the second line of the third has no text."""
    (workplace / "run.yaml").write_text(RUN)
    (workplace / "source").mkdir()
    for number in range(4):
        lines = [{"text": f"document {number}"}, *([{"title": "none"}] if number == 2 else [])]
        (workplace / f"source/{number}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert hpcgen("data", "plan", *SKIP).status == 0  # planning would refuse the line without text


@pytest.mark.process
@pytest.mark.usefixtures("forks")
def test_the_progress_of_a_corpus():
    first = hpcgen("data", "prepare", "--task-id", 1, "--num-tasks", 4)
    assert first.status == 0
    failed = hpcgen("data", "prepare", "--task-id", 2, "--num-tasks", 4)
    assert failed.status == 1
    told = hpcgen("data", "status")
    assert told.status == 0
    heading, row, documents, tokens, task, error = told.stdout.splitlines()
    assert heading.split() == [
        "stage",
        "done",
        "running",
        "failed",
        "missing",
        "read",
        "documents",
        "tokens",
        "rate",
        "left",
    ]
    assert re.fullmatch(r"prepare  1 of 4 +- +1 +2 +23 B of 110 B +1 +11 +- +-", row)
    assert documents == "prepare: 1 document in = 1 out + 0 skipped + 0 rejected"
    assert tokens == "prepare: tokens in complete pairs: corpus 11"
    assert re.fullmatch(r"prepare task 2 of 4: failed on \S+, \d+ s ago, 1 not done", task)
    assert error.startswith("    tokens/corpus-00002-of-00004: ")
    assert "missing key 'text'" in error
    assert told.stderr.endswith("run hpcgen submit prepare -c run.yaml (finished outputs are kept)\n")


@pytest.mark.process
@pytest.mark.usefixtures("forks")
def test_the_advice_names_all_unfinished_stages_of_the_corpus():
    sets = ("--set", "data.corpus.directory=other dir", "--set", "data.corpus.bad_documents=skip")
    assert hpcgen("data", "plan", *sets).status == 0
    assert hpcgen("data", "concat", "--task-id", 0, "--num-tasks", 4, *sets).status == 0
    assert hpcgen("data", "tokenize", "--task-id", 1, "--num-tasks", 4, *sets).status == 1
    told = hpcgen("data", "status", *sets).stderr
    assert (
        "hpcgen submit concat tokenize -c run.yaml --set 'data.corpus.directory=other dir' "
        "--set data.corpus.bad_documents=skip" in told
    )


@pytest.mark.process
@pytest.mark.usefixtures("forks")
def test_intermediate_files_of_complete_pairs_are_not_requested_again():
    Path("source/2.jsonl").write_text(Path("source/1.jsonl").read_text())
    assert hpcgen("data", "plan", "--replan").status == 0
    assert hpcgen("data", "concat", "--task-id", 0, "--num-tasks", 4).status == 0
    assert hpcgen("data", "prepare").status == 0
    told = hpcgen("data", "status", "concat", "prepare")
    assert "concat: no longer needed, because the pairs are complete" in told.stderr
    assert "hpcgen submit" not in told.stderr


@pytest.mark.process
@pytest.mark.usefixtures("forks")
def test_missing_tasks_in_the_form_of_sbatch():
    assert hpcgen("data", "status", "--missing", "prepare").stdout == "0-3%2\n"
    assert hpcgen("data", "prepare", "--task-id", 1, "--num-tasks", 4).status == 0
    told = hpcgen("data", "status", "--missing", "prepare")
    assert (told.status, told.stdout) == (0, "0,2-3%2\n")
    assert told.stderr == "prepare: 3 of 4 tasks not done\n"
    assert hpcgen("data", "status", "--missing", "prepare", "--num-tasks", 2).stdout == "0-1%2\n"
    assert json.loads(hpcgen("data", "status", "--missing", "prepare", "--json").stdout) == {
        "stage": "prepare",
        "num_tasks": 4,
        "missing": [0, 2, 3],
    }


@pytest.mark.process
@pytest.mark.usefixtures("forks")
def test_nothing_is_missing():
    Path("source/2.jsonl").write_text('{"text": "mended"}\n')
    assert hpcgen("data", "plan", "--replan").status == 0
    assert hpcgen("data", "prepare").status == 0
    told = hpcgen("data", "status", "--missing", "prepare")
    assert (told.status, told.stdout) == (1, "")
    assert told.stderr == "prepare: 0 of 4 tasks not done\n"


@pytest.mark.process
@pytest.mark.usefixtures("forks")
def test_status_as_json():
    assert hpcgen("data", "prepare", "--task-id", 1, "--num-tasks", 4).status == 0
    [stage] = json.loads(hpcgen("data", "status", "prepare", "--json").stdout)
    assert (stage["stage"], stage["units"], stage["done"]) == ("prepare", 4, 1)
    assert stage["tokens_of_split"] == {"corpus": 11}
    assert stage["tasks"] == []


@pytest.mark.process
@pytest.mark.usefixtures("forks")
def test_a_task_of_a_dead_host_is_stalled():
    assert hpcgen("data", "prepare", "--task-id", 2, "--num-tasks", 4).status == 1
    path = Path("data/progress/prepare-00002-of-00004.json")
    told = json.loads(path.read_text())
    path.write_text(json.dumps(told | {"ended": False, "updated": time.time() - 3600, "host": "node-9"}))
    lines = hpcgen("data", "status").stdout.splitlines()
    assert "prepare task 2 of 4: stalled, last report on node-9, 1 h ago, 1 not done" in lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("prepare", "--missing", "extract"), "name one stage, after --missing"),
        (("--num-tasks", 3), "--num-tasks requires --missing"),
        (("-c", "corpus.json", "--missing", "prepare"), "add --num-tasks"),
        (("--set", "data.corpus.json_kee=body"), "data.corpus.json_kee"),
        (("--missing", "prepare", "--set", "slurm.prepare.num_tasks=all"), "= all must be a whole number"),
        (
            ("--set", "data.corpus.directory=elsewhere"),
            "elsewhere/manifest.jsonl: the corpus has no manifest",
        ),
    ],
)
def test_mistakes_are_reported(arguments, message):
    told = hpcgen("data", "status", *arguments)
    assert (told.status, told.stdout) == (2, "")
    assert message in told.stderr
