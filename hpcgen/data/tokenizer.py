"""Text to token IDs: with gigatoken if it produces the same IDs as the library `tokenizers`, else with `tokenizers`.

Special tokens are never added. Text that spells one out ("<|endoftext|>") becomes that token's id, as in
Megatron-LM's preprocess_data.py; `hpcgen.data.tokenize` counts the end-of-document tokens that come from text.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import json
import os
import threading
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
from hpcgen.data.unknown import lost_characters, unknown_id
from hpcgen.errors import FilePlace, HpcgenError

Backend = Literal["auto", "gigatoken", "tokenizers"]
Encode = Callable[[list[str]], tuple[NDArray[Any], NDArray[np.int64]]]
"""Returns the ids of all texts end to end, and the number of ids of each text."""

_MEMORY_CHECK_IDS = 32 * 1024 * 1024
"""Number of encoded ids (about 128 MB of text) between two checks of the process's memory."""
_MAX_MEMORY = 640 * 1024 * 1024
"""Maximum bytes per encoder. gigatoken caches every word that it sees; a worker should stay below 1 GiB per core."""

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
"""Texts on which tokenizers disagree: spaces, line ends, digits, case, scripts, normal forms, special tokens."""


@dataclass(frozen=True)
class Tokenizer:
    """A loaded tokenizer. `encode` is thread-safe."""

    config: TokenizerConfig
    encode: Encode
    vocab_size: int
    eod_id: int
    backend: str
    """Name of the library in use: gigatoken, tokenizers or bytes."""
    note: str = ""
    """Reason why gigatoken is not used; empty if it is, or if it was not considered."""
    reference: Encode | None = None
    """Encoder of the library `tokenizers`, if `encode` is a different encoder."""
    unknown_id: int | None = None
    """ID of the token for unknown text; None if there is none."""
    lost: Callable[[list[str]], int] | None = None
    """Counts the characters that `encode` leaves out; None if it keeps all."""


def load_tokenizer(config: TokenizerConfig, backend: Backend = "auto") -> Tokenizer:
    """Loads the tokenizer of `config`. `backend` forces one of the two libraries (kind "bytes" needs neither).

    Both libraries encode in the calling thread without the GIL, so as many cores are used as threads call `encode`.

    Raises:
        HpcgenError: the configuration is inconsistent, a file is missing or invalid, the end-of-document token is
            unknown, or `backend` is gigatoken and it does not support this tokenizer.
        ModuleNotFoundError: `backend` is gigatoken, which is not installed.
    """
    for problem in problems(config, "tokenizer"):
        raise HpcgenError(f"{problem.path} {problem.reason}", problem.hint)
    size, eod = vocab_size(config), eod_id(config)
    if config.kind == "bytes":
        return Tokenizer(config, encode_bytes, size, eod, "bytes")
    # Otherwise each call of the library tokenizers would start a thread for each core.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    definition = read_definition(config)
    source = json.dumps(definition)
    reference = _load_tokenizers(config, source)
    loaded = Tokenizer(
        config,
        reference,
        size,
        eod,
        "tokenizers",
        unknown_id=unknown_id(definition),
        lost=lost_characters(definition, source),
    )
    if backend == "tokenizers":
        return loaded
    if backend == "auto" and (missing := missing_gigatoken()):
        return dataclasses.replace(loaded, note=missing)
    fast, reason = _load_gigatoken(definition, source, reference)
    if fast is not None:
        return dataclasses.replace(loaded, encode=fast, backend="gigatoken", reference=reference)
    if backend == "gigatoken":
        raise HpcgenError(
            f"gigatoken does not support this tokenizer: {reason}", "use the backend tokenizers"
        )
    return dataclasses.replace(loaded, note=reason)


def missing_gigatoken() -> str:
    """Reason why gigatoken cannot be used for any tokenizer, worded for users; empty if it can."""
    try:
        import awkward  # noqa: F401  # the arrays that gigatoken returns
        import gigatoken  # noqa: F401
    except ModuleNotFoundError as error:
        reason = f"{error.name} is not installed (pip install 'hpcgen[data]')"
    except ImportError as error:  # for example, built for another C library
        reason = f"gigatoken cannot be imported ({error})"
    else:
        return ""
    return f"{reason}; tokenizers gives the same token IDs, but takes many times as long"


