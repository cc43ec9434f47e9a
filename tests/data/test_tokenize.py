from __future__ import annotations

import base64
import dataclasses
import hashlib
import itertools
import json
import random
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import zstandard

from hpcgen.config.corpus import CorpusJob
from hpcgen.config.tokenizer import TokenizerConfig
from hpcgen.data.indexed_dataset import read_counts
from hpcgen.data.jsonl import LONGEST_LINE
from hpcgen.data.record import Record
from hpcgen.data.stages import configuration
from hpcgen.data.stages.base import Context
from hpcgen.data.task import make_unit
from hpcgen.data.tokenize import make_pairs
from hpcgen.data.tokenize_files import tokenize_files
from hpcgen.data.tokenizer import Tokenizer, load_tokenizer
from hpcgen.errors import HpcgenError

from .conftest import HARD_TEXTS
from .data_runs import json_lines, one_unit, planned_corpus, published, write_file

BYTES = load_tokenizer(TokenizerConfig(kind="bytes"))


def pair(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_gpt2_pair_is_what_megatron_writes(
    tmp_path, write_jsonl, library_texts, gpt2_reference, megatron_pair, megatron
):
    texts = [*HARD_TEXTS, *library_texts[:40], ""]
    plain = write_jsonl(texts[:30], "a.jsonl")
    packed = tmp_path / "b.jsonl.zst"
    packed.write_bytes(zstandard.compress(write_jsonl(texts[30:], "b.jsonl").read_bytes()))

    report = tokenize_files([plain, packed], tmp_path / "ours", load_tokenizer(TokenizerConfig()))

    documents = [row.ids for row in gpt2_reference.encode_batch(texts, add_special_tokens=False)]
    assert pair(tmp_path / "ours") == megatron_pair(tmp_path, documents, 50256, 50257)
    filled = [ids for ids in documents if ids]
    assert report.documents == report.documents_read == len(texts)
    assert report.empty_documents == len(texts) - len(filled) >= 2
    assert report.sequences == len(filled)
    assert report.tokens == sum(map(len, filled)) + len(filled)
    assert report.input_bytes == sum((tmp_path / f"{name}.jsonl").stat().st_size for name in "ab")
    assert report.output_bytes == sum(map(len, pair(tmp_path / "ours")))
    assert (report.dtype, report.backend) == ("uint16", "gigatoken")
    assert len(megatron.IndexedDataset(str(tmp_path / "ours"))) == len(filled)
    counts = read_counts(tmp_path / "ours")
    assert (counts.documents, counts.sequences, counts.tokens) == (len(texts), len(filled), report.tokens)


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece", "wordpiece", "unigram"])
def test_other_tokenizers(tmp_path, write_jsonl, library_texts, trained, trained_config, megatron_pair, name):
    texts = [*HARD_TEXTS, *library_texts[:8]]
    tokenizer = load_tokenizer(trained_config(name))
    tokenize_files([write_jsonl(texts)], tmp_path / "ours", tokenizer)
    documents = [trained[name].encode(text, add_special_tokens=False).ids for text in texts]
    eod = trained[name].token_to_id("</s>")
    assert pair(tmp_path / "ours") == megatron_pair(tmp_path, documents, eod, trained[name].get_vocab_size())


def test_bytes(tmp_path, write_jsonl, megatron_pair):
    tokenize_files([write_jsonl(HARD_TEXTS)], tmp_path / "ours", BYTES)
    assert pair(tmp_path / "ours") == megatron_pair(
        tmp_path, [list(text.encode()) for text in HARD_TEXTS], 256, 257
    )


def test_empty_documents_can_be_dropped(tmp_path, write_jsonl, megatron_pair):
    report = tokenize_files(
        [write_jsonl(["", "ab", "", "", "c", ""])], tmp_path / "ours", BYTES, drop_empty=True
    )
    assert pair(tmp_path / "ours") == megatron_pair(tmp_path, [[97, 98], [99]], 256, 257)
    assert (report.documents_read, report.documents, report.empty_documents, report.sequences) == (6, 2, 4, 2)
    assert "documents  6 in = 2 out + 4 skipped + 0 rejected; 4 empty" in str(report)


def test_line_ends(tmp_path, megatron_pair):
    path = tmp_path / "ends.jsonl"
    path.write_bytes(
        '{"text": "a\u2028\u0085b"}\r\n{"text": "c\\r\\n"}\n{"text": "no newline after this"}'.encode()
    )
    assert tokenize_files([path], tmp_path / "ours", BYTES).documents == 3
    texts = ["a\u2028\u0085b", "c\r\n", "no newline after this"]
    assert pair(tmp_path / "ours") == megatron_pair(
        tmp_path, [list(text.encode()) for text in texts], 256, 257
    )


def test_end_of_document_tokens_in_the_text_are_counted(tmp_path, write_jsonl):
    path = write_jsonl(["a<|endoftext|>b<|endoftext|>", "c"])
    report = tokenize_files([path], tmp_path / "ours", load_tokenizer(TokenizerConfig()))
    assert (report.eod_in_text, report.tokens) == (2, 7)
    assert "the text spells out 2 end-of-document tokens" in str(report)


def test_output_does_not_depend_on_the_workers(tmp_path):
    rng = random.Random(0)
    path = tmp_path / "many.jsonl"
    with path.open("w") as file:
        for _ in range(5_000):  # 10 MB, several blocks
            file.write(json.dumps({"text": "x" * rng.randrange(4000)}) + "\n")
    seen: list[tuple[int, int]] = []
    reports = [
        tokenize_files(
            [path, path],
            tmp_path / "x",
            BYTES,
            workers=workers,
            overwrite=True,
            on_progress=lambda progress: seen.append((progress.bytes_done, progress.bytes)),
        )
        for workers in (1, 2, 7)
    ]
    first = pair(tmp_path / "x")
    tokenize_files([path, path], tmp_path / "y", BYTES)
    assert pair(tmp_path / "y") == first
    assert reports[0] == reports[1] == reports[2]
    for run in range(3):
        told = seen[run * len(seen) // 3 : (run + 1) * len(seen) // 3]
        assert told == sorted(told)
        assert told[-1] == (2 * path.stat().st_size,) * 2


def test_a_pair_is_replaced_only_when_asked(tmp_path, write_jsonl):
    tokenize_files([write_jsonl(["old"])], tmp_path / "x", BYTES)
    old, path = pair(tmp_path / "x"), write_jsonl(["new one"])
    with pytest.raises(
        HpcgenError, match=r"x\.idx already exists; choose another prefix, or pass --overwrite"
    ):
        tokenize_files([path], tmp_path / "x", BYTES)
    assert pair(tmp_path / "x") == old
    tokenize_files([path], tmp_path / "x", BYTES, overwrite=True)
    assert pair(tmp_path / "x") != old


def test_data_without_its_index_was_never_published(tmp_path, write_jsonl):
    (tmp_path / "x.bin").write_bytes(b"from a run that was killed between two renames")
    report = tokenize_files([write_jsonl(["a"])], tmp_path / "x", BYTES)
    assert read_counts(tmp_path / "x").tokens == report.tokens == 2


def test_a_dotted_prefix_in_a_new_folder(tmp_path, write_jsonl):
    tokenize_files([write_jsonl(["a"])], tmp_path / "new" / "robin.bin.v2", BYTES)
    assert names(tmp_path / "new") == ["robin.bin.v2.bin", "robin.bin.v2.idx", "robin.bin.v2.record.json"]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("bad.jsonl", b'{"text": "a"}\n{"text": 5}\n', r"bad\.jsonl:2: 'text' must be a string, got 5"),
        ("bad.jsonl", b'{"text": "a"}\n\n', r"bad\.jsonl:2: the line is empty"),
        ("bad.jsonl", b'{"text": ""}\n', r"none of its documents has a token \(2 lines for 1 output"),
        (
            "bad.jsonl.zst",
            zstandard.compress(b'{"text": "a"}\n' * 9)[:-1],
            r"bad\.jsonl\.zst: the \.zst data is truncated",
        ),
        ("bad.txt", b"a", r"bad\.txt: the name must end in \.jsonl, \.jsonl\.zst, \.jsonl\.gz or \.parquet"),
    ],
)
def test_nothing_is_published_after_a_mistake(tmp_path, write_jsonl, name, data, message):
    good = write_jsonl(["" if "none" in message else "good"])
    (tmp_path / name).write_bytes(data)
    with pytest.raises(HpcgenError, match=message):
        tokenize_files([good, tmp_path / name], tmp_path / "out" / "x", BYTES)
    assert not (tmp_path / "out").exists() or names(tmp_path / "out") == []


