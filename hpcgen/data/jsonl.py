"""Reads JSON Lines in blocks of complete lines, and extracts the text of each line.

Lines end only at "\\n": U+2028 and similar are ordinary characters of a JSON string.
"""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hpcgen.errors import HpcgenError
from hpcgen.text import few

LONGEST_LINE = 24 * 1024 * 1024
"""Maximum bytes of a line, without its "\\n". gigatoken needs up to thirty times that, and a worker has 1 GiB."""
TOO_LONG = "too long"
NOT_UTF8 = "not UTF-8"
NOT_JSON = "not JSON"
"""Kinds of rejects."""
_LONGEST_INTEGER = 640
"""Digits of an integer that Python converts whatever its limit (sys.set_int_max_str_digits)."""
_BLOCK_BYTES = 4 * 1024 * 1024
_SHOWN_BYTES = 200
"""Bytes of an overlong line that are kept for messages."""
_MAX_LINES = 65536
"""Maximum number of lines in a block. Each bad line needs a few hundred bytes, even if it is empty."""
_LONG_LINE = 1024
_PIECE_BYTES = 64 * 1024
"""Bytes per UTF-8 check: small enough for the decoded text to stay in the core's cache. Also the number of bytes at the
beginning of a block that tell whether its lines are long."""


@dataclass(frozen=True)
class Block:
    """Consecutive complete lines of one file."""

    path: Path
    first_line: int
    """Number of the first line, counted from 0."""
    data: bytes
    """All lines, each with its "\\n", including the last line of a file."""
    newlines: NDArray[np.int64]
    """Offsets of the "\\n" in `data`."""
    too_long: Reject | None = None
    """The only line of this block if it is longer than LONGEST_LINE; `data` is then empty."""
    left_out: int = 0
    """Bytes of the overlong line, with its "\\n"."""

    @property
    def num_lines(self) -> int:
        """Number of lines."""
        return len(self.newlines) + (self.too_long is not None)

    @property
    def num_bytes(self) -> int:
        """Size of all lines in bytes, including an overlong one."""
        return len(self.data) + self.left_out


@dataclass(frozen=True)
class Reject:
    """A line without a readable text."""

    path: Path
    line: int
    """Line number, counted from 0."""
    kind: str
    """The reason in a few words, which all lines with the same mistake share."""
    reason: str
    data: bytes
    """The line, without its "\\n"."""
    is_complete: bool = True
    """False if the line is too long and `data` is only its beginning."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line + 1}: {self.reason}"


@dataclass(frozen=True)
class Texts:
    """Texts and rejected lines of a block."""

    texts: list[str]
    lines: NDArray[np.int64]
    """Line number of each text, counted from 0."""
    rejects: list[Reject]
    answers: list[list[tuple[int, int]]] | None = None
    """Begin and end of the assistant's answers in each text, in characters. None if the texts are not chats."""


def read_blocks(path: Path, content: Iterable[bytes]) -> Iterator[Block]:
    """Yields the lines of `content`, which comes from the file at `path`, in blocks of about 4 MiB.

    A longer line makes a longer block. A line longer than LONGEST_LINE makes a block without data, which bounds the
    memory. The last line needs no "\\n".

    Raises:
        HpcgenError: the file is empty.
    """
    pieces = _pieces(content)
    parts: list[bytes] = []
    found: Iterable[Block]
    size = line = 0
    for piece in pieces:
        parts.append(piece)
        size += len(piece)
        if size < _BLOCK_BYTES:
            continue
        end = piece.rfind(b"\n") + 1
        if end:
            parts[-1], rest = piece[:end], piece[end:]
            found = _blocks(path, line, b"".join(parts))
        # Up to _BLOCK_BYTES of complete lines may precede the long one.
        elif size > _BLOCK_BYTES + LONGEST_LINE:
            found, rest = _blocks_around_long_line(path, line, b"".join(parts), pieces)
        else:
            continue
        for block in found:
            yield block
            line += block.num_lines
        parts = [rest]
        size = len(rest)
    if size:
        end_of_last = b"" if parts[-1].endswith(b"\n") else b"\n"
        yield from _blocks(path, line, b"".join((*parts, end_of_last)))
    elif not line:
        raise HpcgenError("the file is empty", "remove it or download it again", where=path)


def text_reader(json_key: str) -> Callable[[Block], Texts]:
    """Returns a thread-safe function that extracts the texts under `json_key` from a block's lines.

    It rejects lines that are too long, are not UTF-8 or not JSON, or have no string under the key. JSON is what
    Megatron-LM's json.loads accepts: NaN, Infinity and unpaired surrogates are allowed, except in the text.
    """
    record: Any = msgspec.defstruct("Record", [("text", str)], rename={"text": json_key}, gc=False)
    decoder: Any = msgspec.json.Decoder(record)

    def read(block: Block) -> Texts:
        if block.too_long is not None:
            return Texts([], np.empty(0, np.int64), [block.too_long])
        texts = _all_texts(block, decoder)
        if texts is not None:
            return Texts(texts, np.arange(block.first_line, block.first_line + block.num_lines), [])
        return _good_texts(block, decoder.decode, json_key)

    return read


