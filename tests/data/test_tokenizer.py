from __future__ import annotations

import functools
import hashlib
import json
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gigatoken
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models

from hpcgen.config.corpus import CorpusConfig, CorpusJob
from hpcgen.config.tokenizer import TokenizerConfig, content_sha256, eod_id, gpt2_files, problems, vocab_size
from hpcgen.data.stages import configuration
from hpcgen.data.tokenizer import _GigatokenEncoder, load_tokenizer, read_definition
from hpcgen.errors import HpcgenError
from tests.patience import PATIENCE_S

from .conftest import HARD_TEXTS

GPT2 = TokenizerConfig()


def encoded(tokenizer, texts):
    """One list of ids for each text."""
    tokens, lengths = tokenizer.encode(texts)
    ends = lengths.cumsum()
    return [tokens[end - length : end].tolist() for end, length in zip(ends, lengths, strict=True)]


def expected(reference: tokenizers.Tokenizer, texts):
    return [reference.encode(text, add_special_tokens=False).ids for text in texts]


def test_gpt2_files_are_openais():
    # The digests that openai/tiktoken checks its downloads against (tiktoken_ext/openai_public.py).
    vocab, merges = gpt2_files(GPT2)
    assert hashlib.sha256(vocab.read_bytes()).hexdigest().startswith("196139668be63f3b5d6574427317ae82")
    assert hashlib.sha256(merges.read_bytes()).hexdigest().startswith("1ce1664773c50f3e0cc8842619a93edc")


@pytest.mark.parametrize("backend", ["gigatoken", "tokenizers"])
def test_gpt2_ids(gpt2_reference, library_texts, backend):
    tokenizer = cached_gpt2(backend)
    texts = [*HARD_TEXTS, *library_texts[:8]]
    assert tokenizer.backend == backend
    assert encoded(tokenizer, texts) == expected(gpt2_reference, texts)


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece", "dressed"])
@pytest.mark.parametrize("backend", ["gigatoken", "tokenizers"])
def test_trained_ids(trained, trained_config, library_texts, name, backend):
    trained[name].no_truncation()
    trained[name].no_padding()
    texts = [*HARD_TEXTS, "<s>a </s> b<unk>", *library_texts[:8]]
    assert encoded(load_tokenizer(trained_config(name), backend), texts) == expected(trained[name], texts)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=200))
@settings(max_examples=50)
def test_both_backends_agree_on_any_text(text):
    assert encoded(cached_gpt2("gigatoken"), [text]) == encoded(cached_gpt2("tokenizers"), [text])


@functools.cache
def cached_gpt2(backend):
    """Loaded once for all texts."""
    return load_tokenizer(GPT2, backend)


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("wordpiece", 'Unsupported model type "WordPiece"'),
        ("unigram", 'Unsupported model type "Unigram"'),
        ("single-word", "its ids differ from those of the library tokenizers for 'word TOKEN"),
    ],
)
def test_falls_back_where_gigatoken_does_not_fit(trained, trained_config, name, note):
    tokenizer = load_tokenizer(trained_config(name))
    texts = [*HARD_TEXTS, "x TOKEN aTOKENb"]
    assert tokenizer.backend == "tokenizers"
    assert note in tokenizer.note
    assert encoded(tokenizer, texts) == expected(trained[name], texts)
    with pytest.raises(HpcgenError, match="gigatoken does not support this tokenizer"):
        load_tokenizer(trained_config(name), "gigatoken")


@pytest.mark.parametrize("missing", ["gigatoken", pytest.param("awkward", marks=pytest.mark.slow)])
def test_falls_back_where_gigatoken_is_not_installed(monkeypatch, missing):
    ids = encoded(cached_gpt2("gigatoken"), list(HARD_TEXTS))
    monkeypatch.setitem(sys.modules, missing, None)
    tokenizer = load_tokenizer(GPT2)
    assert (tokenizer.backend, tokenizer.reference) == ("tokenizers", None)
    assert tokenizer.note.startswith(f"{missing} is not installed (pip install 'hpcgen[data]'); ")
    assert encoded(tokenizer, list(HARD_TEXTS)) == ids
    with pytest.raises(ModuleNotFoundError):
        load_tokenizer(GPT2, "gigatoken")