def test_a_missing_input_is_noticed_first(tmp_path, write_jsonl):
    with pytest.raises(HpcgenError, match=r"cannot read .*none\.jsonl: No such file"):
        tokenize_files([write_jsonl(["a"]), tmp_path / "none.jsonl"], tmp_path / "x", BYTES)


PROGRAM = textwrap.dedent(
    """
    import resource, sys
    from pathlib import Path
    from hpcgen.config.tokenizer import TokenizerConfig
    from hpcgen.data.tokenize_files import tokenize_files
    from hpcgen.data.tokenizer import load_tokenizer
    from hpcgen.errors import HpcgenError

    if len(sys.argv) > 3:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
    tokenizer = load_tokenizer(TokenizerConfig(kind="bytes"))
    try:
        tokenize_files([Path(sys.argv[1])], Path(sys.argv[2]), tokenizer, overwrite=True)
    except HpcgenError as error:
        sys.exit(f"HpcgenError: {error}")
    """
)


def start(corpus: Path, prefix: Path, *limit: int) -> subprocess.Popen[str]:
    """A process that tokenizes, with a limit on the size of its files."""
    command = [sys.executable, "-c", PROGRAM, corpus, prefix, *map(str, limit)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


@pytest.mark.process
def test_two_concurrent_runs_write_the_same_bytes(tmp_path, write_jsonl):
    corpus, prefix = write_jsonl(["x" * 1_000_000] * 20), tmp_path / "out" / "x"
    runs = [start(corpus, prefix) for _ in range(3)]
    assert [run.communicate()[1] for run in runs] == [""] * 3
    assert {run.returncode for run in runs} == {0}
    tokenize_files([corpus], tmp_path / "expected", BYTES)
    assert pair(prefix) == pair(tmp_path / "expected")
    assert names(prefix.parent) == ["x.bin", "x.idx", "x.record.json"]


@pytest.mark.process
def test_a_full_disk_publishes_nothing(tmp_path, write_jsonl):
    run = start(write_jsonl(["x" * 1_000_000] * 5), tmp_path / "out" / "x", 1_000_000)
    assert "HpcgenError: cannot write" in run.communicate()[1]
    assert names(tmp_path / "out") == []


def prepare(job: CorpusJob) -> Record:
    """Makes the first unit of the stage prepare."""
    settings = configuration("prepare", job)
    unit = one_unit(job, "prepare")
    return make_unit(unit, lambda step: None, lambda: 1, job=job, settings_hash=settings)


def job_of(tmp_path: Path, contents: dict[str, bytes], **settings) -> CorpusJob:
    """The job of a corpus of these files."""
    for name, content in contents.items():
        write_file(tmp_path / "source" / name, content)
    return planned_corpus(
        tmp_path / "source", tmp_path / "corpus", list(contents), **{"num_output_files": 1, **settings}
    )


def bytes_pair(megatron_pair, tmp_path: Path, texts: list[str]) -> tuple[bytes, bytes]:
    return megatron_pair(tmp_path, [list(text.encode()) for text in texts], 256, 257)


def test_a_unit_that_gets_more_cores_makes_the_same_pair(tmp_path, library_texts, monkeypatch):
    monkeypatch.setattr("hpcgen.data.jsonl._BLOCK_BYTES", 1 << 16)
    job = job_of(tmp_path, {"a.jsonl": json_lines([*library_texts, "", *library_texts])})
    prepare(job)
    prefix = tmp_path / "corpus/tokens/corpus-00000-of-00001"
    expected = pair(prefix)
    cores = itertools.chain([1] * 5, [2] * 5, itertools.repeat(4))
    threads = set()
    tokenizer = load_tokenizer(job.tokenizer)

    def encode(texts):
        threads.add(threading.get_ident())
        return tokenizer.encode(texts)

    unit = one_unit(job, "prepare")
    context = Context(configuration=configuration("prepare", job), num_cores=lambda: next(cores))
    make_pairs(unit, job.corpus, dataclasses.replace(tokenizer, encode=encode), context)
    assert pair(prefix) == expected
    assert 2 <= len(threads) <= 7  # this thread, and those of the pool


def test_one_input_feeds_k_outputs_line_by_line(tmp_path, megatron_pair):
    rng = random.Random(6)
    texts = ["x" * rng.choice([0, 1, 500, 20_000]) for _ in range(1_000)]  # several blocks
    job = job_of(tmp_path, {"a.jsonl.gz": json_lines(texts, last_newline=False)}, num_output_files=7)
    record = prepare(job)
    for index in range(7):
        prefix = tmp_path / f"corpus/tokens/corpus-{index:05d}-of-00007"
        assert pair(prefix) == bytes_pair(megatron_pair, tmp_path, texts[index::7])
    assert (record.counts.documents_in, record.counts.documents_out) == (1_000, 1_000)
    assert [file.name for file in record.outputs] == [
        f"tokens/corpus-{index:05d}-of-00007.{suffix}" for index in range(7) for suffix in ("bin", "idx")
    ]


def test_many_inputs_of_every_kind_feed_one_output(tmp_path, megatron_pair):
    texts = [f"{number} \u2028 é😀" for number in range(90)]
    files = {
        "a.jsonl": json_lines(texts[:30], last_newline=False),
        "b.jsonl.zst": json_lines(texts[30:60], last_newline=False),
        "c.jsonl.gz": json_lines(texts[60:]),
    }
    record = prepare(job_of(tmp_path, files))
    prefix = tmp_path / "corpus/tokens/corpus-00000-of-00001"
    assert pair(prefix) == bytes_pair(megatron_pair, tmp_path, texts)
    for read, name in zip(record.inputs, files, strict=True):
        path = tmp_path / "source" / name
        assert (read.name, read.sha256) == (name, hashlib.sha256(path.read_bytes()).hexdigest())
    for made in record.outputs:
        content = (tmp_path / "corpus" / made.name).read_bytes()
        assert (made.size, made.sha256) == (len(content), hashlib.sha256(content).hexdigest())


BAD = [b"not json", b'{"text": 5}', b'{"text": "\\ud800"}', b'{"text": "\xff"}', b"", b"<html>"]


@pytest.mark.parametrize("num_outputs", [1, 3])
@pytest.mark.parametrize("drop_empty", [False, True])
def test_bad_lines_go_to_a_side_file(tmp_path, megatron_pair, num_outputs, drop_empty):
    rng = random.Random(7)
    good = [json.dumps({"text": text}).encode() for text in ("", "a", "bc")]
    lines = [rng.choice([*BAD, *good]) for _ in range(600)]
    job = job_of(
        tmp_path,
        {"a.jsonl.zst": b"\n".join(lines) + b"\n"},
        num_output_files=num_outputs,
        bad_documents="skip",
        max_bad_fraction=1,
        drop_empty=drop_empty,
    )
    counts = prepare(job).counts
    for index in range(num_outputs):
        mine = lines[index::num_outputs]
        texts = [json.loads(line)["text"] for line in mine if line in good]
        prefix = tmp_path / f"corpus/tokens/corpus-{index:05d}-of-{num_outputs:05d}"
        wanted = [text for text in texts if text or not drop_empty]
        assert pair(prefix) == bytes_pair(megatron_pair, tmp_path, wanted)
        rejects = [json.loads(line) for line in Path(f"{prefix}.rejects.jsonl").read_text().splitlines()]
        numbers = [number for number, line in enumerate(lines) if line in BAD]
        assert [reject["line"] - 1 for reject in rejects] == [n for n in numbers if n % num_outputs == index]
        for reject in rejects:
            content = base64.b64decode(reject.get("content_base64", "")) or reject["content"].encode()
            assert content == lines[reject["line"] - 1]
            assert reject["file"].endswith("a.jsonl.zst")
            assert reject["reason"]
    num_bad = sum(line in BAD for line in lines)
    num_empty = lines.count(good[0])
    assert (counts.documents_in, counts.rejected, counts.empty) == (600, num_bad, num_empty)
    assert counts.skipped == (num_empty if drop_empty else 0)
    assert counts.sequences == 600 - num_bad - num_empty


def test_long_documents_are_not_verified(tmp_path):
    """The library tokenizers would need 190 bytes for each byte of the text."""
    texts = ["long " * 300_000, "short"]
    write_file(tmp_path / "a.jsonl", json_lines(texts))
    tokenizer = load_tokenizer(TokenizerConfig())
    verified = []

    def reference(texts):
        verified.extend(texts)
        return tokenizer.encode(texts)

    report = tokenize_files(
        [tmp_path / "a.jsonl"],
        tmp_path / "out",
        dataclasses.replace(tokenizer, reference=reference),
        verify_fraction=1,
    )
    assert (report.documents, report.verified_documents, verified) == (2, 1, ["short"])


def test_a_line_that_is_too_long_is_a_bad_document_like_others(tmp_path, megatron_pair):
    too_long = b'{"text": "' + b"x" * LONGEST_LINE + b'"}'
    lines = [b'{"text": "a"}', too_long, b'{"text": "b"}', b'{"text": "c"}', too_long]
    files = {"a.jsonl.zst": b"\n".join(lines)}
    with pytest.raises(
        HpcgenError, match=r"a\.jsonl\.zst:2: the line has 25,165,836 bytes, more than the maximum"
    ):
        prepare(job_of(tmp_path, files))
    settings = {"bad_documents": "skip", "max_bad_fraction": 0.4, "num_output_files": 2}
    counts = prepare(job_of(tmp_path, files, **settings)).counts
    assert (counts.documents_in, counts.documents_out, counts.rejected) == (5, 3, 2)
    assert counts.text_bytes == len(files["a.jsonl.zst"]) + 1
    wanted = {0: (["a", "b"], [5]), 1: (["c"], [2])}
    for index, (texts, rejected) in wanted.items():
        prefix = tmp_path / f"corpus/tokens/corpus-{index:05d}-of-00002"
        assert pair(prefix) == bytes_pair(megatron_pair, tmp_path, texts)
        rejects = [json.loads(line) for line in Path(f"{prefix}.rejects.jsonl").read_text().splitlines()]
        assert [reject["line"] for reject in rejects] == rejected
        assert rejects[0]["reason"].startswith("the line has 25,165,836 bytes")
        assert rejects[0]["begin"] == too_long[:200].decode()
        assert "content" not in rejects[0]


def test_rejects_of_an_older_run_are_removed(tmp_path):
    settings = {"bad_documents": "skip", "max_bad_fraction": 0.5}
    prepare(job_of(tmp_path, {"a.jsonl": b'{"text": "a"}\n{"text": "b"}\n5\n'}, **settings))
    rejects = "tokens/corpus-00000-of-00001.rejects.jsonl"
    assert rejects in published(tmp_path / "corpus")
    prepare(job_of(tmp_path, {"a.jsonl": b'{"text": "a"}\n{"text": "b"}\n'}, **settings))
    assert rejects not in published(tmp_path / "corpus")


@pytest.mark.parametrize("num_bad", [1, 2])
def test_too_many_bad_documents_end_the_unit(tmp_path, num_bad):
    content = b"bad\n" * num_bad + b'{"text": "a"}\n' * (100 - num_bad)
    job = job_of(tmp_path, {"a.jsonl": content}, bad_documents="skip", max_bad_fraction=0.01)
    if num_bad == 1:
        assert prepare(job).counts.rejected == 1
        return
    message = (
        r"2 of 100 documents are bad, which exceeds max_bad_fraction = 0\.01; the first is .*a\.jsonl:1: not"
    )
    with pytest.raises(HpcgenError, match=message):
        prepare(job)
    assert published(tmp_path / "corpus") == []


def test_bad_documents_at_the_beginning_of_a_valid_file_do_not_end_the_unit(tmp_path):
    """More than half of the first block is bad, and less than a tenth of the file."""
    long_text = b'{"text": "' + b"x" * 8_000 + b'"}\n'
    content = b"bad\n" * 600 + long_text * 550 + b'{"text": "a"}\n' * 6_000
    job = job_of(tmp_path, {"a.jsonl": content}, bad_documents="skip", max_bad_fraction=0.1)
    assert prepare(job).counts.rejected == 600


def test_hopelessly_many_bad_documents_are_noticed_long_before_the_end(tmp_path):
    content = b"bad\n" * 12_000 + b'{"text": "good"}\n' * 1_000_000
    job = job_of(tmp_path, {"a.jsonl": content}, bad_documents="skip")
    with pytest.raises(HpcgenError, match=r"^12,000 of (?!1,012)[\d,]+ documents are bad"):
        prepare(job)


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        (
            b'{"text": "a"}\n5\n',
            {},
            r"a\.jsonl:2: expected a JSON object, got 5; correct it, or set bad_documents",
        ),
        (b'{"text": "a"}\n', {"num_output_files": 2}, "00001-of-00002: none of its documents has a token"),
        (b"", {}, "the file is empty"),
        (b"<html>\n<body>", {}, "a.jsonl: the content is a web page"),
    ],
)
def test_a_faulty_input_publishes_nothing(tmp_path, content, settings, message):
    with pytest.raises(HpcgenError, match=message):
        prepare(job_of(tmp_path, {"a.jsonl": content}, **settings))
    assert published(tmp_path / "corpus") == []


