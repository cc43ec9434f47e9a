"""The tokenizer section, and the facts about tokenizers needed for planning: vocabulary size and end token.

The facts come from the tokenizer's files. `hpcgen.data.tokenizer` encodes text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from hpcgen.errors import HpcgenError, Problem
from hpcgen.text import few
from trainer.contract.config.path import FilePath
from trainer.contract.files.git_lfs import pointer_problem
from trainer.contract.files.regular_file import read_bytes
from trainer.contract.record import config_section

GPT2_FILES = ("vocab.json", "merges.txt")
"""Names of GPT-2's files in a directory that the trainer reads."""
GPT2_EOD = "<|endoftext|>"
_GPT2_VOCAB_SIZE = 50257
"""256 bytes, 50,000 merges and <|endoftext|>, which has the last id."""
_GPT2_FOLDER = Path(__file__).parents[1] / "gpt2"
_GPT2_SHA256 = {
    _GPT2_FOLDER / "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    _GPT2_FOLDER / "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
"""SHA-256 of OpenAI's two files from https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/."""


@config_section
class TokenizerConfig:
    """The tokenizer of a corpus and of the model trained on it."""

    kind: Literal["gpt2", "huggingface", "bytes"] = "gpt2"
    """Kind of tokenizer: gpt2 (vocab.json and merges.txt), huggingface (any tokenizer.json), or bytes (one id per
    byte)."""
    vocab_file: FilePath | None = None
    """With gpt2: path of vocab.json. Default: GPT-2's, shipped with hpcgen."""
    merges_file: FilePath | None = None
    """With gpt2: path of merges.txt. Set both vocab_file and merges_file, or neither."""
    tokenizer_file: FilePath | None = None
    """With huggingface: path of tokenizer.json."""
    eod_token: str | None = None
    """Token after each document. Default for gpt2: <|endoftext|>. Not used with bytes, whose end-of-document id is
    256."""


def problems(config: TokenizerConfig, path: str = "data.tokenizer") -> Iterator[Problem]:
    """Yields keys of `config`, at `path` in the run file, that do not fit its kind. Reads no files."""
    unread = {
        "gpt2": ("tokenizer_file",),
        "huggingface": ("vocab_file", "merges_file"),
        "bytes": ("tokenizer_file", "vocab_file", "merges_file", "eod_token"),
    }[config.kind]
    for name in unread:
        if getattr(config, name) is not None:
            reason = f"has no effect with {path}.kind = {config.kind}"
            yield Problem(f"{path}.{name}", reason, "remove it")
    if config.kind == "gpt2" and (config.vocab_file is None) != (config.merges_file is None):
        missing = "vocab_file" if config.vocab_file is None else "merges_file"
        other = "merges_file" if missing == "vocab_file" else "vocab_file"
        reason = f"is missing, but {other} is set"
        yield Problem(f"{path}.{missing}", reason, "set both or neither", about=(f"{path}.{other}",))
    if config.kind == "huggingface" and config.tokenizer_file is None:
        reason = f"is required with {path}.kind = huggingface"
        hint = "set it to the path of a tokenizer.json"
        yield Problem(f"{path}.tokenizer_file", reason, hint, about=(f"{path}.kind",))


def vocab_size(config: TokenizerConfig) -> int:
    """The vocabulary size: the largest token id including added tokens, plus one.

    Raises:
        HpcgenError: a file of the tokenizer is missing or invalid.
    """
    if config.kind == "bytes":
        return 257
    if config.kind == "gpt2" and config.vocab_file is None:
        return _GPT2_VOCAB_SIZE
    return max(tokens(config).values()) + 1


def id_bytes(vocab_size: int) -> int:
    """Bytes of a token id in a .bin file with this unpadded vocabulary (Megatron-Core's DType.optimal_dtype)."""
    return 2 if vocab_size < 65_500 else 4


def eod_id(config: TokenizerConfig) -> int:
    """The id that ends each document.

    Raises:
        HpcgenError: the token is required but not set, or the tokenizer does not have it.
    """
    if config.kind == "bytes":
        return 256
    token = eod_token(config)
    if config.kind == "gpt2" and config.vocab_file is None and token == GPT2_EOD:
        return _GPT2_VOCAB_SIZE - 1
    known = tokens(config)
    if token is None or token not in known:
        reason = "the end-of-document token is not set" if token is None else f"unknown token {token!r}"
        hint = f"set eod_token (--eod-token) to one of {_candidates(config, known)}"
        raise HpcgenError(reason, hint, where=_vocabulary_file(config))
    return known[token]


def eod_token(config: TokenizerConfig) -> str | None:
    """The end-of-document token as text; None if it is not set and has no default, and for bytes."""
    return GPT2_EOD if config.eod_token is None and config.kind == "gpt2" else config.eod_token


def gpt2_files(config: TokenizerConfig) -> tuple[Path, Path]:
    """Paths of vocab.json and merges.txt, which OpenAI calls encoder.json and vocab.bpe."""
    if config.vocab_file is not None and config.merges_file is not None:
        return Path(config.vocab_file), Path(config.merges_file)
    vocabulary, merges = _GPT2_SHA256
    return vocabulary, merges


def content_sha256(config: TokenizerConfig) -> list[str]:
    """SHA-256 of each file of the tokenizer; empty for bytes, whose ids are fixed.

    Raises:
        HpcgenError: a file cannot be read, or a shipped file is damaged.
    """
    if config.kind == "bytes":
        return []
    files = gpt2_files(config) if config.kind == "gpt2" else (_vocabulary_file(config),)
    return [hashlib.sha256(read_file(path)).hexdigest() for path in files]


def tokens(config: TokenizerConfig) -> dict[str, int]:
    """All tokens of a gpt2 or huggingface tokenizer with their ids.

    Raises:
        HpcgenError: the file is missing or has no vocabulary.
    """
    path = _vocabulary_file(config)
    document = read_json(path)
    try:
        if config.kind == "gpt2":
            return _ids(document)
        vocabulary = document["model"]["vocab"]
        if isinstance(vocabulary, list):  # Unigram: [token, score] in the order of the ids
            vocabulary = {token: index for index, (token, _) in enumerate(vocabulary)}
        return _ids(
            vocabulary | {token["content"]: token["id"] for token in document.get("added_tokens", [])}
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        expected = "vocab.json, which maps tokens to ids" if config.kind == "gpt2" else "tokenizer.json"
        raise HpcgenError(f"not a {expected}", where=path) from None


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        HpcgenError: the file cannot be read or is not JSON.
    """
    try:
        return json.loads(read_file(path))
    except (ValueError, RecursionError) as error:
        raise HpcgenError(
            pointer_problem(path) or f"cannot read the tokenizer file {path}: {error}"
        ) from error


def read_file(path: Path) -> bytes:
    """The content of a tokenizer file.

    Raises:
        HpcgenError: the file cannot be read, or is a shipped file that differs from the original.
    """
    try:
        content = read_bytes(path)
    except OSError as error:
        is_name = path.suffix not in (".json", ".txt", ".bpe")
        hint = (
            "use the path of a tokenizer.json. Names of models on a hub are not supported" if is_name else ""
        )
        raise HpcgenError(
            f"cannot read the tokenizer file {path}: {error.strerror}",
            hint or "use the path of a readable file",
        ) from error
    expected = _GPT2_SHA256.get(path)
    if expected and (found := hashlib.sha256(content).hexdigest()) != expected:
        raise HpcgenError(f"SHA-256 is {found}, but GPT-2's is {expected}", "reinstall hpcgen", where=path)
    return content


def _vocabulary_file(config: TokenizerConfig) -> Path:
    if config.kind == "gpt2":
        return gpt2_files(config)[0]
    if config.tokenizer_file is None:
        raise HpcgenError(
            "a huggingface tokenizer requires tokenizer_file", "set it to the path of a tokenizer.json"
        )
    return Path(config.tokenizer_file)


def _ids(vocabulary: Mapping[str, int]) -> dict[str, int]:
    """Returns `vocabulary` after checking that it maps tokens to ids and is not empty."""
    if not vocabulary or not all(isinstance(i, int) and i >= 0 for i in vocabulary.values()):
        raise ValueError
    return dict(vocabulary)


def _candidates(config: TokenizerConfig, known: Mapping[str, int]) -> str:
    """Possible end-of-document tokens: tokens that are marked special, or that look special."""
    special = []
    if config.kind == "huggingface":
        added = read_json(_vocabulary_file(config)).get("added_tokens", [])
        special = [token["content"] for token in added if token.get("special")]
    shown = special or [token for token in known if token.startswith("<") and token.endswith(">")]
    if not shown:
        return "its tokens (none of them is marked special)"
    return few(shown, 20)


def tokenizer_name(tokenizer: TokenizerConfig) -> str:
    """The tokenizer as programs of the trainer read it: a known name, a tokenizer.json or a directory."""
    if tokenizer.tokenizer_file is not None:
        return tokenizer.tokenizer_file
    return str(PurePosixPath(tokenizer.vocab_file).parent) if tokenizer.vocab_file else tokenizer.kind


def tokenizer_problems(tokenizer: TokenizerConfig, reader: str) -> Iterator[Problem]:
    """Yields a problem if GPT-2's files are not in a directory that the trainer can read. `reader` is a key."""
    vocabulary, merges = tokenizer.vocab_file, tokenizer.merges_file
    if vocabulary is None or merges is None:
        return
    paths = (PurePosixPath(vocabulary), PurePosixPath(merges))
    if tuple(path.name for path in paths) != GPT2_FILES or paths[0].parent != paths[1].parent:
        reason = f"and merges_file have other names or directories than {reader} requires"
        hint = f"put both files into one directory as {' and '.join(GPT2_FILES)}"
        yield Problem("data.tokenizer.vocab_file", reason, hint, about=("data.tokenizer.merges_file",))
