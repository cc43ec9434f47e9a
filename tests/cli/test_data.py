"""`hpcgen data`: the tokenizer by itself, and a corpus from its plan to its pairs by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpcgen.cli.data import COMMANDS, command
from hpcgen.errors import HpcgenError
from tests.cli.command import hpcgen
from tests.runs import minimal_run, write_yaml


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"body": "Hello world"}\n{"body": ""}\n')
    return path


def run(*arguments):
    return CliRunner().invoke(command, [str(argument) for argument in arguments], catch_exceptions=False)


def test_tokenize_reports_what_it_wrote(tmp_path, corpus):
    prefix = tmp_path / "x"
    result = run("tokenize", corpus, "--output-prefix", prefix, "--json-key", "body")
    assert result.stdout == (
        f"{prefix}.bin, .idx  (76 bytes, uint16)\n"
        "documents  2 in = 2 out + 0 skipped + 0 rejected; 1 empty\n"
        "tokens     3 in 1 sequences, each ended by 50256\n"
        "input      37 bytes of JSON Lines, encoded with gigatoken\n"
        "verified   1 documents: the ids of tokenizers\n"
    )
    assert result.stderr == ""
    assert (tmp_path / "x.bin").read_bytes() == b"".join(i.to_bytes(2, "little") for i in (15496, 995, 50256))


def test_tokenize_as_json(tmp_path, corpus):
    options = ("--json-key", "body", "--tokenizer", "bytes", "--drop-empty", "--json", "--workers", 1)
    report = json.loads(run("tokenize", corpus, "--output-prefix", tmp_path / "x", *options).stdout)
    assert report["tokens"] == 12
    assert report["documents"] == report["sequences"] == 1
    assert report["documents_read"] == 2


def test_tokenize_forced_to_a_library(tmp_path, corpus):
    options = ("--json-key", "body", "--backend", "tokenizers", "--json")
    result = run("tokenize", corpus, "--output-prefix", tmp_path / "x", *options)
    assert json.loads(result.stdout)["backend"] == "tokenizers"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "corpus.jsonl:1: no key 'text' among 'body'"),
        (("--tokenizer", "gpt3"), "cannot read the tokenizer file gpt3"),
        (("--vocab-file", "v.json"), "tokenizer.merges_file is needed beside its other half"),
        (("--tokenizer", "bytes", "--eod-token", "x"), "tokenizer.eod_token is not read"),
    ],
)
def test_mistakes_are_told(tmp_path, corpus, options, message):
    with pytest.raises(HpcgenError, match=message):
        run("tokenize", corpus, "--output-prefix", tmp_path / "x", *options)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


def test_sample(tmp_path):
    path = tmp_path / "sample.jsonl.zst"
    result = run("sample", path, "--max-mb", 0.2)
    assert result.stdout.startswith(f"{path}  (")
    assert json.loads(run("sample", path, "--max-mb", 0.2, "--json").stdout)["path"] == str(path)


@pytest.fixture
def planned_corpus(workplace: Path) -> Path:
    """The directory of a corpus of two files, whose run file is run.yaml."""
    (workplace / "text").mkdir()
    for name in ("a", "b"):
        lines = "".join(json.dumps({"text": f"{name} {number}"}) + "\n" for number in range(10))
        (workplace / f"text/{name}.jsonl").write_text(lines)
    corpus = {"directory": "data", "source": {"directory": "text"}, "num_output_files": 2}
    data = {"corpus": corpus, "tokenizer": {"kind": "bytes"}}
    write_yaml(workplace / "run.yaml", minimal_run(data=data))
    assert hpcgen("data", "plan").status == 0
    return workplace / "data"


def test_a_corpus_by_hand(planned_corpus: Path) -> None:
    """Two tasks, one after the other, which need not know of each other; the run file is the one that is here."""
    for task_id in ("0", "1"):
        done = hpcgen("data", "prepare", "--task-id", task_id, "--num-tasks", "2", "--workers", "1")
        assert (done.status, done.stderr) == (0, "")
        assert "10 in = 10 out + 0 skipped + 0 rejected" in done.stdout
    made = {path.name for path in (planned_corpus / "tokens").glob("*.idx")}
    assert made == {"corpus-00000-of-00002.idx", "corpus-00001-of-00002.idx"}
    again = json.loads(hpcgen("data", "prepare", "--json").stdout)
    assert (again["done_before"], again["made"], again["counts"]["documents_in"]) == (2, 0, 20)


def test_what_a_task_cannot_make_is_told_and_the_rest_is_made(planned_corpus: Path) -> None:
    (planned_corpus.parent / "text/a.jsonl").write_text('{"body": "other"}\n')
    assert hpcgen("data", "plan", "--replan").status == 0
    done = hpcgen("data", "prepare", "--workers", "1")
    assert done.status == 1
    assert "text/a.jsonl:1: no key 'text' among 'body'" in done.stderr
    assert [path.name for path in (planned_corpus / "tokens").glob("*.idx")] == ["corpus-00001-of-00002.idx"]


@pytest.mark.parametrize("stage", ["download", "extract", "concat", "tokenize", "prepare"])
def test_a_stage_of_a_corpus_that_is_not_planned(workplace: Path, stage: str) -> None:
    corpus = {"directory": "data", "source": {"directory": "text"}}
    write_yaml(workplace / "run.yaml", minimal_run(data={"corpus": corpus}))
    done = hpcgen("data", stage)
    assert (done.status, done.stdout) == (2, "")
    assert "the corpus is not planned; run hpcgen data plan first" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--task-id", "2", "--num-tasks", "2"), "task 2 is not one of 2; use 0 to 1"),
        (("--set", "data.corpus=null"), "data.corpus is missing"),
        (
            ("--set", "data.corpus.source.manifest=/list.jsonl"),
            "source.manifest = /list.jsonl is a second source",
        ),
        (("--set", "data.corpus.json_kee=x"), "did you mean json_key?"),
        (("-c", "nowhere.yaml"), "nowhere.yaml: no such file"),
        (("-c", "run.json"), "run.json"),
    ],
)
def test_mistakes_of_a_corpus_make_nothing(
    planned_corpus: Path, options: tuple[str, ...], message: str
) -> None:
    done = hpcgen("data", "prepare", *options)
    assert (done.status, done.stdout) == (2, "")
    assert message in done.stderr
    assert [path.name for path in planned_corpus.iterdir()] == ["manifest.jsonl"]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str) -> None:
    found = hpcgen("data", name, "--help")
    assert found.status == 0
    assert found.stdout.startswith(f"Usage: hpcgen data {name} ")


def test_a_command_that_is_nearly_right() -> None:
    found = hpcgen("data", "plna")
    assert (found.status, found.stdout) == (2, "")
    assert "no such command 'plna'; did you mean plan?" in found.stderr


def test_help_and_completion_import_nothing_that_costs() -> None:
    """Both ask every command for its first line: all of them are imported."""
    heavy = {
        "numpy",
        "rich",
        "gigatoken",
        "tokenizers",
        "msgspec",
        "zstandard",
        "pydantic",
        "huggingface_hub",
    }
    program = (
        "import contextlib, sys\n"
        "from hpcgen.cli.main import main\n"
        "with contextlib.suppress(SystemExit): main(['data', '--help'])\n"
        f"print(sorted({heavy} & set(sys.modules)), file=sys.stderr)\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert all(f"\n  {name} " in found.stdout for name in COMMANDS)
    assert found.stderr == "[]\n"
