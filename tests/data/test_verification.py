from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import re
import struct
import subprocess
import sys

import numpy as np
import pytest

from hpcgen.config.tokenizer import TokenizerConfig, gpt2_files
from hpcgen.data.manifest import manifest_path, read_manifest
from hpcgen.data.pair_records import find_records, pairs_without_vocabulary_hash, stale_pairs
from hpcgen.data.record import Counts, FileIdentity, Record, read_record, write_record
from hpcgen.data.stages import DATA_STAGES, configuration, units
from hpcgen.data.unit_checker import done_record
from hpcgen.data.verification import Expected, verify
from tests.data.data_runs import documents, json_lines, make_units, planned_corpus, swapped_merges, write_file
from tests.data.pairs import write, write_sequences
from trainer.contract.files.index_header import bin_path, idx_path

DOCUMENTS = [[1, 2, 9], [], [3, 9], [4, 5, 6, 9]]
"""9 ends each document."""


def record_of(*prefixes, **counts):
    """Leaves the record that a task would have left with these pairs, and returns it."""
    outputs = tuple(
        FileIdentity(
            f"tokens/{path.name}", path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()
        )
        for prefix in prefixes
        for path in (bin_path(prefix), idx_path(prefix))
    )
    held = {"documents_in": 4, "documents_out": 4, "empty": 1, "sequences": 3, "tokens": 9} | counts
    record = Record(stage="prepare", configuration="c", inputs=(), outputs=outputs, counts=Counts(**held))
    write_record(record, prefixes[0])
    published = read_record(prefixes[0])
    assert published is not None
    return published


def findings(prefix, *, megatron=False, **expected):
    """The findings about one pair, without its directory."""
    report = verify({prefix: Expected(**expected)}, workers=2, megatron=megatron)
    return [str(finding).replace(f"{prefix.parent}/", "") for finding in report.pairs[0].findings]


def patch(path, offset, data):
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(content)


def test_a_valid_pair_passes(tmp_path):
    prefix = write(tmp_path / "x", DOCUMENTS)
    record = record_of(prefix)
    known = Expected(record=record, needs_record=True, vocab_size=10, eod_id=9)
    seen = []
    report = verify({prefix: known}, workers=1, megatron=False, on_progress=lambda *bytes: seen.append(bytes))
    [pair] = report.pairs
    assert (report.num_wrong, pair.findings, pair.hashes_checked) == (0, [], True)
    assert (pair.documents, pair.sequences, pair.tokens, pair.largest_id) == (4, 3, 9, 9)
    size = sum(path.stat().st_size for path in (bin_path(prefix), idx_path(prefix)))
    assert seen[-1] == (size, size)
    assert pair.bytes == size


