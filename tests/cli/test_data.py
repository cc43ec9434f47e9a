"""`hpcgen data`: the tokenizer by itself, and a corpus from its plan to its pairs by hand."""

from __future__ import annotations

import json
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpcgen import load_run, plan
from hpcgen.cli.data import SECTIONS, command
from hpcgen.data.listed_files import ManifestFile
from hpcgen.data.manifest import Manifest, manifest_path, write_manifest
from hpcgen.errors import HpcgenError
from tests.cli.command import hpcgen, listing
from tests.runs import minimal_run, write_yaml

COMMANDS = [name for section in SECTIONS.values() for name in section]


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
        "tokens     3 in 1 sequence, each ends with id 50256\n"
        "input      37 bytes, encoded with gigatoken\n"
        "verified   1 document against the library tokenizers\n"
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
        ((), "corpus.jsonl:1: missing key 'text'"),
        (("--tokenizer", "gpt3"), "cannot read the tokenizer file gpt3"),
        (("--vocab-file", "v.json"), "tokenizer.merges_file is missing, but vocab_file is set"),
        (("--tokenizer", "bytes", "--eod-token", "x"), "tokenizer.eod_token has no effect"),
    ],
)
def test_mistakes_are_reported(tmp_path, corpus, options, message):
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


@pytest.mark.process
@pytest.mark.usefixtures("forks")
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


@pytest.mark.process
@pytest.mark.usefixtures("forks")
def test_a_failed_output_is_reported_and_the_rest_is_made(planned_corpus: Path) -> None:
    (planned_corpus.parent / "text/a.jsonl").write_text('{"text": "a"}\n{"body": "other"}\n')
    assert hpcgen("data", "plan", "--replan", "--set", "data.corpus.bad_documents=skip").status == 0
    done = hpcgen("data", "prepare", "--workers", "1")
    assert done.status == 1
    assert "text/a.jsonl:2: missing key 'text' (the keys are 'body')" in done.stderr
    assert [path.name for path in (planned_corpus / "tokens").glob("*.idx")] == ["corpus-00001-of-00002.idx"]


@pytest.mark.process
@pytest.mark.usefixtures("forks")
def test_a_task_names_the_file_of_its_rejected_documents(planned_corpus: Path) -> None:
    with (planned_corpus.parent / "text/b.jsonl").open("a") as file:
        file.write("no JSON\n")
    skipping = ("--set", "data.corpus.bad_documents=skip", "--set", "data.corpus.max_bad_fraction=0.5")
    assert hpcgen("data", "plan", "--replan", *skipping).status == 0
    done = hpcgen("data", "prepare", *skipping)
    assert done.status == 0
    assert "rejects    1 not JSON; see tokens/corpus-00001-of-00002.rejects.jsonl\n" in done.stdout
    assert (planned_corpus / "tokens/corpus-00001-of-00002.rejects.jsonl").exists()


STAGES = ("download", "extract", "concat", "tokenize", "prepare")
READERS: list[tuple[str, ...]] = [
    ("data", "prepare"),
    ("data", "status"),
    ("data", "status", "--missing", "prepare"),
    ("submit", "prepare", "-c", "run.yaml", "--dry-run"),
    ("submit", "prepare", "-c", "run.yaml", "--launcher", "local"),
]


@pytest.mark.parametrize("reader", READERS, ids=" ".join)
@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ("sample_files=1", "data.corpus.sample_files was not set and is now 1"),
        ("include=[a*]", "data.corpus.include was not set and is now a*"),
        ("splits.train=[a*]", "data.corpus.splits.train was not set and is now a*"),
    ],
)
def test_another_selection_than_was_planned_stops_everything_that_reads_the_manifest(
    planned_corpus: Path, reader: tuple[str, ...], change: str, difference: str
) -> None:
    before = listing(planned_corpus.parent)
    done = hpcgen(*reader, "--set", f"data.corpus.{change}")
    assert (done.status, done.stdout) == (2, "")
    assert done.stderr == (
        f"{planned_corpus}/manifest.jsonl was planned with a different selection: {difference}; "
        "run hpcgen data plan --replan, or restore the old values\n"
    )
    assert listing(planned_corpus.parent) == before


def test_a_removed_sample_setting_is_noticed(planned_corpus: Path) -> None:
    sample = ("--set", "data.corpus.sample_files=1")
    assert hpcgen("data", "plan", "--replan", *sample).status == 0
    assert hpcgen("data", "status", *sample).status == 0
    done = hpcgen("data", "status")
    assert "data.corpus.sample_files was 1 and is now not set; run hpcgen data plan --replan" in done.stderr
    assert hpcgen("data", "plan", "--replan").status == 0
    assert hpcgen("data", "status").status == 0


def test_a_rendered_task_refuses_another_selection_too(planned_corpus: Path) -> None:
    """Nothing compares before sbatch: the task does, by what it was given."""
    found = plan(load_run(Path("run.yaml"), ["data.corpus.sample_files=1"]), ["prepare"])
    Path("corpus.json").write_text(found.stages["prepare"].files["corpus.json"])
    done = hpcgen("data", "prepare", "-c", "corpus.json")
    assert (done.status, done.stdout) == (2, "")
    assert "data.corpus.sample_files was not set and is now 1" in done.stderr


