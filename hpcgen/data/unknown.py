"""Text that a tokenizer has no token for: it becomes the token for unknown text, or it is left out."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import tokenizers
from tokenizers.pre_tokenizers import ByteLevel


def unknown_id(definition: dict[str, Any]) -> int | None:
    """The id of the token for unknown text in a tokenizer.json; None if there is none."""
    model = definition["model"]
    if model.get("unk_id") is not None:  # Unigram
        return int(model["unk_id"])
    vocabulary = model.get("vocab")
    if not isinstance(vocabulary, dict):
        return None
    added = {token["content"]: token["id"] for token in definition.get("added_tokens") or ()}
    return (vocabulary | added).get(model.get("unk_token"))


def lost_characters(definition: dict[str, Any], source: str) -> Callable[[list[str]], int] | None:
    """Returns a function that counts the characters of texts that the tokenizer leaves out; None if it keeps all.

    BPE leaves out a character without a token, unless it has a token for unknown text or one for each byte. For a
    byte-level tokenizer, bytes are counted. `source` is the definition as JSON.
    """
    model = definition["model"]
    vocabulary, has_fallback = model.get("vocab"), bool(model.get("byte_fallback"))
    is_bpe = isinstance(vocabulary, dict) and "merges" in model and not model.get("continuing_subword_prefix")
    if not is_bpe or model.get("end_of_word_suffix") or unknown_id(definition) is not None:
        return None
    if has_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return None  # a character without a token becomes one token for each byte
    stages = json.dumps([definition.get("pre_tokenizer"), definition.get("normalizer")])
    if '"ByteLevel"' in stages and all(character in vocabulary for character in ByteLevel.alphabet()):
        return None  # each byte becomes one of these characters
    tokenizer = tokenizers.Tokenizer.from_str(source)
    added = [token["content"] for token in definition.get("added_tokens") or ()]

    @functools.cache
    def is_lost(character: str) -> bool:
        in_bytes = has_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in character.encode())
        return character not in vocabulary and not in_bytes

    def lost_of(normalized: str) -> int:
        before: Any = tokenizer.pre_tokenizer
        words = [word for word, _ in before.pre_tokenize_str(normalized)] if before else [normalized]
        if model.get("ignore_merges"):  # a word that is a token is not divided into characters
            words = [word for word in words if word not in vocabulary]
        return sum(map(is_lost, "".join(words)))

    loses_any = functools.cache(lost_of)

    def count(texts: list[str]) -> int:
        total = 0
        for text in texts:
            for token in added:  # the model does not see these
                text = text.replace(token, "")
            normalizer: Any = tokenizer.normalizer
            normalized = normalizer.normalize_str(text) if normalizer else text
            # each distinct character by itself first, since splitting a text into words is slow
            if any(map(loses_any, set(normalized))):
                total += lost_of(normalized)
        return total

    return count
