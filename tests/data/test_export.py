"""Exports of pairs: what datasets and torch read of them, and what interrupts or refuses them."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from hpcgen.cli.main import cli
from hpcgen.config.corpus import CorpusJob, SplitPatterns
from hpcgen.data.export import export_pairs, plan_export
from hpcgen.data.export_verification import verify_export
from hpcgen.data.pair import open_pair
from hpcgen.data.pair_records import find_records
from hpcgen.data.record import read_record
from hpcgen.data.shard import write_shard
from hpcgen.data.workers import Finished
from hpcgen.errors import HpcgenError

from . import pairs as written
from .data_runs import documents, json_lines, left_behind, make_units, planned_corpus, write_file, write_job

HOOK = Path(__file__).parent / "kill_hook"
EOD = 256
DOCUMENTS = [[5, 6, 7, EOD], [], [8, EOD], [EOD], [9] * 11 + [EOD], []]
NAMES = ["train-00000-of-00002", "train-00001-of-00002", "valid-00000-of-00001"]


def rows_of(pair: Path, folder: Path, sequence_length: int | None = None) -> list[list[int]]:
    """The rows of a shard that this process writes, as pyarrow reads them."""
    (shard,) = plan_export({pair: None}, folder / "rows", "parquet", sequence_length)
    write_shard(shard, lambda step: None)
    return pq.read_table(folder / "rows" / shard.file)["input_ids"].to_pylist()


def findings(directory: Path) -> list[str]:
    return [
        str(finding) for report in verify_export(directory, workers=1).pairs for finding in report.findings
    ]


def export(*arguments: Any) -> Any:
    return CliRunner().invoke(cli, ["data", "export", "--workers", "1", *map(str, arguments)])


def content(directory: Path) -> dict[str, bytes]:
    """Every file of an export. Records are left out, because they have times."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and not path.name.endswith(".record.json")
    }


@pytest.fixture
def in_this_process(monkeypatch):
    """Write shards without worker processes, which take a second to start."""
    monkeypatch.setattr(
        "hpcgen.data.export.run_all",
        lambda work, items, num_workers: (
            Finished(index, work(item, lambda step: None, lambda: 1)) for index, item in enumerate(items)
        ),
    )


@pytest.fixture(scope="module")
def datasets():
    module = pytest.importorskip("datasets")
    module.disable_progress_bars()
    return module


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> CorpusJob:
    """A corpus with two training pairs and one for validation, all made."""
    folder = tmp_path_factory.mktemp("corpus")
    splits = {"a.jsonl": "train", "b.jsonl": "train", "c.jsonl": "valid"}
    for seed, name in enumerate(splits):
        write_file(folder / "source" / name, json_lines([*documents(9, seed), ""]))
    job = planned_corpus(
        folder / "source", folder / "corpus", list(splits), splits=splits, num_output_files=2
    )
    patterns = SplitPatterns(train=("[ab]*",), valid=("c*",))
    job = dataclasses.replace(job, corpus=dataclasses.replace(job.corpus, splits=patterns), selection={})
    make_units(job, "prepare")
    return job


@pytest.fixture
def copy(corpus: CorpusJob, tmp_path: Path) -> Path:
    """A copy of the directory of pairs, for tests that change them."""
    return Path(shutil.copytree(corpus.directory / "tokens", tmp_path / "tokens"))


def test_a_row_for_each_document_with_tokens(tmp_path):
    assert rows_of(written.write(tmp_path / "p", DOCUMENTS), tmp_path) == [ids for ids in DOCUMENTS if ids]


def test_rows_of_fixed_length_continue_across_documents(tmp_path, monkeypatch):
    stream = [token for ids in DOCUMENTS for token in ids]
    pair = written.write(tmp_path / "p", DOCUMENTS)
    assert len(stream) == 19
    expected = [stream[0:6], stream[6:12], stream[12:18]]
    assert rows_of(pair, tmp_path, 6) == expected
    counts = read_record(tmp_path / "rows" / "p-00000-of-00001").counts
    assert (counts.documents_in, counts.documents_out, counts.empty) == (6, 4, 2)
    assert (counts.sequences, counts.tokens) == (3, 18)
    monkeypatch.setattr("hpcgen.data.shard._GROUP_TOKENS", 13)  # several row groups
    assert rows_of(pair, tmp_path, 6) == expected