def encode_bytes(texts: list[str]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Encodes each byte of the UTF-8 text as one id."""
    raw = [text.encode() for text in texts]
    return np.frombuffer(b"".join(raw), np.uint8), np.fromiter(map(len, raw), np.int64, len(raw))


def read_definition(config: TokenizerConfig) -> dict[str, Any]:
    """Reads the tokenizer's tokenizer.json; for gpt2, builds an equivalent from its two files.

    Raises:
        HpcgenError: a file is missing or invalid, or dropout would make the ids random.
    """
    if config.kind == "gpt2":
        return _gpt2_definition(config)
    definition: dict[str, Any] = read_json(Path(str(config.tokenizer_file)))
    if definition["model"].get("dropout"):
        dropout = f"{config.tokenizer_file}: model.dropout = {definition['model']['dropout']}"
        raise HpcgenError(f"{dropout} makes the ids random", "set it to null")
    # Some files carry the input limits of a model. They would truncate or pad every document.
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
                f"{line!r:.60} is not a merge of two tokens",
                "use a merges.txt in GPT-2's format",
                where=merges_file,
            )
    end = {"id": eod_id(config), "content": eod_token(config), "special": True}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": tokens(config), "merges": merges}
    return {
        "version": "1.0",
        "added_tokens": [end | plain],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }


def _load_tokenizers(config: TokenizerConfig, source: str) -> Encode:
    path = config.tokenizer_file or gpt2_files(config)[0]
    try:
        tokenizer = tokenizers.Tokenizer.from_str(source)
    except Exception as error:  # the library raises bare Exception for every error in the file
        raise HpcgenError(
            f"the library tokenizers cannot load this file: {error}", where=FilePlace(path)
        ) from error

    def encode(texts: list[str]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        try:
            rows = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        except Exception as error:  # such as an unknown word in a text, without a token for unknown words
            raise HpcgenError(
                f"the library tokenizers cannot encode a text: {error}",
                "add the token for unknown text to the vocabulary, or use a tokenizer that knows every byte",
                where=FilePlace(path),
            ) from error
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        return np.fromiter(itertools.chain.from_iterable(rows), np.int32, int(lengths.sum())), lengths

    return encode


def _load_gigatoken(definition: dict[str, Any], source: str, reference: Encode) -> tuple[Encode | None, str]:
    """Returns gigatoken's encoder for the definition, which `source` has as JSON, or None and the reason.

    gigatoken rejects most settings that it does not support, but ignores some (single_word, for example). So its
    ids must also equal those of `reference` on probe texts.
    """
    import awkward  # noqa: F401  # without it, gigatoken returns lists
    import gigatoken

    try:
        encode = _GigatokenEncoder(lambda: gigatoken.Tokenizer.from_json(source))
    except Exception as error:  # RuntimeError; the lines after the first name places in gigatoken's source
        return None, str(error).partition("\n")[0]
    added = [token["content"] for token in definition.get("added_tokens", [])]
    probe = [*_PROBE, *(f"word {token} word{token}word  {token}{token}\n" for token in added)]
    for text in probe:
        if not np.array_equal(encode([text])[0], reference([text])[0]):
            return None, f"its ids differ from those of the library tokenizers for {text!r:.60}"
    return encode, ""


class _GigatokenEncoder:
    """Thread-safe encoder. It has as many gigatoken tokenizers as threads have called it at the same time.

    gigatoken's own threads would start with empty word caches, and their number is fixed at the first call.
    """

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load
        self._idle = [load()]
        """Tokenizers that no thread is using. The last one is used first, because its word cache is fullest."""
        self._num_loaded = 1
        self._unchecked = 0
        """Ids encoded since the last check of the memory."""
        self._lock = threading.Lock()

    def __call__(self, texts: list[str]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        tokenizer = self._take()
        rows = tokenizer.encode_batch(texts, parallel=False).layout
        # the arrays of the layout itself: awkward.flatten would copy the ids
        ids, offsets = np.asarray(rows.content.data), np.asarray(rows.offsets.data)
        self._return(tokenizer, len(ids))
        return ids, np.diff(offsets)

    def _take(self) -> Any:
        with self._lock:
            if self._idle:
                return self._idle.pop()
            self._num_loaded += 1
        return self._load()

    def _return(self, tokenizer: Any, num_ids: int) -> None:
        """Keeps the tokenizer for later calls, unless the word caches need too much memory."""
        with self._lock:
            self._idle.append(tokenizer)
            self._unchecked += num_ids
            if self._unchecked < _MEMORY_CHECK_IDS:
                return
            self._unchecked = 0
            _release_freed_memory()
            if _resident_bytes() > _MAX_MEMORY * self._num_loaded:
                self._num_loaded -= len(self._idle)
                self._idle.clear()


def _release_freed_memory() -> None:
    """Returns freed memory to the system. glibc keeps fragmented heaps, which would grow without bound."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _resident_bytes() -> int:
    """Resident memory of this process; 0 on systems without /proc."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