def _pieces(content: Iterable[bytes]) -> Iterator[bytes]:
    """Splits `content` into pieces of at most _BLOCK_BYTES, so that a large chunk does not become a large block."""
    for chunk in content:
        if len(chunk) <= _BLOCK_BYTES:
            yield chunk
        else:
            yield from (chunk[at : at + _BLOCK_BYTES] for at in range(0, len(chunk), _BLOCK_BYTES))


def _blocks(path: Path, first_line: int, data: bytes) -> Iterator[Block]:
    """Yields the complete lines of `data` in one block, or in several if some of the lines are overlong."""
    newlines = _newlines(data)
    if len(data) <= LONGEST_LINE:
        yield from _split(Block(path, first_line, data, newlines))
        return
    begins = np.concatenate([[0], newlines + 1])
    done = 0
    for number in [*np.flatnonzero(newlines - begins[:-1] > LONGEST_LINE).tolist(), len(newlines)]:
        begin, end = int(begins[done]), int(begins[number])
        if begin < end:
            yield from _split(Block(path, first_line + done, data[begin:end], newlines[done:number] - begin))
        if number < len(newlines):
            yield _long_line(
                path, first_line + number, data[end : end + _SHOWN_BYTES], int(newlines[number]) - end
            )
        done = number + 1


def _split(block: Block) -> Iterator[Block]:
    """Yields the lines of a block in blocks of at most _MAX_LINES."""
    if block.num_lines <= _MAX_LINES:
        yield block
        return
    begin = 0
    for done in range(0, block.num_lines, _MAX_LINES):
        newlines = block.newlines[done : done + _MAX_LINES]
        end = int(newlines[-1]) + 1
        yield Block(block.path, block.first_line + done, block.data[begin:end], newlines - begin)
        begin = end


def _blocks_around_long_line(
    path: Path, first_line: int, data: bytes, pieces: Iterator[bytes]
) -> tuple[list[Block], bytes]:
    """Returns the blocks of `data`, whose overlong last line continues in `pieces`, and the bytes after that line."""
    begin = data.rfind(b"\n") + 1
    blocks = list(_blocks(path, first_line, data[:begin])) if begin else []
    size, shown, rest = len(data) - begin, data[begin : begin + _SHOWN_BYTES], b""
    for piece in pieces:
        end = piece.find(b"\n")
        if end >= 0:
            size += end
            rest = piece[end + 1 :]
            break
        size += len(piece)
    number = first_line + sum(block.num_lines for block in blocks)
    return [*blocks, _long_line(path, number, shown, size)], rest


def _long_line(path: Path, number: int, begin: bytes, size: int) -> Block:
    """Block of one overlong line of `size` bytes, which starts with `begin`."""
    begin = begin[: codecs.utf_8_decode(begin, "replace", False)[1]]  # drops a cut character at the end
    reason = f"the line has {size:,} bytes, more than the maximum of {LONGEST_LINE:,}; it starts with {_begin(begin)}"
    reject = Reject(path, number, TOO_LONG, reason, begin, is_complete=False)
    return Block(path, number, b"", np.empty(0, np.int64), reject, size + 1)


def _newlines(data: bytes) -> NDArray[np.int64]:
    """Offsets of the "\\n". For long lines, `find` is seven times as fast as comparing every byte."""
    if data.count(b"\n", 0, _PIECE_BYTES) * _LONG_LINE > _PIECE_BYTES:
        return np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n"))
    found: list[int] = []
    position = data.find(b"\n")
    while position >= 0:
        found.append(position)
        position = data.find(b"\n", position + 1)
    return np.array(found, np.int64)


def _all_texts(block: Block, decoder: Any) -> list[str] | None:
    """Texts of all lines, or None if the lines must be read one by one.

    decode_lines is twice as fast as a loop, but accepts any white space as the end of a line. In valid JSON, a
    "\\n" between "}" and "{" always separates two documents. So if every line starts with "{" and ends with "}", and
    there are as many documents as lines, each line is one document.
    """
    data = np.frombuffer(block.data, np.uint8)
    is_regular = (
        data[0] == ord("{")
        and np.all(data[block.newlines - 1] == ord("}"))
        and np.all(data[block.newlines[:-1] + 1] == ord("{"))
    )
    if not (is_regular and _is_utf8(block.data)):
        return None
    try:
        texts = [record.text for record in decoder.decode_lines(block.data)]
    except (ValueError, RecursionError):
        return None
    return texts if len(texts) == block.num_lines else None


def _good_texts(block: Block, decode: Callable[[bytes], Any], json_key: str) -> Texts:
    """Reads line by line. Returns the texts of the valid lines and the reasons for rejecting the others."""
    texts: list[str] = []
    numbers: list[int] = []
    rejects: list[Reject] = []
    for number, line in enumerate(block.data[:-1].split(b"\n"), block.first_line):
        try:
            texts.append(_text(line, decode, json_key))
            numbers.append(number)
        except UnreadableError as error:
            rejects.append(Reject(block.path, number, error.kind, error.reason, line))
    return Texts(texts, np.asarray(numbers, np.int64), rejects)