def test_documents_of_several_sequences_and_many_row_groups(tmp_path, monkeypatch):
    """Pairs that Megatron-LM split into sentences, read in chunks smaller than the pair."""
    monkeypatch.setattr("hpcgen.data.shard._GROUP_TOKENS", 4)
    monkeypatch.setattr("hpcgen.data.shard._CHUNK", 2)
    pair = written.write_sequences(tmp_path / "p", [[[1, 2], [3]], [], [[4]], [], [[5] * 9, [6]], [[7]]])
    assert rows_of(pair, tmp_path) == [[1, 2, 3], [4], [5] * 9 + [6], [7]]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(300, "uint16"), (100_000, "int32")])
def test_ids_keep_their_type(tmp_path, vocab_size, dtype):
    top = vocab_size - 1
    assert rows_of(written.write(tmp_path / "p", [[0, top]], vocab_size), tmp_path) == [[0, top]]
    column = pq.read_schema(tmp_path / "rows" / "data" / "p-00000-of-00001.parquet").field("input_ids")
    assert str(column.type.value_type) == dtype


@pytest.mark.usefixtures("in_this_process")
def test_what_datasets_and_torch_read(tmp_path, corpus, datasets):
    torch = pytest.importorskip("torch")
    pairs = {name: open_pair(corpus.directory / "tokens" / name) for name in NAMES}
    wanted = [pairs[name].document(number).tolist() for name in NAMES[:2] for number in range(9)]
    tokens = [corpus.directory / "tokens" / name for name in NAMES]
    for format, length in (("parquet", None), ("arrow", None), ("arrow", 64)):
        out = tmp_path / f"{format}-{length}"
        lengths = ["--sequence-length", length] if length else []
        ended = export(*tokens, "--output", out, "--format", format, *lengths, "--json")
        assert ended.exit_code == 0, ended.output
        found = json.loads(ended.stdout)
        cache = str(tmp_path / "cache")
        read = (
            datasets.load_dataset(str(out), cache_dir=cache)
            if format == "parquet"
            else datasets.load_from_disk(str(out))
        )
        assert set(read) == {"train", "valid"}
        assert read["train"].features["input_ids"].feature.dtype == "uint16"
        assert len(read["train"]) + len(read["valid"]) == found["rows"]
        if length is None:
            assert read["train"]["input_ids"][:] == wanted
            assert (found["rows"], found["documents_without_tokens"], found["tokens_left_out"]) == (27, 3, 0)
        else:
            assert found["tokens_left_out"] > 0
            batch = next(iter(torch.utils.data.DataLoader(read["train"].with_format("torch"), batch_size=3)))
            first = np.concatenate([pairs[NAMES[0]].document(number) for number in range(9)])[: 3 * 64]
            assert batch["input_ids"].dtype == torch.int64
            assert batch["input_ids"].flatten().tolist() == first.tolist()
        assert findings(out) == []
    streamed = datasets.load_dataset(str(tmp_path / "parquet-None"), streaming=True)["train"]
    assert next(iter(streamed))["input_ids"] == wanted[0]