def test_every_flipped_bit_is_found(tmp_path):
    prefix = write(tmp_path / "x", DOCUMENTS)
    record = record_of(prefix)
    for path in (bin_path(prefix), idx_path(prefix)):
        whole = path.read_bytes()
        for bit in range(0, 8 * len(whole), 5):
            patch(path, bit // 8, bytes([whole[bit // 8] ^ 1 << bit % 8]))
            assert findings(prefix, record=record), (path.name, bit)
            path.write_bytes(whole)
    assert not findings(prefix, record=record)


@pytest.mark.parametrize(
    ("suffix", "offset", "data", "finding"),
    [
        (".idx", 34 + 4, struct.pack("<i", 3), "x.idx: sequence 2 (4 tokens) starts at byte 10, but"),
        (".idx", 34, struct.pack("<i", -3), "x.idx: sequence 0 (-3 tokens) starts at byte 0"),
        (".idx", 34 + 12 + 8, struct.pack("<q", 4), "x.idx: sequence 1 (2 tokens) starts at byte 4, but"),
        (".idx", 34 + 36 + 8, struct.pack("<q", 2), "x.idx: document 1 ends at sequence 1, before its start"),
        (
            ".idx",
            34 + 36 + 32,
            struct.pack("<q", 2),
            "x.idx: documents span the sequences 0 to 2, but the index",
        ),
        (".idx", 34 + 36, struct.pack("<q", 1), "x.idx: documents span the sequences 1 to 3"),
    ],
)
def test_problems_in_the_index_are_named(tmp_path, suffix, offset, data, finding):
    prefix = write(tmp_path / "x", DOCUMENTS)
    patch(idx_path(prefix), offset, data)
    assert [found for found in findings(prefix) if found.startswith(finding)], findings(prefix)


def test_an_index_that_is_too_long_is_found(tmp_path):
    prefix = write(tmp_path / "x", DOCUMENTS)
    with idx_path(prefix).open("ab") as file:
        file.write(b"trailing")
    assert findings(prefix) == ["x.idx: the size is 118 bytes, but its header requires 110"]


def test_an_id_outside_the_vocabulary_is_located(tmp_path):
    assert findings(write(tmp_path / "x", DOCUMENTS), vocab_size=6) == [
        "x.bin: id 9 at byte 4, in document 0; valid ids are 0 to 5"
    ]
    prefix = write(tmp_path / "y", DOCUMENTS, vocab_size=70000)
    patch(bin_path(prefix), 4 * 4, struct.pack("<i", -7))
    assert findings(prefix) == ["y.bin: id -7 at byte 16, in document 2 is negative"]


def test_a_sequence_without_its_end_of_document_is_found(tmp_path):
    for end, document in ((2, 0), (4, 2), (8, 3)):
        prefix = write(tmp_path / "x", DOCUMENTS)
        patch(bin_path(prefix), 2 * end, struct.pack("<H", 7))
        found = findings(prefix, record=record_of(prefix), eod_id=9)
        assert found == [
            f"x.bin: id 7 at byte {2 * end}, in document {document}; "
            "the sequence should end with the end-of-document id 9"
        ]


def test_ends_are_found_across_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr("hpcgen.data.verification._CHUNK_BYTES", 8)
    prefix = write(tmp_path / "x", [[1] * length + [9] for length in range(30)])
    record = record_of(prefix, documents_in=30, documents_out=30, sequences=30, tokens=465)
    assert findings(prefix, record=record, eod_id=9) == []
    ends = np.cumsum(np.arange(1, 31)) - 1
    for document in (0, 1, 2, 3, 4, 7, 28, 29):
        whole = bin_path(prefix).read_bytes()
        patch(bin_path(prefix), 2 * int(ends[document]), struct.pack("<H", 8))
        assert f"in document {document};" in findings(prefix, record=record, eod_id=9)[0]
        bin_path(prefix).write_bytes(whole)


def test_pairs_of_one_record_are_counted_together(tmp_path):
    prefixes = [write(tmp_path / "a", DOCUMENTS), write(tmp_path / "b", DOCUMENTS)]
    both = {"documents_in": 8, "documents_out": 8, "sequences": 6}
    right = record_of(*prefixes, **both, tokens=18)
    assert find_records(prefixes) == dict.fromkeys(prefixes, right)
    report = verify({prefix: Expected(record=right) for prefix in prefixes}, workers=2, megatron=False)
    assert report.num_wrong == 0
    wrong = record_of(*prefixes, **both, tokens=17)
    assert findings(prefixes[0], record=wrong) == [f"{tmp_path}: a, b: 18 tokens, but the record has 17"]
    unbalanced = record_of(*prefixes, **both | {"documents_in": 9}, tokens=18)
    assert findings(prefixes[0], record=unbalanced) == ["a: its record does not account for every document"]


def test_the_side_file_of_rejects_is_checked_against_its_record(tmp_path):
    prefix = write(tmp_path / "x", DOCUMENTS)
    rejects = tmp_path / "x.rejects.jsonl"
    rejects.write_text("{}\n")
    record = record_of(prefix)
    named = FileIdentity("tokens/x.rejects.jsonl", 3, hashlib.sha256(b"{}\n").hexdigest())
    record = Record(
        stage=record.stage,
        configuration="c",
        inputs=(),
        outputs=(*record.outputs, named),
        counts=record.counts,
    )
    assert findings(prefix, record=record) == []
    rejects.write_text("{}")
    assert findings(prefix, record=record) == ["x.rejects.jsonl: the size is 2 bytes, but its record has 3"]
    rejects.unlink()
    assert findings(prefix, record=record) == ["x.rejects.jsonl: No such file or directory"]


def test_other_expectations_of_a_pair(tmp_path):
    prefix = write(tmp_path / "x", DOCUMENTS)
    assert findings(prefix, record=record_of(prefix), stale="old") == ["x: old; run the stage again"]
    assert "has no record" in findings(prefix, needs_record=True)[0]
    assert findings(tmp_path / "none") == [
        "cannot read the dataset none: [Errno 2] No such file or directory: 'none.idx'; "
        "a dataset is a .bin and an .idx file"
    ]


def test_records_that_do_not_cover_the_vocabulary_are_proven_by_encoding_again(tmp_path):
    """Earlier versions took GPT-2's vocabulary from a package, and no record had its content."""
    write_file(
        tmp_path / "source/a.jsonl", json_lines([*documents(300), "", "we were <|endoftext|> here \ud7ff"])
    )
    vocab, merges = gpt2_files(TokenizerConfig())
    other = tmp_path / "merges.txt"
    other.write_bytes(swapped_merges(merges.read_bytes()))
    swapped = TokenizerConfig(vocab_file=str(vocab), merges_file=str(other))
    for name, tokenizer in (("good", TokenizerConfig()), ("bad", swapped)):
        made = planned_corpus(
            tmp_path / "source", tmp_path / name, ["a.jsonl"], num_output_files=1, tokenizer=tokenizer
        )
        make_units(made, "prepare")
        job = dataclasses.replace(made, tokenizer=TokenizerConfig())
        prefix = job.directory / "tokens/corpus-00000-of-00001"
        record, earlier = read_record(prefix), DATA_STAGES["prepare"].earlier_configuration(job)
        assert record is not None
        assert earlier is not None
        write_record(dataclasses.replace(record, configuration=earlier), prefix)
        records = find_records([prefix])
        manifest = read_manifest(manifest_path(job.directory))
        assert stale_pairs(job, manifest, records) == {}  # a large corpus is not made again for this
        [unit] = units("prepare", job, manifest)
        assert done_record(unit, job, configuration("prepare", job)) is not None
        assert pairs_without_vocabulary_hash(job, records) == {prefix}
        known = Expected(record=records[prefix], vocab_size=50257, eod_id=50256, encoded_by=job.tokenizer)
        [report] = verify({prefix: known}, workers=2, megatron=False).pairs
        if name == "good":
            assert (report.findings, report.documents_encoded) == ([], 302)
        else:
            [finding] = report.findings
            assert re.search(
                r"document \d+ was not encoded with GPT-2's vocabulary; remove the", str(finding)
            )


@pytest.mark.process
@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")
def test_megatron_core_reads_the_same(tmp_path, monkeypatch, stand_in):
    """One process reads all pairs: two right ones, an empty one, and two that it reads otherwise or not at all."""
    monkeypatch.setattr(sys, "executable", stand_in)
    right, parts, empty, torn, odd = (tmp_path / name for name in ("right", "parts", "empty", "torn", "odd"))
    write_sequences(parts, [[[1, 2], [3, 4, 5]], [], [[70000]]], vocab_size=70001)
    write(right, [[1] * 5 + [9]] * 300)
    write(empty, [[], []])
    write(torn, DOCUMENTS)
    patch(idx_path(torn), 34 + 36 + 32, struct.pack("<q", 2))
    write(odd, DOCUMENTS)
    patch(idx_path(odd), 34, struct.pack("<i", 2))
    report = verify({prefix: Expected() for prefix in (right, parts, empty, torn, odd)}, workers=2)
    assert report.megatron_core
    found = [[text for text in map(str, pair.findings) if "megatron-core" in text] for pair in report.pairs]
    assert report.pairs[0].findings == report.pairs[1].findings == []
    assert "cannot read it" in found[2][0]
    assert "cannot read it: AssertionError" in found[3][0]
    assert "megatron-core reads tokens = 8, hpcgen 9" in found[4][0]
    assert all(pair.megatron_checked for pair in report.pairs)


@pytest.mark.process
def test_without_megatron_core_the_missing_check_is_reported(tmp_path, monkeypatch):
    prefix = write(tmp_path / "x", DOCUMENTS)
    monkeypatch.setattr(sys, "executable", _python_without(tmp_path, "torch"))
    report = verify({prefix: Expected()}, workers=1)
    assert (report.num_wrong, report.megatron_core) == (0, None)
    assert report.not_checked.startswith(
        "megatron-core cannot be imported (cannot import megatron.core: ModuleNotFound"
    )


@pytest.mark.process
def test_a_reader_that_dies_is_a_finding(tmp_path, monkeypatch):
    prefix = write(tmp_path / "x", DOCUMENTS)
    shell = tmp_path / "python"
    shell.write_text("#!/bin/sh\necho out of memory >&2\nexit 137\n")
    shell.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(shell))
    assert findings(prefix, megatron=True) == [
        "x: megatron-core's reader ended with status 137: out of memory"
    ]


def _python_without(folder, module):
    """A Python in which `module` cannot be imported."""
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(f"import sys\nsys.modules[{module!r}] = None\n")
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    assert (
        subprocess.run([script, "-c", f"import {module}"], capture_output=True, check=False).returncode == 1
    )
    return str(script)
