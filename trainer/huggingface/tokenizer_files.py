"""Tokenizer files of a Hugging Face directory: copies them and checks that they fit the model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.contract.errors import TrainerError
from trainer.contract.git_lfs import pointer_problem
from trainer.huggingface.destination import copy_file, write_json
from trainer.inference.tokenizer import GPT2_EOD, gpt2_files

FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json"),
)
"""Names of tokenizer files in transformers."""

SETTINGS = "tokenizer_config.json"


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer as files, and its special tokens."""

    files: dict[str, Path]
    """Path by name in a Hugging Face directory."""
    tokens: dict[str, int]
    """ID of each token. Empty if only a SentencePiece model (tokenizer.model) has them."""
    eos_token: str | None
    bos_token: str | None

    @property
    def size(self) -> int:
        """Number of embedding rows that the tokenizer needs; 0 if unknown."""
        return max(self.tokens.values(), default=-1) + 1

    def id_of(self, token: str | None) -> int | None:
        """ID of a token; None if there is no such token."""
        return None if token is None else self.tokens.get(token)


def named_tokenizer(name: Path, eos_token: str | None = None) -> Tokenizer | None:
    """The tokenizer that a user names: GPT-2's as gpt2, or as in `find_tokenizer`."""
    if str(name) != "gpt2":
        return find_tokenizer(name, eos_token)
    files = dict(zip(("vocab.json", "merges.txt"), gpt2_files(), strict=True))
    return _tokenizer(name, files, eos_token or GPT2_EOD)


def find_tokenizer(path: Path, eos_token: str | None = None) -> Tokenizer | None:
    """The tokenizer in a directory, or in the file tokenizer.json. None if the directory has none.

    `eos_token` is the end of a document, if tokenizer_config.json does not name one.

    Raises:
        TrainerError: a file is missing or invalid, or there is no such token.
    """
    if path.is_dir():
        files = {name: path / name for name in FILES if (path / name).is_file()}
    elif path.is_file():
        files = {"tokenizer.json": path}
    else:
        raise TrainerError(
            f"{path}: no such tokenizer. Name a tokenizer.json, or a directory with tokenizer files"
        )
    if not files.keys() & {"tokenizer.json", "vocab.json", "tokenizer.model"}:
        return None
    return _tokenizer(path, files, eos_token)


def _tokenizer(path: Path, files: dict[str, Path], eos_token: str | None) -> Tokenizer:
    tokens = _tokens(files)
    settings = _object(files[SETTINGS]) if SETTINGS in files else {}
    eos = eos_token or _text(settings.get("eos_token"))
    if eos_token is not None and tokens and eos_token not in tokens:
        raise TrainerError(f"{path}: the tokenizer has no token {eos_token!r}, the end of a document")
    return Tokenizer(files, tokens, eos, _text(settings.get("bos_token")))


def check_size(tokenizer: Tokenizer, vocab_size: int | None) -> None:
    """Check that every token has a row in the embedding.

    Raises:
        TrainerError: it has not.
    """
    if vocab_size is not None and tokenizer.size > vocab_size:
        raise TrainerError(
            f"the tokenizer has IDs up to {tokenizer.size - 1}, but the embedding has {vocab_size} rows. "
            "Name the tokenizer that the model was trained with"
        )


def copy_tokenizer(tokenizer: Tokenizer, directory: Path, max_length: int | None) -> None:
    """Copy the files to `directory`. Adds a tokenizer_config.json if there is none."""
    for name, path in tokenizer.files.items():
        copy_file(path, directory / name)
    if SETTINGS not in tokenizer.files:
        is_gpt2 = "tokenizer.json" not in tokenizer.files
        settings = {
            "tokenizer_class": "GPT2Tokenizer" if is_gpt2 else "PreTrainedTokenizerFast",
            "model_max_length": max_length,
            "clean_up_tokenization_spaces": False,
        }
        if tokenizer.eos_token is not None:
            settings |= {"eos_token": tokenizer.eos_token}
        write_json(directory / SETTINGS, settings)


def _tokens(files: dict[str, Path]) -> dict[str, int]:
    try:
        if "tokenizer.json" in files:
            path = files["tokenizer.json"]
            document = _object(path)
            vocabulary = document["model"]["vocab"]
            if isinstance(vocabulary, list):  # Unigram: [token, score] in the order of the IDs
                vocabulary = {token: index for index, (token, _) in enumerate(vocabulary)}
            added = {token["content"]: token["id"] for token in document.get("added_tokens", [])}
        elif "vocab.json" in files:
            path = files["vocab.json"]
            vocabulary = _object(path)
            added = _object(files["added_tokens.json"]) if "added_tokens.json" in files else {}
        else:
            return {}
        tokens: dict[str, int] = {**vocabulary, **added}
        if not all(type(index) is int and index >= 0 for index in tokens.values()):
            raise ValueError
    except (KeyError, TypeError, ValueError, AttributeError):
        raise TrainerError(f"{path} has no vocabulary, so it is not a tokenizer's") from None
    return tokens


def _object(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise TrainerError(pointer_problem(path) or f"{path} cannot be read ({error})") from error
    if not isinstance(document, dict):
        raise TrainerError(f"{path} is not a JSON object")
    return document


def _text(token: Any) -> str | None:
    """The text of a special token, which may be an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