def test_each_of_two_hundred_flipped_bits_is_noticed_by_the_hash(tmp_path):
    """Bits that change no byte of the content as well, since the manifest knows the file's hash."""
    job = job_of(tmp_path, {"a.jsonl.zst": json_lines([f"{number}" * 9 for number in range(300)])})
    unit, path = one_unit(job, "prepare"), tmp_path / "source/a.jsonl.zst"
    whole = path.read_bytes()
    item = dataclasses.replace(unit.inputs[0], sha256=hashlib.sha256(whole).hexdigest())
    unit = dataclasses.replace(unit, inputs=(item,))
    context = Context(configuration="")
    for bit in random.Random(8).sample(range(8 * len(whole)), 200):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(HpcgenError, match=r"a\.jsonl\.zst"):
            make_pairs(unit, job.corpus, BYTES, context)
    assert published(tmp_path / "corpus") == []
    path.write_bytes(whole)
    make_pairs(unit, job.corpus, BYTES, context)


def shifted(tokenizer: Tokenizer) -> Tokenizer:
    """A tokenizer whose quick library errs in the last id of a text that holds an é."""

    def encode(texts):
        tokens, lengths = tokenizer.encode(texts)
        tokens = tokens.copy()
        for text, end in zip(texts, lengths.cumsum(), strict=True):
            if "é" in text:
                tokens[end - 1] += 1
        return tokens, lengths

    return dataclasses.replace(tokenizer, encode=encode)


