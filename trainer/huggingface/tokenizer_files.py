"""Tokenizer files of a Hugging Face directory: copies them and checks that they fit the model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.chats.files import template_source
from trainer.contract.errors import TrainerError
from trainer.contract.files.git_lfs import pointer_problem
from trainer.contract.files.regular_file import read_bytes
from trainer.contract.files.system_calls import sync_path
from trainer.contract.files.tokenizer_files import (
    MORE_TEMPLATES,
    SETTINGS,
    SPECIAL_TOKENS,
    TEMPLATE_FILE,
    token_text,
)
from trainer.huggingface.destination import copy_file, write_json, write_text
from trainer.inference.tokenizer import GPT2_EOD, gpt2_files

FILES = (
    *("tokenizer.json", SETTINGS, SPECIAL_TOKENS, "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", TEMPLATE_FILE, "chat_template.json"),
)
"""Names of tokenizer files in transformers."""


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer as files, and its special tokens."""

    files: dict[str, Path]
    """Path by name in a Hugging Face directory."""
    tokens: dict[str, int]
    """ID of each token. Empty if only a SentencePiece model (tokenizer.model) has them."""
    eos_token: str | None
    bos_token: str | None
    directory: Path | None = None
    """Directory that the files are from. None for GPT-2's own."""
    end_of_document: str | None = None
    """Token at the end of a document, if the user names one."""
    chat_template: str | None = None
    """Text of the chat template that replaces the tokenizer's."""

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
    return _tokenizer(name, files, None, eos_token or GPT2_EOD)


def find_tokenizer(path: Path, eos_token: str | None = None) -> Tokenizer | None:
    """The tokenizer in a directory, or in a file. None if the directory has none.

    A file with the name tokenizer.json belongs to the other files in its directory, such as chat templates.
    `eos_token` is the end of a document.

    Raises:
        TrainerError: a file is missing or invalid, or there is no such token.
    """
    if path.is_dir():
        directory, files = path, _files(path)
    elif path.is_file() and path.name == "tokenizer.json":
        directory, files = path.parent, _files(path.parent)
    elif path.is_file():
        directory, files = None, {"tokenizer.json": path}
    else:
        raise TrainerError(
            "no such tokenizer. Name a tokenizer.json, or a directory with tokenizer files", where=path
        )
    if not files.keys() & {"tokenizer.json", "vocab.json", "tokenizer.model"}:
        return None
    return _tokenizer(path, files, directory, eos_token)


def _files(directory: Path) -> dict[str, Path]:
    """The tokenizer files of a directory, by name."""
    names = [
        *FILES,
        *(f"{MORE_TEMPLATES}/{path.name}" for path in sorted(directory.glob(f"{MORE_TEMPLATES}/*.jinja"))),
    ]
    return {name: directory / name for name in names if (directory / name).is_file()}


def _tokenizer(
    path: Path, files: dict[str, Path], directory: Path | None, eos_token: str | None
) -> Tokenizer:
    tokens = _tokens(files)
    named = {"bos_token": eos_token} if _is_gpt2(files) and SETTINGS not in files else {}
    for name in (SPECIAL_TOKENS, SETTINGS):  # the second overrides the first
        named |= json_object(files[name]) if name in files else {}
    if eos_token is not None and tokens and eos_token not in tokens:
        raise TrainerError(f"the tokenizer has no token {eos_token!r}, the end of a document", where=path)
    eos, bos = (token_text(named.get(key)) for key in ("eos_token", "bos_token"))
    return Tokenizer(files, tokens, eos or eos_token, bos, directory, eos_token)


def _is_gpt2(files: Collection[str]) -> bool:
    """True if the tokenizer is GPT-2's kind: vocab.json with merges.txt."""
    return "tokenizer.json" not in files and "vocab.json" in files


def with_chat_template(tokenizer: Tokenizer, path: Path | None, name: str | None) -> Tokenizer:
    """The tokenizer with the chat template in a file, or with one of its own by name, in place of its default one.

    Raises:
        TrainerError: there is no such template.
    """
    if path is None and name is None:
        return tokenizer
    if path is None and tokenizer.directory is None:
        raise TrainerError(
            f"the tokenizer has no chat template {name!r}, since its file is not a tokenizer.json with others next to "
            "it. Name the template's file (data.corpus.chat.chat_template_file)"
        )
    _, source = template_source(tokenizer.directory or Path(), path, name)
    return dataclasses.replace(tokenizer, chat_template=source)


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


