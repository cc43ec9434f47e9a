"""The pairs are, byte for byte, what Megatron-Core's builder writes of the ids that the library tokenizers gives."""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
import zstandard
from tokenizers import models, pre_tokenizers, trainers

from hpcgen.config.tokenizer import TokenizerConfig
from hpcgen.data.tokenize_files import TokenizeReport, tokenize_files
from hpcgen.data.tokenizer import load_tokenizer

WHOLE_RUN_BYTES = 60_000_000
SUFFIXES = {".py", ".h", ".hpp", ".c", ".txt", ".html", ".rst", ".md", ".pyi", ".xml", ".js", ".json", ".po"}


def real_texts(most_bytes: int) -> Iterator[str]:
    """Different texts that are on this machine: documentation, headers, sources; smaller ones of each folder first."""
    library = Path(sysconfig.get_paths()["stdlib"])
    roots = [Path("/usr/share/doc"), Path("/usr/include"), library, Path(sysconfig.get_paths()["purelib"])]
    seen: set[bytes] = set()
    for root in roots:
        for path in sorted(root.rglob("*")):
            if path.suffix not in SUFFIXES or path.is_symlink() or not path.is_file():
                continue
            content = path.read_bytes()
            digest = hashlib.sha256(content).digest()
            if digest in seen or len(content) > 2_000_000:
                continue
            seen.add(digest)
            try:
                yield str(content, "utf-8")
            except UnicodeDecodeError:
                continue
            most_bytes -= len(content)
            if most_bytes < 0:
                return


def write_zst(texts: list[str], path: Path) -> Path:
    lines = (json.dumps({"text": text, "n": 1}, ensure_ascii=False).encode() + b"\n" for text in texts)
    with path.open("wb") as file, zstandard.ZstdCompressor(write_checksum=True).stream_writer(file) as writer:
        for line in lines:
            writer.write(line)
    return path


def reference_pair(megatron, prefix: Path, tokenizer, texts, eod: int) -> tuple[bytes, bytes]:
    """As preprocess_data.py --append-eod writes it, some documents at a time to bound memory."""
    builder = megatron.IndexedDatasetBuilder(
        f"{prefix}.bin", dtype=megatron.DType.optimal_dtype(tokenizer.get_vocab_size())
    )
    for begin in range(0, len(texts), 500):
        for row in tokenizer.encode_batch(texts[begin : begin + 500], add_special_tokens=False):
            ids = [*row.ids, eod] if row.ids else []
            builder.add_document(ids, [len(ids)] if ids else [])
    builder.finalize(f"{prefix}.idx")
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def assert_identical(tmp_path, megatron, config, reference, texts, eod) -> TokenizeReport:
    """Tokenizes, compares, and gives the report."""
    report = tokenize_files(
        [write_zst(texts, tmp_path / "texts.jsonl.zst")],
        tmp_path / "ours",
        load_tokenizer(config),
        verify_fraction=0,
    )
    assert report.backend == "gigatoken"
    ours = tuple((tmp_path / f"ours.{suffix}").read_bytes() for suffix in ("bin", "idx"))
    assert ours == reference_pair(megatron, tmp_path / "theirs", reference, texts, eod)
    return report


@pytest.mark.parametrize("vocab_size", [65_499, 65_500])
def test_both_sides_of_the_dtype_rule(tmp_path, megatron, library_texts, vocab_size):
    """Two bytes for each id where the vocabulary is smaller than 65,500."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=2_000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(library_texts[:5], trainer)
    definition = json.loads(tokenizer.to_str())
    vocabulary = definition["model"]["vocab"]
    # no merge makes these, and the last one ends documents
    vocabulary |= {f"more{number}": number for number in range(len(vocabulary), vocab_size - 1)}
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(definition))
    tokenizer.add_special_tokens(["</s>"])
    assert (tokenizer.get_vocab_size(), tokenizer.token_to_id("</s>")) == (vocab_size, vocab_size - 1)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = TokenizerConfig(
        kind="huggingface", tokenizer_file=str(tmp_path / "tokenizer.json"), eod_token="</s>"
    )
    # the largest id is also in the text itself
    texts = [*library_texts[:5], "", "spelled </s> out", "é"]
    report = assert_identical(tmp_path, megatron, config, tokenizer, texts, vocab_size - 1)
    assert (tmp_path / "ours.bin").stat().st_size == report.tokens * (2 if vocab_size < 65_500 else 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "byte-level", "sentencepiece"])
def test_fifty_megabytes_of_real_text(tmp_path, megatron, gpt2_reference, trained, trained_config, name):
    texts = [*real_texts(WHOLE_RUN_BYTES), "", "\u2028", ""]
    assert sum(len(text.encode()) for text in texts) > 50_000_000, "this machine holds too little text"
    if name == "gpt2":
        assert_identical(tmp_path, megatron, TokenizerConfig(), gpt2_reference, texts, 50256)
    else:
        eod = trained[name].token_to_id("</s>")
        assert_identical(tmp_path, megatron, trained_config(name), trained[name], texts, eod)
