"""Finished and unfinished work: the record must match settings, inputs and outputs."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpcgen.config.corpus import CorpusConfig, CorpusJob, SplitPatterns
from hpcgen.config.tokenizer import TokenizerConfig, gpt2_files
from hpcgen.data import concurrent_map
from hpcgen.data.listed_files import ManifestFile
from hpcgen.data.manifest import Manifest, manifest_path, read_manifest, write_manifest
from hpcgen.data.pair_records import find_records, stale_pairs
from hpcgen.data.pending import pending
from hpcgen.data.record import FileIdentity, Record, read_record, record_path, write_record
from hpcgen.data.stages import DATA_STAGES, configuration, units
from hpcgen.data.status import corpus_status
from hpcgen.data.task import make_unit, run_task
from hpcgen.data.unit import bytes_to_read, units_of_task
from hpcgen.data.unit_checker import done_record, done_records
from hpcgen.errors import HpcgenError

from .data_runs import (
    CHAIN,
    documents,
    json_lines,
    make_units,
    one_unit,
    planned_corpus,
    published,
    swapped_merges,
    write_file,
)

NAMES = ["a.jsonl.zst", "b.jsonl.gz", "c.jsonl", "d.jsonl.zst"]


@pytest.fixture
def corpus(tmp_path):
    """Four files, two outputs; all four stages run."""
    for seed, name in enumerate(NAMES):
        write_file(tmp_path / "source" / name, json_lines(documents(20, seed)))
    job = planned_corpus(tmp_path / "source", tmp_path / "corpus", NAMES, num_output_files=2)
    make_units(job, *CHAIN)
    return job


def with_settings(job, **changes):
    return dataclasses.replace(job, corpus=dataclasses.replace(job.corpus, **changes))


def to_do(job, stage) -> list[str]:
    """The units of a stage that are not done."""
    manifest = read_manifest(manifest_path(job.directory))
    return [
        unit.name
        for unit in units(stage, job, manifest)
        if done_record(unit, job, configuration(stage, job)) is None
    ]


def all_to_do(job) -> dict[str, list[str]]:
    return {stage: to_do(job, stage) for stage in CHAIN}


NOTHING: dict[str, list[str]] = {stage: [] for stage in CHAIN}
CONCAT = ["concat/corpus-00000-of-00002.jsonl", "concat/corpus-00001-of-00002.jsonl"]
TOKENS = ["tokens/corpus-00000-of-00002", "tokens/corpus-00001-of-00002"]


def test_everything_is_done(corpus):
    assert all_to_do(corpus) == NOTHING
    assert to_do(corpus, "prepare") == TOKENS  # made by another stage


@pytest.mark.parametrize(
    "changes",
    [{"json_key": "content"}, {"drop_empty": True}, {"bad_documents": "skip"}],
    ids=lambda changes: next(iter(changes)),
)
def test_changed_text_settings_repeat_the_work(corpus, changes):
    assert all_to_do(with_settings(corpus, **changes)) == {**NOTHING, "tokenize": TOKENS}


def test_settings_that_change_no_byte(corpus):
    other = with_settings(corpus, verify_fraction=0.5, download_connections=3, max_bad_fraction=0.5)
    assert all_to_do(other) == NOTHING


def test_tokenizer(corpus, tmp_path):
    vocab, merges = gpt2_files(TokenizerConfig())
    own = tmp_path / "vocab.json"
    own.write_bytes(vocab.read_bytes())
    job = dataclasses.replace(corpus, tokenizer=TokenizerConfig(vocab_file=str(own), merges_file=str(merges)))
    assert all_to_do(job) == {**NOTHING, "tokenize": TOKENS}
    before = configuration("tokenize", job)
    own.write_bytes(vocab.read_bytes() + b"\n")  # the same name, another content
    assert configuration("tokenize", job) != before


def test_the_content_of_every_kind_of_tokenizer_is_in_the_settings(corpus, tmp_path):
    vocab, merges = gpt2_files(TokenizerConfig())
    own = {"vocab_file": str(tmp_path / "v.json"), "merges_file": str(tmp_path / "m.txt")}
    Path(own["vocab_file"]).write_bytes(vocab.read_bytes())
    swapped = swapped_merges(merges.read_bytes())
    hashes = []
    for content in (merges.read_bytes(), swapped):
        Path(own["merges_file"]).write_bytes(content)
        hashes.append(configuration("prepare", dataclasses.replace(corpus, tokenizer=TokenizerConfig(**own))))
    gpt2 = dataclasses.replace(corpus, tokenizer=TokenizerConfig())
    assert hashes[0] == configuration("prepare", gpt2)  # the same two files
    assert len({*hashes, DATA_STAGES["prepare"].earlier_configuration(gpt2)}) == 3
    assert (
        DATA_STAGES["prepare"].earlier_configuration(
            dataclasses.replace(corpus, tokenizer=TokenizerConfig(**own))
        )
        is None
    )
    definition = tmp_path / "tokenizer.json"
    named = dataclasses.replace(
        corpus,
        tokenizer=TokenizerConfig(kind="huggingface", tokenizer_file=str(definition), eod_token="</s>"),
    )
    for merge in ('["a", "b"]', '["b", "a"]'):
        definition.write_text(
            f'{{"model": {{"type": "BPE", "vocab": {{"a": 0, "b": 1, "</s>": 2}}, "merges": [{merge}]}}}}'
        )
        hashes.append(configuration("prepare", named))
    assert len({*hashes, configuration("prepare", corpus)}) == 5


def test_a_tokenizer_that_changes_while_its_task_runs_makes_nothing(tmp_path):
    vocab, merges = gpt2_files(TokenizerConfig())
    own = tmp_path / "m.txt"
    own.write_bytes(merges.read_bytes())
    write_file(tmp_path / "source/a.jsonl", json_lines(documents(5)))
    job = planned_corpus(
        tmp_path / "source",
        tmp_path / "corpus",
        ["a.jsonl"],
        num_output_files=1,
        tokenizer=TokenizerConfig(vocab_file=str(vocab), merges_file=str(own)),
    )
    settings = configuration("prepare", job)
    own.write_bytes(swapped_merges(merges.read_bytes()))
    with pytest.raises(HpcgenError, match="the tokenizer's files have changed since the task started"):
        make_unit(one_unit(job, "prepare"), lambda step: None, lambda: 1, job=job, settings_hash=settings)
    assert published(job.directory) == []


def test_number_of_outputs(corpus):
    other = with_settings(corpus, num_output_files=3)
    assert all_to_do(other) == {
        "extract": [],
        "concat": [f"concat/corpus-{index:05d}-of-00003.jsonl" for index in range(3)],
        "tokenize": [f"tokens/corpus-{index:05d}-of-00003" for index in range(3)],
    }
    make_units(other, "concat", "tokenize")
    # the outputs of the other number are kept: both are complete, and the records distinguish them
    assert all_to_do(corpus) == all_to_do(other) == NOTHING


@pytest.mark.parametrize("touch", [False, True], ids=["content", "time"])
def test_a_source_that_changed(corpus, touch, tmp_path):
    source = tmp_path / "source/a.jsonl.zst"
    if touch:
        os.utime(source, ns=(1, 1))
    else:
        write_file(source, json_lines(documents(21, 99)))
    of_it = {"extract": ["extract/a.jsonl"], "concat": CONCAT[:1], "tokenize": TOKENS[:1]}
    assert all_to_do(corpus) == of_it
    with pytest.raises(HpcgenError, match="changed since it was planned"):
        make_units(corpus, "extract")
    replanned = planned_corpus(tmp_path / "source", corpus.directory, NAMES, num_output_files=2)
    assert all_to_do(replanned) == of_it
    for stage in ("concat", "tokenize"):  # of what is there they could only make the old again
        with pytest.raises(
            HpcgenError, match=r"is outdated: .*; run the stage extract again, and the stages"
        ):
            make_units(replanned, stage)
    make_units(replanned, "extract")
    assert all_to_do(replanned) == (NOTHING if touch else {**of_it, "extract": []})
    make_units(replanned, "concat")
    assert all_to_do(replanned) == (NOTHING if touch else {**NOTHING, "tokenize": TOKENS[:1]})
    make_units(replanned, "tokenize")
    assert all_to_do(replanned) == NOTHING


def test_a_source_that_is_gone_was_used(corpus, tmp_path):
    (tmp_path / "source/a.jsonl.zst").unlink()
    assert all_to_do(corpus) == NOTHING


def test_inputs_removed_to_free_space_still_count(corpus):
    for path in (corpus.directory / "extract").iterdir():
        path.unlink()
    assert all_to_do(corpus) == {**NOTHING, "extract": [f"extract/{x}.jsonl" for x in "abd"]}


@pytest.mark.parametrize(
    ("output", "unit"),
    [
        ("extract/a.jsonl", "extract/a.jsonl"),
        ("concat/corpus-00001-of-00002.jsonl", "concat/corpus-00001-of-00002.jsonl"),
        ("tokens/corpus-00000-of-00002.bin", TOKENS[0]),
        ("tokens/corpus-00001-of-00002.idx", TOKENS[1]),
    ],
)
@pytest.mark.parametrize("how", ["removed", "cut", "record-removed", "record-torn"])
def test_an_incomplete_output_is_not_done(corpus, output, unit, how):
    path, record = corpus.directory / output, record_path(corpus.directory / unit)
    if how == "removed":
        path.unlink()
    elif how == "cut":
        os.truncate(path, path.stat().st_size - 1)
    elif how == "record-removed":
        record.unlink()
    else:
        os.truncate(record, record.stat().st_size // 2)
    stage = "tokenize" if output.startswith("tokens") else output.partition("/")[0]
    assert all_to_do(corpus) == {**NOTHING, stage: [unit]}


def test_other_shares_of_one_name_are_different_work(tmp_path):
    """One input to three outputs, then to two of the same names: line n goes elsewhere."""
    for name, lines in (("a.jsonl", 30), ("b.jsonl", 10)):
        write_file(tmp_path / "source" / name, json_lines(["x" * 50] * lines))
    job = planned_corpus(tmp_path / "source", tmp_path / "corpus", ["a.jsonl", "b.jsonl"], num_output_files=4)
    make_units(job, "prepare")
    record = read_record(job.directory / "tokens/corpus-00000-of-00004")
    assert record is not None
    assert len(record.outputs) == 2 * 3
    write_file(tmp_path / "source/b.jsonl", json_lines(["x" * 50] * 30))
    job = planned_corpus(tmp_path / "source", tmp_path / "corpus", ["a.jsonl", "b.jsonl"], num_output_files=4)
    assert to_do(job, "prepare") == ["tokens/corpus-00000-of-00004", "tokens/corpus-00002-of-00004"]
    make_units(job, "prepare")
    assert to_do(job, "prepare") == []


@pytest.mark.parametrize("stage", ["extract", "concat", "tokenize"])
def test_a_byte_that_changed(corpus, stage):
    """Found by its stage, put right by it, and what was made of it before stays done."""
    unit = one_unit(corpus, stage)
    path = corpus.directory / unit.files[0]
    whole = path.read_bytes()
    path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    assert all_to_do(corpus) == {**NOTHING, stage: [unit.name]}
    make_units(corpus, stage)
    assert all_to_do(corpus) == NOTHING
    assert path.read_bytes() == whole


def test_an_interrupted_download_does_not_affect_other_stages(tmp_path):
    content = write_file(tmp_path / "corpus/download/a.jsonl.gz", json_lines(documents(20))).read_bytes()
    job = CorpusJob(
        corpus=CorpusConfig(directory=str(tmp_path / "corpus")), tokenizer=TokenizerConfig(kind="bytes")
    )
    file = ManifestFile(name="a.jsonl.gz", split="corpus", size=len(content), url="http://localhost/a")
    write_manifest(Manifest("a test", [file]), manifest_path(job.directory))
    sha256 = hashlib.sha256(content).hexdigest()
    record = Record(
        stage="download",
        configuration=configuration("download", job),
        inputs=(FileIdentity("a.jsonl.gz", len(content), sha256),),
        outputs=(FileIdentity("download/a.jsonl.gz", len(content), sha256),),
    )
    write_record(record, job.directory / "download/a.jsonl.gz")
    make_units(job, "extract")
    os.truncate(job.directory / "download/a.jsonl.gz", 50)
    assert (to_do(job, "download"), to_do(job, "extract")) == (["download/a.jsonl.gz"], [])
    other = ManifestFile(name="a.jsonl.gz", split="corpus", size=51, url="http://localhost/a")
    write_manifest(Manifest("a test", [other]), manifest_path(job.directory))
    assert to_do(job, "extract") == ["extract/a.jsonl"]


def test_a_copy_with_other_times_is_done(corpus, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(corpus.directory, copy, copy_function=shutil.copyfile)
    job = dataclasses.replace(corpus, corpus=dataclasses.replace(corpus.corpus, directory=str(copy)))
    assert all_to_do(job) == NOTHING


@pytest.mark.process
def test_an_old_chain_of_one_file(tmp_path):
    """A unit that is planned again is made again, through the entire chain of commands."""
    write_file(tmp_path / "source/a.jsonl.gz", json_lines(documents(20)))
    job = planned_corpus(tmp_path / "source", tmp_path / "corpus", ["a.jsonl.gz"], num_output_files=2)
    make_units(job, *CHAIN)
    write_file(tmp_path / "source/a.jsonl.gz", json_lines(documents(10)))
    job = planned_corpus(tmp_path / "source", tmp_path / "corpus", ["a.jsonl.gz"], num_output_files=2)
    manifest = read_manifest(manifest_path(job.directory))
    assert [pending(stage, job, manifest).tasks(2) for stage in CHAIN] == [(0,), (0,), (0, 1)]
    assert [status.done for status in corpus_status(job, manifest, CHAIN, 0.0)] == [0, 0, 0]
    report = run_task("tokenize", job, manifest, workers=1)
    assert report.done_before == 0
    assert [error.partition(": ")[2].partition(";")[2] for error in report.errors] == [
        " run the stage extract again, and the stages after it"
    ] * 2
    prefixes = [job.directory / name for name in TOKENS]
    assert set(stale_pairs(job, manifest, find_records(prefixes))) == set(prefixes)
    make_units(job, *CHAIN)
    assert all_to_do(job) == NOTHING
    assert not stale_pairs(job, manifest, find_records(prefixes))


def test_a_pair_has_one_record(tmp_path):
    """tokenize has one for each pair, prepare one for all of a file: each takes the place of the other's."""
    write_file(tmp_path / "source/a.jsonl.gz", json_lines(documents(20)))
    job = planned_corpus(tmp_path / "source", tmp_path / "corpus", ["a.jsonl.gz"], num_output_files=2)
    prefixes = [job.directory / name for name in TOKENS]
    make_units(job, *CHAIN)
    job = with_settings(job, json_key="other", bad_documents="skip", max_bad_fraction=1)
    write_file(tmp_path / "source/a.jsonl.gz", b"".join(b'{"other": "%d"}\n' % index for index in range(9)))
    job = dataclasses.replace(
        planned_corpus(tmp_path / "source", tmp_path / "corpus", ["a.jsonl.gz"]), corpus=job.corpus
    )
    make_units(job, "prepare")
    assert {record.stage for record in find_records(prefixes).values()} == {"prepare"}
    assert to_do(job, "prepare") == []
    make_units(job, *CHAIN)
    assert {record.stage for record in find_records(prefixes).values()} == {"tokenize"}