@pytest.mark.parametrize("backend", ["gigatoken", "tokenizers"])
def test_a_special_token_in_the_text_becomes_its_id(backend):
    assert encoded(load_tokenizer(GPT2, backend), ["a<|endoftext|>b"]) == [[64, 50256, 65]]


def test_bytes():
    tokenizer = load_tokenizer(TokenizerConfig(kind="bytes"))
    assert encoded(tokenizer, ["aé\x00", "", "€"]) == [[97, 0xC3, 0xA9, 0], [], [0xE2, 0x82, 0xAC]]
    assert (tokenizer.vocab_size, tokenizer.eod_id, tokenizer.backend) == (257, 256, "bytes")


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece", "wordpiece", "unigram", "single-word"])
def test_vocab_size_and_eod_of_a_tokenizer_json(trained, trained_config, name):
    assert vocab_size(trained_config(name)) == trained[name].get_vocab_size()
    assert eod_id(trained_config(name)) == trained[name].token_to_id("</s>")


def test_vocab_size_and_eod_of_gpt2(tmp_path):
    vocab, merges = map(str, gpt2_files(GPT2))
    assert (vocab_size(GPT2), eod_id(GPT2)) == (50257, 50256)
    named = TokenizerConfig(vocab_file=vocab, merges_file=merges, eod_token="!")
    assert (vocab_size(named), eod_id(named)) == (50257, 0)


def test_the_vocabulary_may_have_holes(tmp_path):
    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 9}, unk_token="a")).save(str(path))
    assert vocab_size(TokenizerConfig(kind="huggingface", tokenizer_file=str(path))) == 10


def test_an_unknown_eod_token_lists_the_special_ones(trained_config):
    with pytest.raises(
        HpcgenError, match=r"byte-level\.json: the end-of-document token is not set; .* <s>, </s>"
    ):
        eod_id(trained_config("byte-level", eod_token=None))
    with pytest.raises(HpcgenError, match=r"unknown token '<eos>'; set eod_token .* <s>, </s>"):
        load_tokenizer(trained_config("byte-level", eod_token="<eos>"))


def test_a_damaged_file_of_gpt2_is_refused(monkeypatch, tmp_path):
    shipped = dict(zip(gpt2_files(GPT2), content_sha256(GPT2), strict=True))
    copies = {tmp_path / path.name: digest for path, digest in shipped.items()}
    for path in shipped:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr("hpcgen.config.tokenizer._GPT2_SHA256", copies)
    assert load_tokenizer(GPT2).eod_id == 50256
    merges = tmp_path / "vocab.bpe"
    merges.write_bytes(merges.read_bytes().replace(b"\xc4\xa0 t\n\xc4\xa0 a\n", b"\xc4\xa0 a\n\xc4\xa0 t\n"))
    for use in (load_tokenizer, content_sha256):
        with pytest.raises(
            HpcgenError, match=r"vocab\.bpe: SHA-256 is [0-9a-f]{64}, but GPT-2's is 1ce16647"
        ):
            use(GPT2)


def test_the_name_of_a_model_is_not_a_tokenizer_file(tmp_path):
    config = TokenizerConfig(
        kind="huggingface", tokenizer_file=str(tmp_path / "owner/model"), eod_token="</s>"
    )
    with pytest.raises(HpcgenError, match=r"owner/model: No such file .*use the path of a tokenizer\.json"):
        vocab_size(config)


@pytest.mark.parametrize(
    ("config", "paths"),
    [
        (TokenizerConfig(), []),
        (TokenizerConfig(vocab_file="v.json", merges_file="m.txt", eod_token="x"), []),
        (TokenizerConfig(merges_file="m.txt"), ["vocab_file"]),
        (TokenizerConfig(vocab_file="v.json", tokenizer_file="t.json"), ["tokenizer_file", "merges_file"]),
        (TokenizerConfig(kind="huggingface"), ["tokenizer_file"]),
        (TokenizerConfig(kind="huggingface", tokenizer_file="t.json", vocab_file="v.json"), ["vocab_file"]),
        (TokenizerConfig(kind="bytes"), []),
        (
            TokenizerConfig(kind="bytes", eod_token="x", tokenizer_file="t.json"),
            ["tokenizer_file", "eod_token"],
        ),
    ],
)
def test_fields_that_do_not_fit_the_kind(config, paths):
    assert [problem.path for problem in problems(config, "t")] == [f"t.{path}" for path in paths]