def read_object(line: bytes) -> dict[str, Any]:
    """The JSON object in a line, read as by json.loads, but without unpaired surrogates.

    Raises:
        UnreadableError: the line has none.
    """
    try:
        document = msgspec.json.decode(line)
    except (ValueError, RecursionError):
        document = _object_by_python(line, _as_utf8(line))
        _require_characters(json.dumps(document, ensure_ascii=False), "the object")
    return _require_object(document)


class UnreadableError(Exception):
    """A line has no readable text. See `Reject`."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason


def _text(line: bytes, decode: Callable[[bytes], Any], json_key: str) -> str:
    """The text of a line.

    Raises:
        UnreadableError: the line has none.
    """
    whole = _as_utf8(line)  # msgspec does not check the UTF-8 of strings that it skips
    try:
        text: str = decode(line).text
        return text
    except (ValueError, RecursionError):
        return _text_by_python(line, whole, json_key)


def _as_utf8(line: bytes) -> str:
    try:
        return str(line, "utf-8")
    except UnicodeDecodeError as error:
        if reason := _foreign(line):
            raise UnreadableError(NOT_JSON, reason) from error
        reason = f"byte {error.start + 1} of the line (0x{line[error.start]:02x}) is not UTF-8"
        raise UnreadableError(NOT_UTF8, reason) from error


def _object_by_python(line: bytes, whole: str) -> dict[str, Any]:
    """The object in a line that msgspec refuses, read as by Megatron-LM, with json.loads.

    Raises:
        UnreadableError: the line has none.
    """
    try:
        document: Any = json.loads(whole, parse_int=_integer)
    except (ValueError, RecursionError) as fault:
        if not line.strip():
            raise UnreadableError("empty line", "the line is empty") from fault
        raise UnreadableError(NOT_JSON, _foreign(line) or f"not valid JSON: {fault}") from fault
    return _require_object(document)


def _require_object(document: Any) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise UnreadableError("not a JSON object", f"expected a JSON object, got {_shown(document)}")
    return document


def _text_by_python(line: bytes, whole: str, json_key: str) -> str:
    """The text of a line that msgspec refuses.

    Raises:
        UnreadableError: the line has no readable text.
    """
    document = _object_by_python(line, whole)
    if json_key not in document:
        raise UnreadableError(f"missing key {json_key!r}", _missing_key(document, json_key))
    text = document[json_key]
    if not isinstance(text, str):
        raise UnreadableError(
            f"{json_key!r} is not a string", f"{json_key!r} must be a string, got {_shown(text)}"
        )
    _require_characters(text, repr(json_key))
    return text


def _require_characters(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as fault:
        character = f"\\u{ord(text[fault.start]):04x}"
        reason = f"{name} contains {character}, an unpaired surrogate, which is not a character"
        raise UnreadableError("unpaired surrogate in the text", reason) from fault


def _missing_key(document: dict[str, Any], json_key: str) -> str:
    keys = few([repr(key[:60]) for key in document], 8) or "none"
    reason = f"missing key {json_key!r} (the keys are {keys})"
    if isinstance(document.get("messages") or document.get("conversations"), list):
        return f"{reason}; for a corpus of chats, set data.corpus.chat: {{}} (--chat)"
    outer = json_key.partition(".")[0]
    if outer != json_key and isinstance(document.get(outer), dict):
        return (
            f"{reason}; keys inside {outer!r} are not read: copy the text to a key of the record itself, for example "
            f"with jq -c '.text = .{json_key}'"
        )
    return f"{reason}; set json_key to the key with the text"


def _integer(digits: str) -> float:
    """The value of an integer; infinite if it is so long that Python refuses to convert it."""
    return int(digits) if len(digits) <= _LONGEST_INTEGER else math.inf


def _is_utf8(data: bytes) -> bool:
    if data.isascii():
        return True
    view = memoryview(data)
    position = 0
    try:
        while position < len(data):
            is_last = position + _PIECE_BYTES >= len(data)
            position += codecs.utf_8_decode(view[position : position + _PIECE_BYTES], "strict", is_last)[1]
    except UnicodeDecodeError:
        return False
    return True


def _foreign(line: bytes) -> str:
    """Explains why a line is not JSON, more clearly than the parser's message; empty if nothing is known."""
    if line.lstrip().startswith(b"<"):
        return f"this looks like HTML, not JSON: {_begin(line)}"
    if line.startswith(codecs.BOM_UTF8):
        return "the line starts with a byte order mark; save the file as UTF-8 without it"
    if b"\0" in line:
        return f"byte {line.index(0) + 1} of the line is NUL: the file is damaged, or it is not UTF-8"
    return ""


def _begin(line: bytes) -> str:
    return repr(str(line[:80].lstrip()[:40], "utf-8", "replace"))


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
