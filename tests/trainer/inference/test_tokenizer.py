"""Tokenizers encode as in the data stages, and decode what they encoded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

from hpcgen.config.tokenizer import TokenizerConfig
from hpcgen.data.tokenizer import load_tokenizer as data_tokenizer
from hpcgen.data.tokenizer import read_definition
from trainer.contract.errors import TrainerError
from trainer.inference import load_tokenizer

TEXT = "Hello, world!  naïve 👩 \n<|endoftext|>def f(x):"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """GPT-2's tokenizer as a tokenizer.json, with the input limit that some files carry."""
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(read_definition(TokenizerConfig())))
    library = tokenizers.Tokenizer.from_file(str(path))
    library.enable_truncation(3)
    library.save(str(path))
    return path


def test_gpt2_encodes_as_the_data_stages_do() -> None:
    ours, theirs = load_tokenizer("gpt2"), data_tokenizer(TokenizerConfig(), "tokenizers")
    assert ours.encode(TEXT) == theirs.encode([TEXT])[0].tolist()
    assert (ours.size, ours.eod_id) == (theirs.vocab_size, theirs.eod_id) == (50257, 50256)
    assert ours.decode(ours.encode(TEXT)) == TEXT.replace("<|endoftext|>", "")


def test_a_file_or_its_directory(file: Path) -> None:
    expected = load_tokenizer("gpt2").encode(TEXT)
    for path in (file, file.parent):
        tokenizer = load_tokenizer(path)
        assert tokenizer.encode(TEXT) == expected
        assert tokenizer.eod_id is None
    assert load_tokenizer(file, "<|endoftext|>").eod_id == 50256
    (file.parent / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|endoftext|>"}}')
    assert load_tokenizer(file).eod_id == 50256
    with pytest.raises(TrainerError, match="has no token '</s>'"):
        load_tokenizer(file, "</s>")


def test_bytes() -> None:
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.decode([*tokenizer.encode(TEXT), 256]) == TEXT
    assert (tokenizer.size, tokenizer.eod_id) == (257, 256)


def test_missing_and_invalid_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match=r"meta-llama/x: no such file. Use gpt2, bytes, the path of a"):
        load_tokenizer("meta-llama/x")
    with pytest.raises(TrainerError, match=r"no tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TrainerError, match="the library tokenizers cannot load this file"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_of_another_model_is_refused() -> None:
    tokenizer = load_tokenizer("gpt2")
    tokenizer.check_fits(50257)
    with pytest.raises(TrainerError, match="gpt2 has IDs up to 50256, but the model has 1000 tokens"):
        tokenizer.check_fits(1000)
