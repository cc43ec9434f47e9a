from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import zstandard

from hpcgen.config.tokenizer import TokenizerConfig
from hpcgen.data.indexed_dataset import read_counts
from hpcgen.data.tokenize import tokenize_files
from hpcgen.data.tokenizer import load_tokenizer
from hpcgen.errors import HpcgenError

from .conftest import HARD_TEXTS

BYTES = load_tokenizer(TokenizerConfig(kind="bytes"))


def pair(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_gpt2_pair_is_what_megatron_writes(
    tmp_path, write_jsonl, library_texts, gpt2_reference, megatron_pair, megatron
):
    texts = [*HARD_TEXTS, *library_texts, ""]
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
    texts = [*HARD_TEXTS, *library_texts[:30]]
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
    assert "documents  6 read, 2 written, 4 empty and left out" in str(report)


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
    assert "2 end-of-document tokens are spelled out in the text" in str(report)


def test_output_does_not_depend_on_the_workers(tmp_path):
    rng = random.Random(0)
    path = tmp_path / "many.jsonl"
    with path.open("w") as file:
        for _ in range(12_000):  # 24 MB, several blocks
            file.write(json.dumps({"text": "x" * rng.randrange(4000)}) + "\n")
    seen: list[tuple[int, int]] = []
    reports = [
        tokenize_files(
            [path, path],
            tmp_path / "x",
            BYTES,
            workers=workers,
            overwrite=True,
            progress=lambda *at: seen.append(at),
        )
        for workers in (1, 2, 7)
    ]
    first = pair(tmp_path / "x")
    tokenize_files([path, path], tmp_path / "y", BYTES)
    assert pair(tmp_path / "y") == first
    assert reports[0] == reports[1] == reports[2]
    assert seen == sorted(seen[: len(seen) // 3]) * 3
    assert seen[-1] == (2 * path.stat().st_size,) * 2


def test_a_pair_is_replaced_only_when_asked(tmp_path, write_jsonl):
    tokenize_files([write_jsonl(["old"])], tmp_path / "x", BYTES)
    old, path = pair(tmp_path / "x"), write_jsonl(["new one"])
    with pytest.raises(HpcgenError, match=r"x\.idx exists; choose another prefix, or pass --overwrite"):
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
    assert names(tmp_path / "new") == ["robin.bin.v2.bin", "robin.bin.v2.idx"]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("bad.jsonl", b'{"text": "a"}\n{"text": 5}\n', r"bad\.jsonl:2: 'text' must be a string, got 5"),
        ("bad.jsonl", b'{"text": "a"}\n\n', r"bad\.jsonl:2: the line is empty"),
        ("bad.jsonl", b'{"text": ""}\n', "none of the 2 documents holds a token"),
        (
            "bad.jsonl.zst",
            zstandard.compress(b'{"text": "a"}\n' * 9)[:-1],
            r"bad\.jsonl\.zst: the zstd data is cut off",
        ),
        ("bad.txt", b"a", r"bad\.txt: the name must end in \.jsonl or \.jsonl\.zst"),
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
    import os, resource, signal, sys
    from pathlib import Path
    from hpcgen.config.tokenizer import TokenizerConfig
    from hpcgen.data.tokenize import tokenize_files
    from hpcgen.data.tokenizer import load_tokenizer
    from hpcgen.errors import HpcgenError

    steps_left = int(sys.argv[3])

    def dies_at_its_turn(function):
        def step(*args, **kwargs):
            global steps_left
            steps_left -= 1
            if steps_left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)
        return step

    for name in ("fsync", "replace", "rename", "unlink", "open"):
        setattr(os, name, dies_at_its_turn(getattr(os, name)))
    if len(sys.argv) > 4:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[4]),) * 2)
    tokenizer = load_tokenizer(TokenizerConfig(kind="bytes"))
    progress = dies_at_its_turn(lambda *done: None)
    try:
        tokenize_files([Path(sys.argv[1])], Path(sys.argv[2]), tokenizer, overwrite=True, progress=progress)
    except HpcgenError as error:
        sys.exit(f"HpcgenError: {error}")
    """
)


def start(corpus: Path, prefix: Path, *arguments: int) -> subprocess.Popen[str]:
    """A process: killed at the n-th of its steps (0: never), with a limit on the size of its files."""
    command = [sys.executable, "-c", PROGRAM, corpus, prefix, *map(str, arguments)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_a_kill_at_any_step_leaves_no_torn_pair(tmp_path, write_jsonl):
    prefix = tmp_path / "out" / "x"
    tokenize_files([write_jsonl(["the old pair"])], prefix, BYTES)
    old = pair(prefix)
    corpus = write_jsonl(["the new pair", "x" * 5_000_000, "end"])
    tokenize_files([corpus], tmp_path / "expected", BYTES)
    new = pair(tmp_path / "expected")

    seen = set()
    for step in range(1, 100):
        run = start(corpus, prefix, step)
        errors = run.communicate()[1]
        if run.returncode == 0:
            break
        assert run.returncode == -signal.SIGKILL, errors
        state = "none"
        if Path(f"{prefix}.idx").exists():
            state = "old" if pair(prefix) == old else "new"
            assert pair(prefix) in (old, new)
        seen.add(state)
    assert seen == {"old", "none", "new"}
    assert pair(prefix) == new
    assert names(prefix.parent) == ["x.bin", "x.idx"]  # the last run swept what the others left


def test_two_runs_at_once_give_the_same_bytes(tmp_path, write_jsonl):
    corpus, prefix = write_jsonl(["x" * 1_000_000] * 20), tmp_path / "out" / "x"
    runs = [start(corpus, prefix, 0) for _ in range(3)]
    assert [run.communicate()[1] for run in runs] == [""] * 3
    assert {run.returncode for run in runs} == {0}
    tokenize_files([corpus], tmp_path / "expected", BYTES)
    assert pair(prefix) == pair(tmp_path / "expected")
    assert names(prefix.parent) == ["x.bin", "x.idx"]


def test_a_full_disk_publishes_nothing(tmp_path, write_jsonl):
    run = start(write_jsonl(["x" * 1_000_000] * 5), tmp_path / "out" / "x", 0, 1_000_000)
    assert "HpcgenError: cannot write" in run.communicate()[1]
    assert names(tmp_path / "out") == []
