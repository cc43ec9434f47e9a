"""Reads JSON Lines, plain or zstd-compressed, in blocks of whole lines, and takes the text out of each line.

Lines end at "\\n" and nowhere else: U+2028 and its like are ordinary characters of a JSON string.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import zstandard

from hpcgen.errors import HpcgenError

SUFFIXES = (".jsonl", ".jsonl.zst")
_READ_BYTES = 256 * 1024
_BLOCK_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class Block:
    """Consecutive whole lines of one file, and how many bytes of the file on disk were read to get them."""

    path: Path
    first_line: int
    data: bytes
    bytes_read: int


def input_size(path: Path) -> int:
    """Bytes on disk of an input, once it is known to be readable and to have a suffix that we know.

    Raises:
        HpcgenError: it is not.
    """
    if not path.name.endswith(SUFFIXES):
        raise HpcgenError(f"{path}: the name must end in {' or '.join(SUFFIXES)}")
    try:
        with path.open("rb") as file:
            return file.seek(0, os.SEEK_END)
    except OSError as error:
        raise HpcgenError(f"cannot read {path}: {error.strerror}") from error


def read_blocks(path: Path) -> Iterator[Block]:
    """The lines of a file in blocks of about 4 MiB; a line that is longer makes a longer block.

    Raises:
        HpcgenError: the file cannot be read, is empty, or is zstd data that is damaged or cut off.
    """
    parts: list[bytes] = []
    size, line, bytes_read = 0, 1, 0
    for chunk, bytes_read in _chunks(path):
        end = chunk.rfind(b"\n") + 1
        parts.append(chunk)
        size += len(chunk)
        if end and size >= _BLOCK_BYTES:
            parts[-1] = chunk[:end]
            data = b"".join(parts)
            yield Block(path, line, data, bytes_read)
            line += data.count(b"\n")
            parts = [chunk[end:]]
            size = len(parts[0])
    if size:
        yield Block(path, line, b"".join(parts), bytes_read)
    elif line == 1:
        raise HpcgenError(f"{path}: the file holds no documents (it is empty)", "remove it or fetch it again")


def text_reader(json_key: str) -> Callable[[Block], list[str]]:
    """A function that gives the text under `json_key` of every line of a block; threads may share it.

    It raises HpcgenError with file and line for what is not UTF-8, not JSON, or has no string there.
    """
    record: Any = msgspec.defstruct("Record", [("text", str)], rename={"text": json_key})
    decode = msgspec.json.Decoder(record).decode

    def texts(block: Block) -> list[str]:
        found = []
        for number, line in enumerate(block.data.removesuffix(b"\n").split(b"\n"), block.first_line):
            try:
                # As str first: msgspec does not look at the bytes of the strings that it skips.
                found.append(decode(str(line, "utf-8")).text)
            except (ValueError, RecursionError) as error:
                raise HpcgenError(f"{block.path}:{number}: {_reason(line, json_key, error)}") from error
        return found

    return texts


def _chunks(path: Path) -> Iterator[tuple[bytes, int]]:
    """Pieces of the uncompressed content, each with the number of bytes read from disk so far."""
    try:
        with path.open("rb") as file:
            yield from _zstd_chunks(path, file) if path.suffix == ".zst" else _plain_chunks(file)
    except OSError as error:
        raise HpcgenError(f"cannot read {path}: {error.strerror}") from error


def _plain_chunks(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    while chunk := file.read(_READ_BYTES):
        yield chunk, file.tell()


def _zstd_chunks(path: Path, file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Decompresses frame after frame. zstandard accepts a cut-off one, so we watch for the end of each."""
    frame = None
    while data := file.read(_READ_BYTES):
        while data:
            if frame is None:
                frame = zstandard.ZstdDecompressor().decompressobj()
            try:
                chunk = frame.decompress(data)
            except zstandard.ZstdError as error:
                where = f"{path}: damaged zstd data before byte {file.tell()}"
                raise HpcgenError(f"{where}: {error}", "fetch it again") from error
            data = frame.unused_data if frame.eof else b""
            if frame.eof:
                frame = None
            if chunk:
                yield chunk, file.tell()
    if frame is not None:
        raise HpcgenError(f"{path}: the zstd data is cut off at byte {file.tell()}", "fetch it again")


def _reason(line: bytes, json_key: str, error: Exception) -> str:
    """Says what is wrong with a line that was refused, more plainly than the parser's own message does."""
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start + 1} of the line (0x{line[error.start]:02x}) is not UTF-8"
    if not line.strip():
        return "the line is empty"
    try:
        document: Any = json.loads(line)
    except (ValueError, RecursionError) as fault:
        return f"not valid JSON: {fault}"
    if not isinstance(document, dict):
        return f"expected a JSON object, got {_shown(document)}"
    if json_key not in document:
        keys = ", ".join(map(repr, document)) or "none"
        return f"no key {json_key!r} among {keys}; name the right one (--json-key)"
    if not isinstance(document[json_key], str):
        return f"{json_key!r} must be a string, got {_shown(document[json_key])}"
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError as fault:
        return f"\\u{ord(fault.object[fault.start]):04x} is half of a surrogate pair, which is no character"
    return f"not valid JSON: {error}"


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
