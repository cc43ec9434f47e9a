"""Text to token IDs and back. The trainer reads tokenizer files by itself, since it runs where hpcgen is not installed.

As in hpcgen's data stages, special tokens are never added, and text that spells one out becomes its ID.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.contract.errors import TrainerError
from trainer.contract.files.regular_file import read_bytes
from trainer.contract.files.tokenizer_files import SETTINGS, token_text

NAMES = ("gpt2", "bytes")
"""Tokenizers with a name: GPT-2's, whose files come with hpcgen, and one ID per byte."""

GPT2_EOD = "<|endoftext|>"
BYTES_EOD = 256

INCOMPLETE = "\ufffd"
"""Text of the first bytes of a character."""

FIRST_BYTE = "<0xF0>"
"""Token of byte fallback whose byte begins a character of four bytes."""


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer."""

    name: str
    """Name or file."""
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    """Text of IDs, without special tokens. An incomplete UTF-8 sequence becomes U+FFFD."""
    size: int
    """Largest ID plus one."""
    eod_id: int | None
    """ID at the end of a document; None if unknown."""
    decode_all: Callable[[Sequence[int]], str] | None = None
    """Text of IDs with special tokens. Default: `decode`."""
    first_byte_id: int | None = None
    """ID of a first byte of a character, if bytes are tokens that the library decodes together: until the character is
    complete, the bytes before it have no text either."""

    def spell(self, ids: Sequence[int]) -> str:
        """Text of IDs with special tokens."""
        return (self.decode_all or self.decode)(ids)

    def context(self, prompt: Sequence[int]) -> list[int]:
        """The token after which to decode new tokens: the last one of `prompt` that is a complete text. May be empty.

        Tokenizers like Llama's drop the space at the beginning of a text, and new tokens are not the beginning. Special
        tokens do not count: they have no text.
        """
        for token in reversed(prompt):
            text = self.decode([token])
            if INCOMPLETE not in text and text == self.spell([token]):
                return [token]
        return []

    def check_fits(self, vocab_size: int) -> None:
        """Check that the model has a row for each ID.

        Raises:
            TrainerError: a row is missing.
        """
        if self.size > vocab_size:
            raise TrainerError(
                f"the tokenizer {self.name} has IDs up to {self.size - 1}, but the model has {vocab_size} tokens. Name "
                f"the tokenizer that the model was trained with: {', '.join(NAMES)} or the path of a tokenizer.json"
            )


def load_tokenizer(name: str | Path, eod_token: str | None = None) -> Tokenizer:
    """The tokenizer with a name or in a tokenizer.json, or in a directory with that file or vocab.json and merges.txt.

    `eod_token` is the token at the end of a document. Its default is <|endoftext|> for gpt2, and otherwise the
    eos_token of a tokenizer_config.json next to the file.

    Raises:
        TrainerError: a file is missing or invalid, or the token is unknown.
    """
    if str(name) == "bytes":
        return Tokenizer("bytes", lambda text: list(text.encode()), _decode_bytes, BYTES_EOD + 1, BYTES_EOD)
    files = gpt2_files() if str(name) == "gpt2" else _files(Path(name))
    library = _read(files)
    if len(files) > 1:
        eod_token = eod_token or GPT2_EOD
    eod_token = eod_token or _eos_token(files[0].with_name(SETTINGS))
    eod_id = None if eod_token is None else library.token_to_id(eod_token)
    if eod_token is not None and eod_id is None:
        raise TrainerError(f"{files[0]} has no token {eod_token!r}. Name the token at the end of a document")
    first_byte_id = library.token_to_id(FIRST_BYTE)
    has_bytes = first_byte_id is not None and library.decode([first_byte_id]) == INCOMPLETE
    return Tokenizer(
        name=str(name),
        encode=lambda text: library.encode(text, add_special_tokens=False).ids,
        decode=lambda ids: library.decode(list(ids)),
        size=max(library.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
        eod_id=eod_id,
        decode_all=lambda ids: library.decode(list(ids), skip_special_tokens=False),
        first_byte_id=first_byte_id if has_bytes else None,
    )


def _decode_bytes(ids: Sequence[int]) -> str:
    return bytes(index for index in ids if index < BYTES_EOD).decode(errors="replace")


def gpt2_files() -> tuple[Path, ...]:
    """GPT-2's two files, which OpenAI calls encoder.json and vocab.bpe. Does not import hpcgen."""
    package = importlib.util.find_spec("hpcgen")
    for directory in package.submodule_search_locations or () if package else ():
        files = Path(directory, "gpt2", "encoder.json"), Path(directory, "gpt2", "vocab.bpe")
        if all(file.is_file() for file in files):
            return files
    raise TrainerError(
        "the tokenizer gpt2 comes with hpcgen, which is not installed here. Name the path of a tokenizer.json"
    )


def _files(path: Path) -> tuple[Path, ...]:
    if path.is_file():
        return (path,)
    pair = path / "vocab.json", path / "merges.txt"
    if (path / "tokenizer.json").is_file():
        return (path / "tokenizer.json",)
    if all(file.is_file() for file in pair):
        return pair
    reason = "no tokenizer.json" if path.is_dir() else "no such file"
    raise TrainerError(
        f"tokenizer {path}: {reason}. Use {', '.join(NAMES)}, the path of a tokenizer.json, or a directory with it"
    )


def _read(files: tuple[Path, ...]) -> Any:
    try:
        import tokenizers
    except ModuleNotFoundError as error:
        raise TrainerError(
            "the library tokenizers is not installed. Install it with: pip install tokenizers"
        ) from error
    try:
        if len(files) == 1:
            library = tokenizers.Tokenizer.from_file(str(files[0]))
            # Some files carry the input limits of a model, which would truncate or pad a prompt.
            library.no_truncation()
            library.no_padding()
            return library
        model = tokenizers.models.BPE.from_file(*map(str, files))
    except Exception as error:  # the library raises bare Exception for every error in a file
        raise TrainerError(
            f"the library tokenizers cannot load this file: {error}", where=files[0]
        ) from error
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens([GPT2_EOD])
    return library


def _eos_token(settings: Path) -> str | None:
    """The end token in a tokenizer_config.json; None if there is none."""
    try:
        token = json.loads(read_bytes(settings)).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    return token_text(token)