def check_links(tokenizer: Tokenizer, named: Path) -> None:
    """Check that an export would only copy files of the tokenizer's directory, or of the Hub's cache.

    A link in a downloaded directory could lead to a private file, which whoever gets the export could read. The user
    has chosen where the path `named` leads.

    Raises:
        TrainerError: a link leads elsewhere. Names all of them.
    """
    if tokenizer.directory is None:
        return
    directory = tokenizer.directory.resolve()
    allowed = [directory]
    if directory.parent.name == "snapshots":
        allowed.append(directory.parent.parent / "blobs")
    targets = {path: path.resolve() for path in tokenizer.files.values() if path != named}
    outside = [
        f"{path} leads to {target}"
        for path, target in targets.items()
        if not any(target.is_relative_to(each) for each in allowed)
    ]
    if outside:
        raise TrainerError(
            f"{'; '.join(outside)}: outside of {tokenizer.directory}, and the export would have a copy. If the content "
            "may be shared, replace the link with a copy of the file. Otherwise, remove the link"
        )


def copy_tokenizer(tokenizer: Tokenizer, directory: Path, max_length: int | None) -> None:
    """Copy the files to `directory`. Adds a tokenizer_config.json if there is none."""
    files = dict(tokenizer.files)
    if tokenizer.chat_template is not None:
        files.pop(TEMPLATE_FILE, None)
        write_text(directory / TEMPLATE_FILE, tokenizer.chat_template)
    for name, path in files.items():
        if name.startswith(f"{MORE_TEMPLATES}/"):
            (directory / MORE_TEMPLATES).mkdir(exist_ok=True)
        copy_file(path, directory / name)
    if (directory / MORE_TEMPLATES).is_dir():
        sync_path(directory / MORE_TEMPLATES)
    if SETTINGS not in tokenizer.files:
        is_gpt2 = _is_gpt2(tokenizer.files)
        settings = {
            "tokenizer_class": "GPT2Tokenizer" if is_gpt2 else "PreTrainedTokenizerFast",
            "model_max_length": max_length,
            "clean_up_tokenization_spaces": False,
        }
        special = {"eos_token": tokenizer.eos_token, "bos_token": tokenizer.bos_token}
        if is_gpt2:
            special |= {"unk_token": tokenizer.eos_token}
        settings |= {key: token for key, token in special.items() if token is not None}
        write_json(directory / SETTINGS, settings)


def lost(tokenizer: Tokenizer) -> str | None:
    """The part of the tokenizer that an export loses. None if it keeps everything."""
    if SETTINGS in tokenizer.files:
        has_code = "auto_map" in json_object(tokenizer.files[SETTINGS])
        return f"{SETTINGS} names Python code (auto_map), which is not copied" if has_code else None
    if _is_gpt2(tokenizer.files):
        return None
    path = next(iter(tokenizer.files.values()))
    has_no_template = tokenizer.chat_template is None and TEMPLATE_FILE not in tokenizer.files
    return (
        f"{path.parent} has no {SETTINGS}, so the exported tokenizer has no special tokens except the end of a "
        f"document{', and no chat template' if has_no_template else ''}"
    )


def _tokens(files: dict[str, Path]) -> dict[str, int]:
    try:
        if "tokenizer.json" in files:
            path = files["tokenizer.json"]
            document = json_object(path)
            vocabulary = document["model"]["vocab"]
            if isinstance(vocabulary, list):  # Unigram: [token, score] in the order of the IDs
                vocabulary = {token: index for index, (token, _) in enumerate(vocabulary)}
            added = {token["content"]: token["id"] for token in document.get("added_tokens", [])}
        elif "vocab.json" in files:
            path = files["vocab.json"]
            vocabulary = json_object(path)
            added = json_object(files["added_tokens.json"]) if "added_tokens.json" in files else {}
        else:
            return {}
        tokens: dict[str, int] = {**vocabulary, **added}
        if not all(type(index) is int and index >= 0 for index in tokens.values()):
            raise ValueError
    except (KeyError, TypeError, ValueError, AttributeError):
        raise TrainerError(f"{path} has no vocabulary, so it is not a tokenizer's") from None
    return tokens


def json_object(path: Path) -> dict[str, Any]:
    """The content of a file, which must be a JSON object.

    Raises:
        TrainerError: it is not, or cannot be read.
    """
    try:
        document = json.loads(read_bytes(path))
    except (OSError, ValueError, RecursionError) as error:
        raise TrainerError(pointer_problem(path) or f"{path} cannot be read ({error})") from error
    if not isinstance(document, dict):
        raise TrainerError(f"{path} is not a JSON object")
    return document
