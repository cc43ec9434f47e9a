from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.command import hpcgen
from tests.cli.test_data_status import RUN

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("forks")]

BIN = "data/tokens/corpus-00000-of-00002.bin"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file and its corpus of two pairs."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "run.yaml").write_text(RUN.replace("num_output_files: 4", "num_output_files: 2"))
    (folder / "source").mkdir()
    for number in range(2):
        (folder / f"source/{number}.jsonl").write_text('{"text": "abc"}\n')
    assert hpcgen("data", "plan", "-c", folder / "run.yaml").status == 0
    assert hpcgen("data", "prepare", "-c", folder / "run.yaml").status == 0
    return folder


@pytest.fixture(autouse=True)
def corpus(workplace: Path, made: Path) -> None:
    """A copy of the same corpus, which each test may damage."""
    shutil.copytree(made, workplace, dirs_exist_ok=True)


def verify(*arguments):
    return hpcgen("data", "verify", "--no-megatron", *arguments)


def test_all_pairs_of_a_run_file(workplace):
    told = verify("-c", "run.yaml")
    prefix = workplace / "data/tokens/corpus-0000"
    held = "1 document, 4 tokens, 70 B, uint16"
    assert told.stdout == (f"{prefix}0-of-00002: ok  {held}\n{prefix}1-of-00002: ok  {held}\n")
    assert told.stderr == (
        "0 of 2 pairs wrong, 140 B read\n"
        "SHA-256: 2 compared with their records, 0 without one\n"
        "megatron-core: not checked: not requested\n"
    )
    assert told.status == 0


def test_files_that_a_shell_finds(workplace):
    names = sorted(str(path.relative_to(workplace)) for path in workplace.glob("data/tokens/*"))
    assert len(names) == 6  # records among them
    told = verify(*names)
    assert [line.split(":")[0] for line in told.stdout.splitlines()] == [
        "data/tokens/corpus-00000-of-00002",
        "data/tokens/corpus-00001-of-00002",
    ]


def test_a_changed_byte_ends_with_1():
    content = bytearray(Path(BIN).read_bytes())
    content[1] ^= 1
    Path(BIN).write_bytes(content)
    told = verify("-c", "run.yaml", BIN)
    assert told.status == 1
    lines = told.stdout.splitlines()
    assert lines[0].startswith("data/tokens/corpus-00000-of-00002: WRONG")
    assert f"    {BIN}: id 353 at byte 0, in document 0; valid ids are 0 to 256" in lines
    assert any(line.startswith(f"    {BIN}: the SHA-256 is ") for line in lines)
    assert told.stderr.startswith("1 of 1 pair wrong")


def test_a_pair_made_with_other_settings_or_without_a_record():
    told = verify("-c", "run.yaml", "--set", "data.corpus.drop_empty=true")
    assert told.status == 1
    assert told.stdout.count("stale: it was made with other settings than those of the run file") == 2
    old = Path("data/manifest.jsonl").read_text()
    Path("data/manifest.jsonl").write_text(old.replace('"size":16', '"size":17'))
    assert (
        verify("-c", "run.yaml").stdout.count(
            "stale: it was not made from the files that the manifest lists for it"
        )
        == 2
    )
    Path("data/manifest.jsonl").unlink()
    assert verify("-c", "run.yaml").status == 0
    for path in Path("data/tokens").glob("*.record.json"):
        path.unlink()
    assert verify("-c", "run.yaml").stdout.count("has no record") == 2
    told = verify(BIN)
    assert (told.status, told.stdout.count(", no record")) == (0, 1)


TRAINING = [
    ("validate",),
    ("render", "train"),
    ("render", "index-cache"),
    ("submit", "train", "--dry-run"),
    ("submit", "index-cache", "train", "--launcher", "local"),
]