@pytest.mark.usefixtures("in_this_process")
def test_all_pairs_of_a_run_are_exported_once(tmp_path, corpus):
    run = ["-c", write_job(corpus, tmp_path / "corpus.json"), "--output", tmp_path / "out"]
    first = export(*run)
    assert first.output.splitlines()[0] == f"{tmp_path}/out: 3 made, 0 already done"
    before = content(tmp_path / "out")
    assert sorted(before) == sorted([f"data/{name}.parquet" for name in NAMES] + ["export.json"])
    (tmp_path / "out" / "data" / f"{NAMES[1]}.parquet").unlink()
    assert export(*run).output.splitlines()[0] == f"{tmp_path}/out: 1 made, 2 already done"
    assert content(tmp_path / "out") == before
    ended = export(*run, "--sequence-length", 8)
    assert (ended.exit_code, str(ended.exception)) == (
        1,
        f"{tmp_path}/out has a different export: sequence_length is None, not 8; "
        "choose another --output, or remove the directory",
    )
    assert content(tmp_path / "out") == before
    verified = CliRunner().invoke(cli, ["data", "verify", str(tmp_path / "out")])
    assert (verified.exit_code, verified.stderr.splitlines()[0].split(",")[0]) == (0, "0 of 3 shards wrong")


@pytest.mark.process
@pytest.mark.usefixtures("forks")
def test_a_failed_shard_does_not_stop_the_others(tmp_path, copy):
    torn = copy / f"{NAMES[0]}.bin"
    torn.write_bytes(torn.read_bytes()[:-2] + b"xx")
    ended = export(*(copy / name for name in NAMES), "--output", tmp_path / "out", "--format", "arrow")
    assert ended.stdout.splitlines()[0] == f"{tmp_path}/out: 2 made, 0 already done, 1 failed"
    assert f"{NAMES[0]}: {torn}: the SHA-256 is " in str(ended.exception)
    assert not (tmp_path / "out" / "dataset_dict.json").exists()
    assert left_behind(tmp_path) == []


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (
            lambda out, tokens: (out / "data" / f"{NAMES[0]}.parquet").unlink(),
            f"/{NAMES[0]}.parquet is missing; run the export again",
        ),
        (
            lambda out, tokens: shutil.copy(
                out / "data" / f"{NAMES[0]}.parquet", out / "data" / "train-00002-of-00003.parquet"
            ),
            "train-00002-of-00003.parquet is not part of the export; remove it",
        ),
        (
            lambda out, tokens: (out / f"{NAMES[0]}.record.json").unlink(),
            "it has no record, because the export",
        ),
        (
            lambda out, tokens: (out / "data" / f"{NAMES[0]}.parquet").write_bytes(b"PAR1"),
            "the size is 4 bytes, but its record has ",
        ),
        (
            lambda out, tokens: (
                shutil.copy(tokens / f"{NAMES[1]}.bin", tokens / f"{NAMES[0]}.bin")
                and shutil.copy(tokens / f"{NAMES[1]}.idx", tokens / f"{NAMES[0]}.idx")
            ),
            f"{NAMES[0]} has been made again since then; run the export again",
        ),
    ],
    ids=["missing", "additional", "no record", "torn", "other pair"],
)
def test_what_verification_finds(tmp_path, copy, damage, reason):
    for name in NAMES:
        (copy / f"{name}.record.json").unlink()
    shards = plan_export({copy / name: None for name in NAMES}, tmp_path / "out", "parquet", None)
    export_pairs(shards)
    assert findings(tmp_path / "out") == []
    damage(tmp_path / "out", copy)
    (found,) = findings(tmp_path / "out")
    assert reason in found


@pytest.mark.usefixtures("in_this_process")
def test_files_that_describe_an_arrow_dataset_are_verified(tmp_path, copy):
    shards = plan_export({copy / name: None for name in NAMES}, tmp_path / "out", "arrow", None)
    export_pairs(shards)
    assert findings(tmp_path / "out") == []
    (tmp_path / "out" / "train" / "state.json").write_text("{}")
    (tmp_path / "out" / "dataset_dict.json").unlink()
    assert findings(tmp_path / "out") == [
        f"{tmp_path}/out/train/state.json does not describe these shards; run the export again",
        f"{tmp_path}/out/dataset_dict.json is missing; run the export again",
    ]


