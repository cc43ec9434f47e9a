"""Text that a tokenizer has no token for is counted: its unknown tokens, and the characters that it leaves out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from hpcgen.config.tokenizer import TokenizerConfig
from hpcgen.data.manifest import manifest_path, read_manifest
from hpcgen.data.record import read_record
from hpcgen.data.status import corpus_status
from hpcgen.data.tokenizer import load_tokenizer
from hpcgen.data.unknown import lost_characters, unknown_id
from hpcgen.errors import HpcgenError
from tests.data.data_runs import json_lines, make_units, planned_corpus, run_stages, write_file

LETTERS = {letter: index for index, letter in enumerate("abcdefé")}
BYTES = {f"<0x{byte:02X}>": 100 + byte for byte in range(256)}
ALPHABET = {letter: 100 + index for index, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}


def bpe(vocabulary: dict[str, int], **options: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={**vocabulary, "ab": 50}, merges=[("a", "b")], **options))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def saved(tokenizer: Tokenizer, path: Path) -> TokenizerConfig:
    tokenizer.save(str(path))
    return TokenizerConfig(kind="huggingface", tokenizer_file=str(path), eod_token="</s>")


def of(tokenizer: Tokenizer) -> Callable[[list[str]], int] | None:
    source = tokenizer.to_str()
    return lost_characters(json.loads(source), source)


@given(st.text("abcdeéxyz \n你<>/s", max_size=30), st.booleans(), st.booleans())
@settings(max_examples=200, deadline=None)
def test_lost_characters_are_those_of_words_without_a_token(text, is_split, is_composed):
    tokenizer = bpe(LETTERS)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace() if is_split else None
    if is_composed:
        tokenizer.normalizer = normalizers.NFC()
        text += "e\u0301o\u0301"
    count = of(tokenizer)
    assert count is not None
    kept = sum(
        len(token) for token in tokenizer.encode(text, add_special_tokens=False).tokens if token != "</s>"
    )
    normalized = normalizers.NFC().normalize_str(text) if is_composed else text
    without = normalized.replace("</s>", "")
    words = "".join(without.split()) if is_split else without
    assert count([text]) == len(words) - kept
    assert count([text, "", text]) == 2 * count([text])


@pytest.mark.parametrize(
    ("tokenizer", "unknown"),
    [
        (bpe({**LETTERS, "<unk>": 60}, unk_token="<unk>"), 60),
        (bpe({**LETTERS, **BYTES}, byte_fallback=True), None),
        (Tokenizer(models.WordLevel({"a": 0, "?": 7}, unk_token="?")), 7),
        (Tokenizer(models.WordPiece({"a": 0, "?": 7}, unk_token="?")), 7),
        (Tokenizer(models.Unigram([("a", -1.0), ("?", -9.0)], unk_id=1)), 1),
        (Tokenizer(models.Unigram([("a", -1.0)])), None),
    ],
    ids=["bpe", "byte fallback", "WordLevel", "WordPiece", "Unigram", "Unigram without"],
)
def test_other_tokenizers_lose_no_character(tokenizer, unknown):
    assert of(tokenizer) is None
    assert unknown_id(json.loads(tokenizer.to_str())) == unknown


def test_byte_level_tokenizers_lose_bytes_only_if_some_have_no_token():
    complete, partial = bpe(ALPHABET), bpe({**LETTERS, "Ġ": 40})
    for tokenizer in (complete, partial):
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert of(complete) is None
    count = of(partial)
    assert count is not None
    assert count(["ab ab", "aé x"]) == 3


def test_both_are_counted_in_records_reports_and_status_and_add_up(tmp_path):
    texts = ["abc xyz", "a", "é你", "xx <unk>", "abc"] * 3
    names = ["a.jsonl", "b.jsonl", "c.jsonl"]
    for number, name in enumerate(names):
        write_file(tmp_path / "source" / name, json_lines(texts[5 * number : 5 * number + 5]))
    found = {}
    for kind, options in (("lost", {}), ("unknown", {"unk_token": "<unk>"})):
        vocabulary = {**LETTERS, "<unk>": 60} if options else LETTERS
        config = saved(bpe(vocabulary, **options), tmp_path / f"{kind}.json")
        job = planned_corpus(
            tmp_path / "source", tmp_path / kind, names, tokenizer=config, num_output_files=3
        )
        make_units(job, "prepare")
        records = [
            read_record(path.with_suffix("")) for path in sorted((tmp_path / kind).glob("tokens/*.idx"))
        ]
        counts = [(record.counts.unknown, record.counts.lost) for record in records if record]
        [status] = corpus_status(job, read_manifest(manifest_path(job.directory)), ["prepare"], 0.0)
        assert (status.counts.unknown, status.counts.lost) == tuple(map(sum, zip(*counts, strict=True)))
        assert len(counts) == 3
        [report] = run_stages(job, "prepare")  # all of it was made before
        assert report.counts == status.counts
        found[kind] = (status.counts.unknown, status.counts.lost, *status.counts.warnings)
        assert all(f"warning    {warning}" in str(report) for warning in status.counts.warnings)
    # "xyz", "你", "xx" and "<unk>" (of which only "u", "n", "k" and the brackets have no token) in each file
    assert found["lost"] == (
        0,
        3 * (3 + 1 + 2 + 5),
        "33 characters were left out: the tokenizer has no token for them",
    )
    unknown, lost, warning = found["unknown"]
    assert (unknown, lost) == (3 * (3 + 1 + 2 + 5), 0)
    assert warning == "33 tokens (50% of all) replace text that the tokenizer does not know"


def test_a_corpus_of_which_nothing_is_left_says_why(tmp_path):
    write_file(tmp_path / "source/a.jsonl", json_lines(["xyz", "你"]))
    config = saved(bpe(LETTERS), tmp_path / "t.json")
    job = planned_corpus(
        tmp_path / "source", tmp_path / "out", ["a.jsonl"], tokenizer=config, num_output_files=1
    )
    with pytest.raises(HpcgenError) as error:
        make_units(job, "prepare")
    assert str(error.value).endswith(
        "none of its documents has a token (4 characters were left out: the tokenizer has no token for them); "
        "use a tokenizer that knows the text, or every byte"
    )


@pytest.mark.parametrize(
    "model",
    [models.WordLevel({"a": 0}, unk_token="?"), models.Unigram([("a", -1.0)])],
    ids=["WordLevel", "Unigram"],
)
def test_a_tokenizer_that_cannot_encode_a_text_is_named(tmp_path, model):
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(["</s>"])
    encode = load_tokenizer(saved(tokenizer, tmp_path / "t.json")).encode
    assert encode(["a"])[0].tolist() == [0]
    with pytest.raises(
        HpcgenError, match=r"t\.json: the library tokenizers cannot encode a text: .*; add the token"
    ):
        encode(["a", "你"])


def test_rejects_are_counted_by_kind(tmp_path):
    lines = [json.dumps({"text": "a"}), '{"content": 1}', '{"content": 2}', '{"text": null}', "", "<x>", "{"]
    write_file(tmp_path / "source/a.jsonl", "\n".join(lines).encode())
    job = planned_corpus(
        *(tmp_path / "source", tmp_path / "out", ["a.jsonl"]),
        num_output_files=1,
        bad_documents="skip",
        max_bad_fraction=1.0,
    )
    make_units(job, "prepare")
    [status] = corpus_status(job, read_manifest(manifest_path(job.directory)), ["prepare"], 0.0)
    expected = "2 missing key 'text', 2 not JSON, 1 'text' is not a string, 1 empty line"
    assert status.rejects == expected
    [report] = run_stages(job, "prepare")
    assert f"rejects    {expected}; see tokens/corpus-00000-of-00001.rejects.jsonl" in str(report)
