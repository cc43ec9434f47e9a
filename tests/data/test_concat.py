"""Concatenation: line n of a file goes where it must, and lines of two files never join."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcgen.data.record import Counts, read_record, record_path, write_record
from hpcgen.data.stages import concat as module
from hpcgen.data.stages.base import Context
from hpcgen.data.stages.concat import CONCAT
from hpcgen.errors import HpcgenError

from .data_runs import documents, json_lines, one_unit, planned_corpus, published, run_stages, write_file

CONTEXT = Context(configuration="settings")


def joined(tmp_path, contents, num_output_files):
    """The outputs of concat over plain files with these contents."""
    names = [f"{index:03d}.jsonl" for index in range(len(contents))]
    for name, content in zip(names, contents, strict=True):
        write_file(tmp_path / "source" / name, content)
    job = planned_corpus(tmp_path / "source", tmp_path / "corpus", names, num_output_files=num_output_files)
    index = 0
    while index < num_output_files:
        unit = one_unit(job, "concat", index if len(contents) >= num_output_files else 0)
        CONCAT.make(unit, job, CONTEXT)
        index += len(unit.outputs)
    return [
        (job.directory / f"concat/corpus-{index:05d}-of-{num_output_files:05d}.jsonl").read_bytes()
        for index in range(num_output_files)
    ]


def test_many_to_one_with_and_without_last_newlines(tmp_path):
    assert joined(tmp_path, [b"a\nb", b"c\n", b"d", b"\n", b"e\n\n"], 1) == [b"a\nb\nc\nd\n\ne\n\n"]


def test_one_to_many(tmp_path):
    assert joined(tmp_path, [b"0\n1\n2\n3\n4\n5\n6"], 3) == [b"0\n3\n6\n", b"1\n4\n", b"2\n5\n"]


@settings(max_examples=30)
@given(
    lines=st.lists(
        st.binary(max_size=20).map(lambda line: line.replace(b"\n", b"")), min_size=5, max_size=60
    ),
    num_outputs=st.integers(1, 5),
    block=st.integers(1, 50),
    last_newline=st.booleans(),
)
def test_lines_go_round_wherever_blocks_end(tmp_path_factory, lines, num_outputs, block, last_newline):
    lines[-1] += b"."  # else the last "\n" is the end of the line before
    content = b"\n".join(lines) + (b"\n" if last_newline else b"")
    before, module._BLOCK_BYTES = module._BLOCK_BYTES, block
    try:
        found = joined(tmp_path_factory.mktemp("lines"), [content], num_outputs)
    finally:
        module._BLOCK_BYTES = before
    assert found == [b"".join(line + b"\n" for line in lines[k::num_outputs]) for k in range(num_outputs)]


def test_record_of_one_to_many(tmp_path):
    write_file(tmp_path / "source/a.jsonl", json_lines(documents(20)))
    job = planned_corpus(tmp_path / "source", tmp_path / "corpus", ["a.jsonl"], num_output_files=3)
    record = CONCAT.make(one_unit(job, "concat"), job, CONTEXT)
    assert read_record(job.directory / "concat/corpus-00000-of-00003.jsonl") == record
    assert [output.name for output in record.outputs] == [
        f"concat/corpus-{index:05d}-of-00003.jsonl" for index in range(3)
    ]
    assert record.counts.documents_in == record.counts.documents_out == 20
    assert len([name for name in published(job.directory) if name.endswith("record.json")]) == 1


@pytest.mark.parametrize(
    ("contents", "num_outputs", "message"),
    [
        ([b"a\n", b""], 1, "the file is empty"),
        ([b"a\nb\n"], 3, "2 lines cannot fill 3 files; set num_output_files to at most 2"),
    ],
    ids=["empty-input", "empty-output"],
)
def test_nothing_is_published_after_an_error(tmp_path, contents, num_outputs, message):
    with pytest.raises(HpcgenError, match=message):
        joined(tmp_path, contents, num_outputs)
    assert published(tmp_path / "corpus") == []


@pytest.mark.process
def test_lines_are_those_that_extract_counted(tmp_path):
    """Counted on both sides of the file: a line that is lost in between would be noticed."""
    write_file(tmp_path / "source/a.jsonl.zst", json_lines(documents(20), last_newline=False))
    write_file(tmp_path / "source/b.jsonl", json_lines(documents(5)))
    names = ["a.jsonl.zst", "b.jsonl"]
    job = planned_corpus(tmp_path / "source", tmp_path / "corpus", names, num_output_files=1)
    run_stages(job, "extract")
    unit = one_unit(job, "concat")
    counts = CONCAT.make(unit, job, CONTEXT).counts
    assert (counts.documents_in, counts.documents_out) == (25, 25)
    output = job.directory / "extract/a.jsonl"
    record = read_record(output)
    assert record is not None
    write_record(dataclasses.replace(record, counts=Counts(documents_in=21, documents_out=21)), output)
    record_path(job.directory / unit.name).unlink()
    with pytest.raises(AssertionError, match="documents are not accounted for"):
        CONCAT.make(unit, job, CONTEXT)
    assert not record_path(job.directory / unit.name).exists()


@pytest.mark.process
def test_an_extracted_file_that_was_changed_is_noticed(tmp_path):
    write_file(tmp_path / "source/a.jsonl.zst", json_lines(documents(20)))
    job = planned_corpus(tmp_path / "source", tmp_path / "corpus", ["a.jsonl.zst"], num_output_files=1)
    unit = one_unit(job, "concat")
    with pytest.raises(
        HpcgenError, match=r"does not exist yet or is incomplete; run the stage extract first"
    ):
        CONCAT.make(unit, job, CONTEXT)
    run_stages(job, "extract")
    extracted = job.directory / "extract/a.jsonl"
    content = bytearray(extracted.read_bytes())
    content[100] ^= 1
    extracted.write_bytes(content)
    with pytest.raises(
        HpcgenError,
        match=r"changed since it was made: its SHA-256 is \w+, not \w+; remove it and run the stage extract again",
    ):
        CONCAT.make(unit, job, CONTEXT)
    assert not (job.directory / "concat").exists() or list((job.directory / "concat").iterdir()) == []
