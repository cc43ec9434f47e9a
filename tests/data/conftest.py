from __future__ import annotations

import functools
import json
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpcore2
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from hpcgen.config.tokenizer import TokenizerConfig, gpt2_files
from hpcgen.data.http import Web
from tests.data.downloads import CONTENT, PATH, QUICK
from tests.http_server import Server, http_server

HARD_TEXTS = [
    "",
    " ",
    "\n",
    "plain text",
    "line separator \u2028 paragraph separator \u2029 next line \u0085 form feed \f end",
    "carriage return \r\n and \r alone",
    "nul \x00, tab \t, no-break \u00a0, ideographic \u3000, zero width \u200b, byte order mark \ufeff",
    "naïve cafe\u0301 ﬁ İ ß Ω привет 你好 한국어 مرحبا ภาษาไทย 👩‍👩‍👧 🇫🇷 \U0010ffff \u0378",
    "it's WE'LL I'm 1234567890 3.14 __init__(self, *args) {'a': [1]}  ->   x",
    "a" * 1000 + " " * 100 + "\n" * 50 + "=" * 200,
]


@pytest.fixture(scope="session", autouse=True)
def one_tls_context() -> Iterator[None]:
    """Load the certificates of authorities once: they are most of a client's start, and no server here has TLS."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpcore2, "default_ssl_context", functools.cache(httpcore2.default_ssl_context))
        yield


@pytest.fixture(scope="session")
def library_texts() -> list[str]:
    """About 2 MB of real text: sources of the standard library, empty files among them."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts, size = [], 0
    for path in sorted((*root.glob("*.py"), *root.glob("*/__init__.py"))):
        text = path.read_text(encoding="utf-8")
        texts.append(text)
        size += len(text)
        if size > 2_000_000:
            break
    return texts


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    def write(texts: list[str], name: str = "corpus.jsonl") -> Path:
        path = tmp_path / name
        path.write_bytes(b"".join(json.dumps({"text": text, "n": 1}).encode() + b"\n" for text in texts))
        return path

    return write


@pytest.fixture(scope="session")
def gpt2_reference() -> tokenizers.Tokenizer:
    """GPT-2 as the library tokenizers reads its two files, apart from our own reading of them."""
    vocab, merges = gpt2_files(TokenizerConfig())
    tokenizer = tokenizers.Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


@pytest.fixture(scope="session")
def trained(library_texts: list[str]) -> dict[str, tokenizers.Tokenizer]:
    """Small tokenizers of every kind: two that gigatoken takes and four that it must not be used for."""
    corpus = library_texts[:6]
    byte_level = tokenizers.Tokenizer(models.BPE())
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _train(byte_level, corpus, trainers.BpeTrainer, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"])

    word_piece = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    word_piece.normalizer = normalizers.BertNormalizer()
    word_piece.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    _train(word_piece, corpus, trainers.WordPieceTrainer, special_tokens=["[UNK]", "</s>"])

    unigram = tokenizers.Tokenizer(models.Unigram())
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    _train(unigram, corpus[:3], trainers.UnigramTrainer, unk_token="<unk>", special_tokens=["<unk>", "</s>"])

    # gigatoken loads this one, but ignores that the added token is only found where it stands alone.
    alone = tokenizers.Tokenizer.from_str(byte_level.to_str())
    alone.add_tokens([AddedToken("TOKEN", single_word=True)])

    # Parts that a model's own tokenizer.json often has, none of which belongs in a corpus.
    dressed = tokenizers.Tokenizer.from_str(byte_level.to_str())
    dressed.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    dressed.enable_truncation(5)
    dressed.enable_padding(length=9)
    return {
        "byte-level": byte_level,
        "sentencepiece": _sentencepiece(corpus),
        "dressed": dressed,
        "wordpiece": word_piece,
        "unigram": unigram,
        "single-word": alone,
    }


def _train(tokenizer: tokenizers.Tokenizer, corpus: list[str], trainer: Any, **options: Any) -> None:
    tokenizer.train_from_iterator(corpus, trainer(vocab_size=1000, show_progress=False, **options))


def _sentencepiece(corpus: list[str]) -> tokenizers.Tokenizer:
    """A BPE in the manner of Llama 2: spaces as "▁", unknown characters as bytes."""
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    lines = [line for text in corpus[:5] for line in text.split("\n")]
    _train(tokenizer, lines, trainers.BpeTrainer, special_tokens=specials, max_token_length=16)
    definition = json.loads(tokenizer.to_str())
    definition["added_tokens"] = definition["added_tokens"][:3]  # the byte tokens are ordinary ones
    return tokenizers.Tokenizer.from_str(json.dumps(definition))


@pytest.fixture(scope="session")
def trained_config(
    trained: dict[str, tokenizers.Tokenizer], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., TokenizerConfig]:
    """The configuration of one of the `trained` tokenizers, saved as tokenizer.json."""
    folder = tmp_path_factory.mktemp("tokenizers")
    for name, tokenizer in trained.items():
        tokenizer.save(str(folder / f"{name}.json"))

    def config(name: str, eod_token: str | None = "</s>") -> TokenizerConfig:
        return TokenizerConfig(
            kind="huggingface", tokenizer_file=str(folder / f"{name}.json"), eod_token=eod_token
        )

    return config


@pytest.fixture(scope="session")
def megatron() -> ModuleType:
    """megatron.core.datasets.indexed_dataset, whose files hpcgen's must equal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own and torch's imports
        return pytest.importorskip("megatron.core.datasets.indexed_dataset", exc_type=ImportError)


@pytest.fixture(scope="session")
def megatron_pair(megatron: ModuleType) -> Callable[..., tuple[bytes, bytes]]:
    """The .bin and .idx that Megatron's builder writes when it is fed as preprocess_data.py feeds it."""

    def build(folder: Path, documents: list[list[int]], eod: int, vocab_size: int) -> tuple[bytes, bytes]:
        prefix = folder / "reference"
        dtype = megatron.DType.optimal_dtype(vocab_size)
        builder = megatron.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
        for ids in documents:
            whole = [*ids, eod] if ids else []
            builder.add_document(whole, [len(whole)] if whole else [])
        builder.finalize(f"{prefix}.idx")
        return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()

    return build


@pytest.fixture
def server() -> Iterator[Server]:
    with http_server() as running:
        running.files[PATH] = CONTENT
        yield running


@pytest.fixture
def web() -> Iterator[Web]:
    with Web(QUICK) as clients:
        yield clients