@pytest.mark.usefixtures("in_this_process")
def test_rows_are_compared_with_the_pair(tmp_path, copy, monkeypatch):
    """A shard that matches its record, but whose ids do not come from the pair."""
    records = find_records([copy / name for name in NAMES])
    wrong = {
        copy / NAMES[0]: lambda rows, offsets: real({"input_ids": rows["input_ids"] + 1}, offsets),
        copy / NAMES[1]: lambda rows, offsets: real(rows, np.r_[0, offsets[1:-1] + 1, offsets[-1]]),
        copy / NAMES[2]: lambda rows, offsets: real(rows, np.maximum(offsets - 1, 0)),
    }
    from hpcgen.data import shard as module

    real = module._batch
    for prefix, batch in wrong.items():
        monkeypatch.setattr(module, "_batch", batch)
        out = tmp_path / prefix.name
        export_pairs(plan_export({prefix: records[prefix]}, out, "parquet", None))
        (found,) = findings(out)
        assert f": row 1 or a later one differs from the pair {prefix}; run the export again" in found
    shutil.rmtree(copy)
    assert findings(tmp_path / NAMES[1]) == []  # only counts and hashes remain
    assert "tokens, but the record has" in findings(tmp_path / NAMES[2])[0]


def test_refusals_write_nothing(tmp_path, corpus):
    pair = corpus.directory / "tokens" / NAMES[0]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    for arguments, reason in [
        (
            [pair, "--output", tmp_path / "full"],
            f"{tmp_path}/full has files that are not an export: notes.txt; choose another --output, or",
        ),
        ([tmp_path / "none", "--output", tmp_path / "out"], f"cannot read the dataset {tmp_path}/none: "),
        (["--output", tmp_path / "out", "-c", tmp_path / "no.yaml"], "no.yaml"),
    ]:
        ended = export(*arguments)
        assert isinstance(ended.exception, HpcgenError)
        assert reason in str(ended.exception)
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "notes.txt"]
    with pytest.raises(
        HpcgenError, match=r"is not an export of hpcgen: cannot read export\.json: No such file"
    ):
        verify_export(tmp_path / "full", workers=1)
    (shard,) = plan_export({pair: None}, tmp_path / "out", "parquet", 10**6)
    with pytest.raises(
        HpcgenError, match=r"tokens, fewer than sequence_length = 1000000; leave it out, or use"
    ):
        write_shard(shard, lambda step: None)
    assert not (tmp_path / "out" / "data" / f"{NAMES[0]}.parquet").exists()


@pytest.mark.slow
def test_kills_at_writes_and_renames(tmp_path, corpus):
    """kill -9 during an export of Arrow files: a shard with a record is complete, and the next run makes the rest."""
    pairs = [str(corpus.directory / "tokens" / name) for name in NAMES[1:]]

    def run(output: Path, at: int) -> bool:
        """Runs the command and kills it at an operation. Returns True if it came to its end."""
        (tmp_path / "counter").unlink(missing_ok=True)
        hook = {
            "PYTHONPATH": str(HOOK),
            "KILL_COUNTER": str(tmp_path / "counter"),
            "KILL_AT": str(at),
            "KILL_HOW": "torn",
        }
        command = [sys.executable, "-m", "hpcgen", "data", "export", *pairs, "--output", output]
        options = ["--format", "arrow", "--workers", "1"]
        ended = subprocess.run(
            [*command, *options],
            env=os.environ | hook,
            start_new_session=True,
            capture_output=True,
            check=False,
        )
        assert ended.returncode in (0, -signal.SIGKILL), ended.stderr
        return ended.returncode == 0

    assert run(tmp_path / "right", 0)
    operations = (tmp_path / "counter").stat().st_size
    assert not run(tmp_path / "out", operations // 3)
    for record in (tmp_path / "out").glob("*.record.json"):
        if not record.name.startswith("."):
            made = read_record(record.with_name(record.name.removesuffix(".record.json")))
            assert made.has_valid_outputs(tmp_path / "out", [made.outputs[0].name])
    assert run(tmp_path / "out", 0)
    made, right = content(tmp_path / "out"), content(tmp_path / "right")
    assert made == right
    assert findings(tmp_path / "out") == []
