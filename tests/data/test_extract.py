"""Extraction: the right bytes, all damage found, nothing incomplete published."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import os
import random

import pytest
import zstandard

from hpcgen.data.progress import Step
from hpcgen.data.record import read_record, record_path
from hpcgen.data.stages.base import Context
from hpcgen.data.stages.extract import EXTRACT
from hpcgen.errors import HpcgenError

from .data_runs import documents, json_lines, one_unit, planned_corpus, published, write_file

CONTEXT = Context(configuration="settings")
CONTENT = json_lines(documents(40))


@pytest.fixture
def corpus(tmp_path):
    def make(name: str, packed: bytes):
        (tmp_path / "source").mkdir(exist_ok=True)
        (tmp_path / "source" / name).write_bytes(packed)
        return planned_corpus(tmp_path / "source", tmp_path / "corpus", [name])

    return make


def frames(content: bytes) -> bytes:
    """Two frames, an empty one and a skippable one between them, as pzstd and others write them."""
    pack = zstandard.ZstdCompressor(write_checksum=True).compress
    half = len(content) // 2
    skippable = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"skip"
    return pack(content[:half]) + pack(b"") + skippable + pack(content[half:])


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("a.jsonl.zst", zstandard.ZstdCompressor(write_checksum=True).compress),
        ("a.jsonl.zst", frames),
        ("a.jsonl.gz", gzip.compress),
        ("a.jsonl.gz", lambda content: gzip.compress(content[:99]) + gzip.compress(content[99:])),
    ],
    ids=["zst", "zst-frames", "gz", "gz-members"],
)
@pytest.mark.parametrize("last_newline", [True, False])
def test_content_and_record(corpus, name, pack, last_newline):
    content = CONTENT if last_newline else CONTENT.removesuffix(b"\n")
    packed = pack(content)
    job = corpus(name, packed)
    steps: list[Step] = []
    record = EXTRACT.make(
        one_unit(job, "extract"), job, Context(configuration="settings", advance=steps.append)
    )

    output = job.directory / "extract/a.jsonl"
    assert output.read_bytes() == content
    assert record == read_record(output)
    assert (record.counts.documents_in, record.counts.documents_out) == (40, 40)
    assert record.counts.text_bytes == record.outputs[0].size == len(content)
    assert record.outputs[0].sha256 == hashlib.sha256(content).hexdigest()
    assert record.inputs[0].sha256 == hashlib.sha256(packed).hexdigest()
    assert sum(step.bytes for step in steps) == len(packed)
    assert published(job.directory) == ["extract/a.jsonl", "extract/a.jsonl.record.json"]


@pytest.mark.parametrize("suffix", ["zst", "gz"])
def test_truncated_and_changed_files_are_found(corpus, suffix):
    choose = random.Random(1)
    content = json_lines(documents(8, seed=3))
    pack = gzip.compress if suffix == "gz" else zstandard.ZstdCompressor(write_checksum=True).compress
    packed = pack(content)
    job = corpus(f"a.jsonl.{suffix}", packed)
    unit = one_unit(job, "extract")
    (item,) = unit.inputs
    output = job.directory / unit.name

    def extract_from(changed: bytes, sha256: str | None) -> None:
        item.path.write_bytes(changed)
        now = dataclasses.replace(item, size=len(changed), modified_ns=None, sha256=sha256)
        EXTRACT.make(dataclasses.replace(unit, inputs=(now,)), job, CONTEXT)

    for _ in range(200):
        with pytest.raises(HpcgenError, match=r"truncated|empty|damaged"):
            extract_from(packed[: choose.randrange(len(packed))], None)
    for _ in range(200):
        changed = bytearray(packed)
        changed[choose.randrange(len(packed))] ^= 1 << choose.randrange(8)
        # with the hash that was planned everything is found, ...
        with pytest.raises(HpcgenError, match=r"truncated|empty|damaged|other data follows|not zstd|SHA-256"):
            extract_from(changed, hashlib.sha256(packed).hexdigest())
        assert published(job.directory) == []
        # ... without it all that changes the content; some bits of the header say nothing of it
        with contextlib.suppress(HpcgenError):
            extract_from(changed, None)
            assert output.read_bytes() == content
            record_path(output).unlink()
            output.unlink()
        assert published(job.directory) == []


@pytest.mark.parametrize(
    ("packed", "message"),
    [
        (b"", "the file is empty"),
        (b"<!DOCTYPE html><html><body>404 Not Found</body></html>" * 9, "a web page"),
        (zstandard.compress(b""), "the file is empty"),
        (zstandard.compress(CONTENT) + b"trailing", "other data follows it"),
    ],
    ids=["empty", "html", "nothing", "trailing"],
)
def test_no_data(corpus, packed, message):
    job = corpus("a.jsonl.zst", packed)
    with pytest.raises(HpcgenError, match=rf"a\.jsonl\.zst.*{message}"):
        EXTRACT.make(one_unit(job, "extract"), job, CONTEXT)
    assert published(job.directory) == []


def test_a_source_that_changed_since_it_was_planned(corpus):
    job = corpus("a.jsonl.zst", zstandard.compress(CONTENT))
    unit = one_unit(job, "extract")
    path = unit.inputs[0].path
    write_file(path, CONTENT + CONTENT)
    with pytest.raises(
        HpcgenError, match=r"changed since it was planned: its size is \d+, not \d+; run hpcgen data plan"
    ):
        EXTRACT.make(unit, job, CONTEXT)
    path.write_bytes(zstandard.compress(CONTENT))
    os.utime(path, ns=(1, 1))
    with pytest.raises(HpcgenError, match=r"its modification time \(ns\) is 1, not"):
        EXTRACT.make(unit, job, CONTEXT)
    assert published(job.directory) == []


def test_two_sources_of_one_name_are_refused(tmp_path):
    for suffix in ("zst", "gz"):
        write_file(tmp_path / f"source/a.jsonl.{suffix}", CONTENT)
    job = planned_corpus(tmp_path / "source", tmp_path / "corpus", ["a.jsonl.gz", "a.jsonl.zst"])
    with pytest.raises(HpcgenError, match=r"file names that would be duplicates after extraction: a\.jsonl"):
        one_unit(job, "extract")
