"""Turns text into token ids: with gigatoken where its ids are those of `tokenizers`, else with `tokenizers`.

Special tokens are never added. Text that spells one out ("<|endoftext|>") becomes that token's id, as it does
in Megatron-LM's preprocess_data.py; `hpcgen.data.tokenize` counts the end-of-document tokens that arise so.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
from numpy.typing import NDArray

from hpcgen.config.tokenizer import (
    TokenizerConfig,
    eod_id,
    eod_token,
    gpt2_files,
    problems,
    read_file,
    read_json,
    tokens,
    vocab_size,
)
from hpcgen.errors import HpcgenError

Backend = Literal["auto", "gigatoken", "tokenizers"]
Encode = Callable[[list[str]], tuple[NDArray[Any], NDArray[np.int64]]]
"""The ids of all texts end to end, and the number of ids of each text."""

_LOOK_CHARACTERS = 128 * 1024 * 1024
"""Of text, for each thread, after which the memory of the process is looked at."""
_MUCH_MEMORY = 640 * 1024 * 1024
"""Bytes, for each thread. gigatoken remembers every word that it has met; a worker is to stay below 1 GiB."""

_PROBE = (
    "",
    " ",
    "Hello, world! It's 1984; they'LL see 3.14159 and 1234567890.",
    "  two  spaces \t tabs\t\t\r\nand\n\n\nlines \n ",
    "def f(x):\n        return {'a': [x**2, 0x1F]}  # CamelCase snake_case\n",
    "naïve café e\u0301 ﬁ Ⅷ ½ ŒUVRE ß İstanbul Ελλάδα Привет",
    "你好，世界。こんにちは 한국어 مرحبا שלום नमस्ते ภาษาไทย",
    "👩‍👩‍👧 🇫🇷 😀😀 \u200b\u00a0\u3000\ufeff\u2028\u2029\u0085 x",
    "\x00\x01\x7f \u0378 \U0010ffff �",
    "<s></s><unk>[SEP]<|endoftext|> <0x41> ▁x▁▁y Ġz",
    "a" * 300 + "=" * 80 + " " * 70 + "-" * 33,
)
"""What tokenizers disagree about: spaces, line ends, digits, case, scripts, normal forms, specials."""


@dataclass(frozen=True)
class Tokenizer:
    """A loaded tokenizer. `encode` may be called from several threads at once."""

    config: TokenizerConfig
    encode: Encode
    vocab_size: int
    eod_id: int
    backend: str
    """gigatoken, tokenizers or bytes."""
    note: str = ""
    """Why gigatoken was passed over; empty when it was not."""
    reference: Encode | None = None
    """The library tokenizers, where another one encodes."""


def load_tokenizer(config: TokenizerConfig, backend: Backend = "auto", *, threads: int = 2) -> Tokenizer:
    """Loads the tokenizer of `config`; `backend` forces one of the two libraries (bytes needs neither).

    With one thread gigatoken encodes where it is called, which costs least, but keeps Python's lock meanwhile.
    The threads of both libraries can be limited before they are loaded alone: `limit_threads`.

    Raises:
        HpcgenError: the configuration does not hold together, a file is missing or wrong, the end-of-document
            token is unknown, or gigatoken was forced on a tokenizer that it does not take.
        ModuleNotFoundError: gigatoken was forced and is not installed.
    """
    for problem in problems(config, "tokenizer"):
        raise HpcgenError(f"{problem.path} {problem.reason}", problem.hint)
    size, eod = vocab_size(config), eod_id(config)
    if config.kind == "bytes":
        return Tokenizer(config, encode_bytes, size, eod, "bytes")
    definition = read_definition(config)
    reference = _load_tokenizers(config, definition)
    if backend == "tokenizers":
        return Tokenizer(config, reference, size, eod, "tokenizers")
    if backend == "auto" and (missing := missing_gigatoken()):
        return Tokenizer(config, reference, size, eod, "tokenizers", missing)
    fast, reason = _load_gigatoken(definition, reference, threads)
    if fast is not None:
        return Tokenizer(config, fast, size, eod, "gigatoken", reference=reference)
    if backend == "gigatoken":
        raise HpcgenError(f"gigatoken does not take this tokenizer: {reason}", "use the backend tokenizers")
    return Tokenizer(config, reference, size, eod, "tokenizers", reason)


def missing_gigatoken() -> str:
    """Why gigatoken cannot be used for any tokenizer, for people; empty if it can."""
    try:
        import awkward  # noqa: F401  # the arrays that gigatoken returns
        import gigatoken  # noqa: F401
    except ModuleNotFoundError as error:
        reason = f"{error.name} is not installed (pip install 'hpcgen[data]')"
    except ImportError as error:  # built for another C library, say
        reason = f"gigatoken cannot be imported ({error})"
    else:
        return ""
    return f"{reason}; tokenizers gives the same token IDs, but takes many times as long"


def limit_threads(threads: int) -> None:
    """Lets both libraries use that many cores; for a process that has not encoded anything yet."""
    os.environ["RAYON_NUM_THREADS"] = str(threads)


def encode_bytes(texts: list[str]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """One id for each byte of the UTF-8 form."""
    raw = [text.encode() for text in texts]
    return np.frombuffer(b"".join(raw), np.uint8), np.fromiter(map(len, raw), np.int64, len(raw))


def read_definition(config: TokenizerConfig) -> dict[str, Any]:
    """The content of the tokenizer's tokenizer.json; for gpt2, the one that its two files stand for.

    Raises:
        HpcgenError: a file is missing or wrong, or makes random ids.
    """
    if config.kind == "gpt2":
        return _gpt2_definition(config)
    definition: dict[str, Any] = read_json(Path(str(config.tokenizer_file)))
    if definition["model"].get("dropout"):
        dropout = f"{config.tokenizer_file}: model.dropout = {definition['model']['dropout']}"
        raise HpcgenError(f"{dropout} makes the ids random", "set it to null")
    # Limits of a model's input, which some files carry, would cut or pad every document.
    return definition | {"truncation": None, "padding": None}


def _gpt2_definition(config: TokenizerConfig) -> dict[str, Any]:
    merges_file = gpt2_files(config)[1]
    try:
        lines = read_file(merges_file).decode().split("\n")
    except ValueError as error:
        raise HpcgenError(f"cannot read the tokenizer file {merges_file}: {error}") from error
    merges = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    for pair in merges:
        if len(pair) != 2:
            line = " ".join(pair)
            raise HpcgenError(
                f"{merges_file}: {line!r:.60} is not a merge of two tokens", "name a merges.txt"
            )
    end = {"id": eod_id(config), "content": eod_token(config), "special": True}
    whole = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": tokens(config), "merges": merges}
    return {
        "version": "1.0",
        "added_tokens": [end | whole],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }


def _load_tokenizers(config: TokenizerConfig, definition: dict[str, Any]) -> Encode:
    try:
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(definition))
    except Exception as error:  # the library raises bare Exception for every fault of the file
        source = config.tokenizer_file or gpt2_files(config)[0]
        raise HpcgenError(f"{source}: the library tokenizers cannot load this tokenizer: {error}") from error

    def encode(texts: list[str]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        rows = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        return np.fromiter(itertools.chain.from_iterable(rows), np.int32, int(lengths.sum())), lengths

    return encode


def _load_gigatoken(definition: dict[str, Any], reference: Encode, threads: int) -> tuple[Encode | None, str]:
    """gigatoken's encoder, or None and why not.

    gigatoken refuses most of what it does not know, but ignores some of it (single_word, say), so
    it must also give the ids of `reference` on a probe.
    """
    import awkward  # noqa: F401  # without it, gigatoken returns lists
    import gigatoken

    source = json.dumps(definition)
    try:
        tokenizer = gigatoken.Tokenizer.from_json(source)
    except Exception as error:  # RuntimeError with the place in its own source after the first line
        return None, str(error).partition("\n")[0]
    unlooked = 0

    def encode(texts: list[str]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        nonlocal tokenizer, unlooked
        rows = tokenizer.encode_batch(texts, parallel=threads > 1).layout
        unlooked += sum(map(len, texts))
        if unlooked >= _LOOK_CHARACTERS * threads:
            unlooked = 0
            _give_back_memory()
            if _resident_bytes() > _MUCH_MEMORY * threads:
                tokenizer = gigatoken.Tokenizer.from_json(source)  # without the words that it remembers
        # its arrays themselves: awkward.flatten would copy the ids
        return np.asarray(rows.content.data), np.diff(np.asarray(rows.offsets.data))

    added = [token["content"] for token in definition.get("added_tokens", [])]
    probe = [*_PROBE, *(f"word {token} word{token}word  {token}{token}\n" for token in added)]
    for text in probe:
        if not np.array_equal(encode([text])[0], reference([text])[0]):
            return None, f"its ids differ from those of tokenizers on {text!r:.60}"
    return encode, ""


def _give_back_memory() -> None:
    """Returns freed memory to the system: that of blocks of all sizes has holes, and glibc keeps it, more and more."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _resident_bytes() -> int:
    """Memory of this process; 0 on systems that do not say it here."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