def test_ids_are_compared_with_those_of_tokenizers(tmp_path, write_jsonl):
    tokenizer = load_tokenizer(TokenizerConfig())
    texts = ["Hello"] * 100 + ["caf", "café"] + [""] * 100
    path = write_jsonl(texts)
    report = tokenize_files([path, path], tmp_path / "x", tokenizer, verify_fraction=1)
    assert report.verified_documents == report.documents_read == 404
    assert "verified   404 documents" in str(report)
    with pytest.raises(
        HpcgenError,
        match=r"corpus\.jsonl:102: gigatoken and the library tokenizers return different ids: at token 2 of 3: \d+",
    ):
        tokenize_files([path], tmp_path / "y", shifted(tokenizer), verify_fraction=1)
    assert not (tmp_path / "y.bin").exists()
    # a part, always the same, evenly spread; the first document is always in it
    for fraction, expected in ((0.25, 50), (1e-9, 1), (0, 0)):
        counts = [
            tokenize_files(
                [path],
                tmp_path / "x",
                tokenizer,
                verify_fraction=fraction,
                overwrite=True,
                workers=workers,
            ).verified_documents
            for workers in (1, 2)
        ]
        assert counts[0] == counts[1]
        assert abs(counts[0] - expected) <= 2


def test_nothing_is_compared_where_tokenizers_itself_encodes(tmp_path, write_jsonl):
    tokenizer = load_tokenizer(TokenizerConfig(), "tokenizers")
    report = tokenize_files([write_jsonl(["a"])], tmp_path / "x", tokenizer, verify_fraction=1)
    assert report.verified_documents == 0