@pytest.mark.parametrize("command", TRAINING, ids=" ".join)
def test_training_does_not_begin_with_pairs_of_other_settings_or_files(command):
    told = hpcgen(*command, "-c", "run.yaml", "--set", "data.corpus.drop_empty=true")
    stages = " ".join(word for word in command if word in ("train", "index-cache")) or "train"
    assert (told.status, told.stdout) == (2, "")
    assert (
        "corpus-00000-of-00002 (and 1 more of 2 pairs): stale: it was made with other settings than those"
        in told.stderr
    )
    assert f"run `hpcgen submit prepare {stages}` to rebuild it first" in told.stderr
    manifest = Path("data/manifest.jsonl")
    manifest.write_text(manifest.read_text().replace('"size":16', '"size":17', 1))
    told = hpcgen(*command, "-c", "run.yaml")
    assert told.status == 2
    assert (
        "corpus-00000-of-00002: stale: it was not made from the files that the manifest lists for it"
        in told.stderr
    )


@pytest.mark.parametrize("command", TRAINING[3:], ids=" ".join)
def test_training_does_not_begin_without_pairs(command):
    """No nodes are taken for what is not made. `validate` and `render`, which people run before that, only warn."""
    Path("data/tokens/corpus-00001-of-00002.idx").unlink()
    told = hpcgen(*command, "-c", "run.yaml")
    assert (told.status, told.stdout) == (2, "")
    assert "corpus-00001-of-00002.idx does not exist yet, and stage " in told.stderr
    assert "hpcgen submit prepare " in told.stderr
    for early in (("validate",), ("render", "train")):
        checked = hpcgen(*early, "-c", "run.yaml")
        assert checked.status == 0
        assert "corpus-00001-of-00002.idx does not exist yet" in checked.stderr


@pytest.mark.parametrize("command", TRAINING[3:], ids=" ".join)
def test_training_does_not_begin_without_a_plan_of_the_corpus(command):
    shutil.rmtree("data")
    told = hpcgen(*command, "-c", "run.yaml")
    assert (told.status, told.stdout) == (2, "")
    assert "corpus-00000-of-00002.idx (and 3 more files) does not exist yet, and stage " in told.stderr
    assert "; run `hpcgen data plan` and then `hpcgen submit prepare " in told.stderr
    checked = hpcgen("validate", "-c", "run.yaml")
    assert checked.status == 0
    assert "Run hpcgen data plan and then the stage prepare (or tokenize)" in checked.stderr


def test_training_begins_with_the_pairs_of_the_corpus(made):
    assert hpcgen("render", "train", "-c", "run.yaml").status == 0
    # made anew first, then nobody minds; nor are they looked at where this machine does not see the corpus
    changed = ["-c", "run.yaml", "--set", "data.corpus.drop_empty=true"]
    changed += ["--set", f"data.corpus.source.directory={made}/source"]
    assert hpcgen("submit", "prepare", "train", *changed, "--dry-run").status == 0
    Path("data/manifest.jsonl").unlink()
    assert hpcgen("render", "train", *changed).status == 0


def test_files_without_size_and_hash_are_named(workplace):
    manifest = Path("data/manifest.jsonl")
    header, first, second = manifest.read_text().splitlines()
    listed = [json.loads(line) for line in (first, second)]
    for file in listed:
        del file["path"], file["modified_ns"], file["size"]
        file["url"] = f"http://127.0.0.1:1/{file['name']}"
    listed[0]["sha256"] = "0" * 64
    manifest.write_text("\n".join([header, *map(json.dumps, listed)]) + "\n")
    told = verify("-c", "run.yaml")
    assert (
        "sources: 1 file with neither size nor SHA-256 in the manifest, "
        "so truncated downloads would not be noticed (1.jsonl)\n"
    ) in told.stderr
    assert json.loads(verify("-c", "run.yaml", "--json").stdout)["unmeasured"] == ["1.jsonl"]


def test_json():
    report = json.loads(verify("-c", "run.yaml", "--json").stdout)
    assert [pair["tokens"] for pair in report["pairs"]] == [4, 4]
    assert report["pairs"][0]["findings"] == []
    assert report["megatron_core"] is None


def test_nothing_to_verify():
    Path("run.yaml").unlink()
    told = verify()
    assert told.status == 2
    assert "no pairs are named; name prefixes, or with -c a run file" in told.stderr
    told = verify("elsewhere/x")
    assert told.status == 1
    assert told.stdout.startswith("elsewhere/x: WRONG\n    cannot read the dataset elsewhere/x")