def test_loading_refuses_inconsistent_files():
    with pytest.raises(
        HpcgenError, match=r"tokenizer\.merges_file is missing, but vocab_file is set; set both"
    ):
        load_tokenizer(TokenizerConfig(vocab_file="v.json"))


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"model": {"vocab": {}}}', '{"model": {"vocab": {"a": "b"}}}', "<html>"]
)
def test_a_file_that_is_not_a_tokenizer(tmp_path: Path, content: str):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(HpcgenError, match=r"tokenizer\.json"):
        load_tokenizer(TokenizerConfig(kind="huggingface", tokenizer_file=str(path), eod_token="a"))


def test_files_that_tokenizers_cannot_load(tmp_path: Path):
    (tmp_path / "t.json").write_text('{"model": {"type": "Nonsense", "vocab": {"a": 0}}}')
    with pytest.raises(HpcgenError, match=r"t\.json: the library tokenizers cannot load"):
        load_tokenizer(
            TokenizerConfig(kind="huggingface", tokenizer_file=str(tmp_path / "t.json"), eod_token="a")
        )
    vocab = str(gpt2_files(GPT2)[0])
    (tmp_path / "m.txt").write_text("#version: 0.2\na b c\n")
    with pytest.raises(HpcgenError, match=r"m\.txt: 'a b c' is not a merge"):
        load_tokenizer(TokenizerConfig(vocab_file=vocab, merges_file=str(tmp_path / "m.txt")))
    with pytest.raises(HpcgenError, match=r"cannot read the tokenizer file gpt-2"):
        load_tokenizer(TokenizerConfig(kind="huggingface", tokenizer_file="gpt-2", eod_token="a"))


def test_random_merges_are_refused(trained, tmp_path):
    definition = json.loads(trained["byte-level"].to_str())
    definition["model"]["dropout"] = 0.1
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(definition))
    with pytest.raises(HpcgenError, match=r"model\.dropout = 0\.1 makes the ids random"):
        load_tokenizer(TokenizerConfig(kind="huggingface", tokenizer_file=str(path), eod_token="</s>"))


def test_a_missing_tokenizer_file_is_named_before_a_stage_starts(tmp_path):
    vocab = str(gpt2_files(GPT2)[0])
    gone = TokenizerConfig(vocab_file=vocab, merges_file=str(tmp_path / "m.txt"))
    job = CorpusJob(corpus=CorpusConfig(directory=str(tmp_path)), tokenizer=gone)
    with pytest.raises(HpcgenError, match=r"cannot read the tokenizer file .*m\.txt: No such file"):
        configuration("prepare", job)


def test_a_tokenizer_with_a_cleared_cache_returns_the_same_ids(
    trained_config: Callable[..., TokenizerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer is loaded again for each text, which takes seconds for GPT-2's."""
    texts = ["word1 and 7919", "word2 and 15838"]
    small = trained_config("byte-level")
    ids, lengths = load_tokenizer(small, "gigatoken").encode(texts)
    monkeypatch.setattr("hpcgen.data.tokenizer._MEMORY_CHECK_IDS", 1)
    monkeypatch.setattr("hpcgen.data.tokenizer._MAX_MEMORY", 0)
    forgetful = load_tokenizer(small, "gigatoken").encode
    again, lengths_again = forgetful(texts)
    assert again.tolist() == ids.tolist()
    assert lengths_again.tolist() == lengths.tolist()


def test_threads_encode_at_once_each_with_a_tokenizer_of_its_own() -> None:
    """The second thread starts while the first one holds the only tokenizer."""
    loaded: list[object] = []
    both = threading.Barrier(2, timeout=PATIENCE_S)

    class Waiting:
        def __init__(self) -> None:
            self.tokenizer = gigatoken.Tokenizer.from_json(json.dumps(read_definition(GPT2)))
            loaded.append(self)

        def encode_batch(self, texts: list[str], *, parallel: bool) -> object:
            both.wait()
            return self.tokenizer.encode_batch(texts, parallel=parallel)

    encode = _GigatokenEncoder(Waiting)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):  # the second time, both are idle
            first, second = pool.map(encode, [["Hello"], ["caf", "café"]])
            assert first[0].tolist() == [15496]
            assert second[1].tolist() == [2, 3]
    assert len(loaded) == 2