def test_rejects_belong_to_the_outputs(tmp_path):
    write_file(tmp_path / "source/a.jsonl", b'{"text": "a"}\nbad\n')
    job = planned_corpus(
        tmp_path / "source",
        tmp_path / "corpus",
        ["a.jsonl"],
        num_output_files=1,
        bad_documents="skip",
        max_bad_fraction=0.9,
    )
    make_units(job, "prepare")
    assert to_do(job, "prepare") == []
    rejects = job.directory / "tokens/corpus-00000-of-00001.rejects.jsonl"
    rejects.unlink()
    assert to_do(job, "prepare") == ["tokens/corpus-00000-of-00001"]


def test_tasks_share_the_units(corpus):
    manifest = read_manifest(manifest_path(corpus.directory))
    whole = units("extract", corpus, manifest)
    for num_tasks in (1, 2, 7):
        shares = [units_of_task(whole, task_id, num_tasks) for task_id in range(num_tasks)]
        assert sorted(unit.name for share in shares for unit in share) == sorted(unit.name for unit in whole)


@pytest.mark.parametrize("slow_call_s", [0.0, 1e9], ids=["threads", "one-by-one"])
def test_many_units_are_looked_at(tmp_path, monkeypatch, slow_call_s):
    """As on storage that answers late, and on storage that answers at once; in the order of the units."""
    names = [f"{index:03d}.jsonl.gz" for index in range(80)]
    for index, name in enumerate(names):
        write_file(tmp_path / "source" / name, json_lines(["x" * index]))
    job = planned_corpus(tmp_path / "source", tmp_path / "corpus", names, num_output_files=4)
    every = units("extract", job, read_manifest(manifest_path(job.directory)))
    settings = configuration("extract", job)
    for unit in every[::3]:
        make_unit(unit, lambda step: None, lambda: 1, job=job, settings_hash=settings)
    monkeypatch.setattr(concurrent_map, "_SLOW_CALL_S", slow_call_s)
    found = done_records(every, job, settings)
    assert [record and record.outputs[0].name for record in found] == [
        None if index % 3 else unit.name for index, unit in enumerate(every)
    ]
    sizes = bytes_to_read(units("concat", job, read_manifest(manifest_path(job.directory))))
    assert len(sizes) == 4
    assert sum(sizes) == sum(
        found[index].outputs[0].size if index % 3 == 0 else unit.size for index, unit in enumerate(every)
    )