def test_no_script_holds_the_signature_of_an_address(workplace: Path) -> None:
    template = "https://store.example/{index}.jsonl?sig=hf_x"
    source = {"url": {"template": template}, "token_variable": "TOKEN"}
    data = {"corpus": {"directory": "data", "source": source}, "tokenizer": {"kind": "bytes"}}
    write_yaml(workplace / "run.yaml", minimal_run(data=data, paths={"run_dir": "run"}))
    file = ManifestFile(name="0.jsonl", split="corpus", size=9, url=template.format(index=0))
    write_manifest(Manifest("a server", [file]), manifest_path(workplace / "data"))
    for stage in STAGES:
        done = hpcgen("render", stage, "-c", "run.yaml")
        assert done.status == 0, done.stderr
        assert "hf_x" not in done.stdout + done.stderr
        [text] = re.findall(r"^\{$.*?^\}$", done.stdout, re.MULTILINE | re.DOTALL)
        told = json.loads(text)["corpus"]["source"]
        assert {key: value for key, value in told.items() if value} == {"token_variable": "TOKEN"}


def test_a_password_in_an_address_is_refused_and_not_shown(workplace: Path) -> None:
    source = {"url": {"template": "https://me:hf_x@store.example/{index}.jsonl"}}
    write_yaml(workplace / "run.yaml", minimal_run(data={"corpus": {"directory": "data", "source": source}}))
    for words in (("data", "plan"), ("validate", "prepare"), ("render", "prepare")):
        done = hpcgen(*words, "-c", "run.yaml")
        assert done.status == 2
        assert (
            "data.corpus.source.url contains a user name or password in its template"
            in done.stderr + done.stdout
        )
        assert "hf_x" not in done.stdout + done.stderr


@pytest.mark.process
@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize(("share", "modes"), [("private", (0o600, 0o700)), ("group", (0o660, 0o2770))])
def test_permissions_of_files_made_by_hand(planned_corpus: Path, share: str, modes: tuple[int, int]) -> None:
    shutil.rmtree(planned_corpus)
    shared = ("--set", f"share={share}")
    assert hpcgen("data", "plan", *shared).status == 0
    assert hpcgen("data", "prepare", *shared, "--workers", "1").status == 0
    found = {stat.S_IMODE(path.stat().st_mode) for path in planned_corpus.rglob("*")}
    assert found == set(modes)


@pytest.mark.process
@pytest.mark.usefixtures("forks")
def test_a_dry_run_says_how_many_tasks_are_left(planned_corpus: Path) -> None:
    tasks = ("--set", "slurm.prepare.num_tasks=2", "--set", "paths.run_dir=run")
    done = hpcgen("submit", "prepare", "-c", "run.yaml", "--dry-run", *tasks)
    assert done.stderr == "dry run: would submit prepare (2 of 2 tasks)\n"
    assert hpcgen("data", "prepare", "--task-id", "0", "--num-tasks", "2", "--workers", "1").status == 0
    done = hpcgen("submit", "prepare", "-c", "run.yaml", "--dry-run", *tasks)
    assert done.stderr == "dry run: would submit prepare (1 of 2 tasks)\n"


@pytest.mark.parametrize("how", [("--dry-run",), ("--launcher", "local")])
def test_a_missing_source_is_reported_before_anything_is_submitted(
    planned_corpus: Path, how: tuple[str, ...]
) -> None:
    (planned_corpus.parent / "text/b.jsonl").unlink()
    before = listing(planned_corpus.parent)
    done = hpcgen("submit", "prepare", "-c", "run.yaml", *how, "--set", "paths.run_dir=run")
    assert (done.status, done.stdout) == (2, "")
    assert done.stderr == (
        f"{planned_corpus.parent}/text/b.jsonl does not exist; "
        "it existed when the corpus was planned; restore it, or plan again\n"
    )
    assert listing(planned_corpus.parent) == before


def test_a_missing_source_is_reported_at_its_line(workplace: Path) -> None:
    corpus = {"directory": "data", "source": {"directory": "txt"}}
    write_yaml(workplace / "run.yaml", minimal_run(data={"corpus": corpus}))
    lines = (workplace / "run.yaml").read_text().splitlines()
    [line] = [number for number, text in enumerate(lines, 1) if "txt" in text]
    done = hpcgen("data", "plan")
    assert (done.status, done.stdout) == (2, "")
    reason = "data.corpus.source.directory = txt does not exist; set it to the directory of the files"
    assert done.stderr == f"run.yaml:{line}: {reason}\n"


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_of_a_corpus_that_is_not_planned(workplace: Path, stage: str) -> None:
    corpus = {"directory": "data", "source": {"directory": "text"}}
    write_yaml(workplace / "run.yaml", minimal_run(data={"corpus": corpus}))
    done = hpcgen("data", stage)
    assert (done.status, done.stdout) == (2, "")
    assert "the corpus has no manifest; run hpcgen data plan first" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--task-id", "2", "--num-tasks", "2"), "task 2 is out of range for 2 tasks; use 0 to 1"),
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


def test_a_misspelled_command_gets_a_suggestion() -> None:
    found = hpcgen("data", "plna")
    assert (found.status, found.stdout) == (2, "")
    assert "no such command 'plna'; did you mean plan?" in found.stderr


@pytest.mark.process
def test_help_and_completion_import_nothing_slow() -> None:
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