def test_a_split_without_files(corpus):
    other = with_settings(corpus, splits=SplitPatterns(train=("a*",), valid=("b*",)))
    with pytest.raises(HpcgenError, match=r"no file in the split train; correct data\.corpus\.splits"):
        to_do(other, "prepare")


def test_old_and_new_outputs_coexist(corpus):
    before = published(corpus.directory)
    make_units(with_settings(corpus, num_output_files=1), "concat")
    assert set(before) < set(published(corpus.directory))


@pytest.mark.process
def test_units_need_no_package_of_the_extra_data() -> None:
    code = """
import sys
for name in ("msgspec", "numpy", "zstandard", "isal", "tokenizers", "httpx2", "huggingface_hub"):
    sys.modules[name] = None
from types import SimpleNamespace
from hpcgen.config.corpus import CorpusConfig, CorpusJob
from hpcgen.config.tokenizer import TokenizerConfig
from hpcgen.data.stages import DATA_STAGES, configuration, units
job = CorpusJob(corpus=CorpusConfig(directory="/c"), tokenizer=TokenizerConfig(kind="bytes"))
known = {"name": "a.jsonl.gz", "split": "corpus", "size": 1, "url": "https://a/x"}
file = SimpleNamespace(**known, sha256=None, version=None, path=None)
manifest = SimpleNamespace(files=[file], of_split=lambda split: [file])
for stage in DATA_STAGES:
    configuration(stage, job)
    print([unit.name for unit in units(stage, job, manifest)][0])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == [
        "download/a.jsonl.gz",
        "extract/a.jsonl",
        "concat/corpus-00000-of-00001.jsonl",
        "tokens/corpus-00000-of-00001",
        "tokens/corpus-00000-of-00001",
    ], done.stderr
