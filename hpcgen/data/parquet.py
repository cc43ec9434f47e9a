"""Reads the documents of Parquet files: one document per row, in batches of bounded size.

A Parquet file is read at several places, because its index is at the end. Its SHA-256 needs all bytes in order. The
hash therefore runs one row group ahead of the reader, so that both need only one pass over the disk.

Decoding runs in a process with limited memory (hpcgen.data.confined), since a small file can hold very much: a long
text that a dictionary repeats, a page of zeros. The functions that run there get a file descriptor.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hpcgen.data.confined import confined, is_out_of_memory
from hpcgen.data.jsonl import LONGEST_LINE, NOT_UTF8, TOO_LONG, Reject, Texts
from hpcgen.errors import HpcgenError
from hpcgen.text import few
from trainer.chats.chat import MESSAGES, without_nulls

if TYPE_CHECKING:
    from hpcgen.data.hashed_files import CheckedFile

_BLOCK_BYTES = 4 * 1024 * 1024
_READ_BYTES = 1024 * 1024
_SHOWN_BYTES = 200
"""Bytes of an overlong text that are kept for messages."""
_MAX_ROWS = 16384
"""Maximum number of rows to decode at once."""
_FEWER = 16
"""Divisor of the number of rows after decoding needed too much memory."""


@dataclass(frozen=True)
class Rows:
    """Texts of consecutive rows of one file. The counterpart of `jsonl.Block`."""

    path: Path
    first_line: int
    """Number of the first row, counted from 0."""
    texts: Any
    """Array of the type large_binary: the texts in UTF-8, or null."""
    too_long: Reject | None = None
    """The only row if its text is longer than LONGEST_LINE; `texts` is then empty."""
    left_out: int = 0
    """Bytes of the overlong text."""

    @property
    def num_lines(self) -> int:
        """Number of rows."""
        return len(self.texts) + (self.too_long is not None)

    @property
    def num_bytes(self) -> int:
        """Size of all texts in bytes, including an overlong one."""
        offsets = _offsets(self.texts)
        return int(offsets[-1] - offsets[0]) + self.left_out

    def read(self) -> Texts:
        """Decodes the texts. Rejects rows that are null, too long or not UTF-8."""
        if self.too_long is not None:
            return Texts([], np.empty(0, np.int64), [self.too_long])
        if self.texts.null_count == 0:
            try:
                texts = self.texts.cast(pa.large_string()).to_pylist()
                return Texts(texts, np.arange(self.first_line, self.first_line + len(texts)), [])
            except pa.ArrowInvalid:
                pass  # a text is not UTF-8
        return self._good_texts()

    def _good_texts(self) -> Texts:
        """Decodes row by row. Returns the valid texts, and the reasons for rejecting the others."""
        texts, numbers, rejects = list[str](), list[int](), list[Reject]()
        for number, value in enumerate(self.texts, self.first_line):
            if not value.is_valid:
                rejects.append(Reject(self.path, number, "null", "the text is null", b""))
                continue
            try:
                texts.append(str(value.as_buffer(), "utf-8"))
                numbers.append(number)
            except UnicodeDecodeError as error:
                reason = (
                    f"byte {error.start + 1} of the text (0x{error.object[error.start]:02x}) is not UTF-8"
                )
                rejects.append(Reject(self.path, number, NOT_UTF8, reason, value.as_py()))
        return Texts(texts, np.asarray(numbers, np.int64), rejects)


@dataclass(frozen=True)
class _Piece:
    """Texts of consecutive rows, or one overlong text, as the reading process sends them."""

    texts: bytes
    """Arrow record batch of the schema _TEXTS."""
    begin: bytes = b""
    """The first bytes of an overlong text."""
    size: int = 0
    """Bytes of the overlong text; 0 if there is none."""


_TEXTS = pa.schema([("text", pa.large_binary())])


def read_rows(path: Path, source: CheckedFile, column: str) -> Iterator[Rows]:
    """Yields the texts under `column` in blocks of about 4 MiB. Each longer text has a block of its own.

    Raises:
        HpcgenError: the file has no rows or no such column of strings, it is damaged or truncated, or decoding it needs
            more memory than `confined` allows.
    """
    line = 0
    for end, piece in confined(str(path), _pieces_of_file, source.fileno(), path, column):
        _hash_to(source, end)
        texts = pa.ipc.read_record_batch(pa.py_buffer(piece.texts), _TEXTS).column(0)
        too_long = _too_long(path, line, piece) if piece.size else None
        rows = Rows(path, line, texts, too_long, piece.size)
        yield rows
        line += rows.num_lines
    _hash_to(source, source.size)


def chat_lines(path: Path, source: CheckedFile) -> Iterator[bytes]:
    """Yields all rows as JSON Lines without keys whose value is null: structs of a column have the keys of all rows.

    Raises:
        HpcgenError: as in `json_lines`.
    """
    for lines in json_lines(path, source, MESSAGES):
        rows = map(msgspec.json.decode, lines.splitlines())
        yield b"".join(msgspec.json.encode(without_nulls(row)) + b"\n" for row in rows)


def json_lines(path: Path, source: CheckedFile, column: str) -> Iterator[bytes]:
    """Yields all rows as JSON Lines, with all columns. Values that JSON lacks, such as intervals, become strings.

    Bytes become text, or base64 if they are not UTF-8. In `column`, which has the text, bytes that are not UTF-8 are an
    error.

    Raises:
        HpcgenError: the file has no rows, is damaged or truncated, a string is not UTF-8, or decoding it needs more
            memory than `confined` allows.
    """
    for end, chunk in confined(str(path), _lines_of_file, source.fileno(), path, column):
        _hash_to(source, end)
        yield chunk
    _hash_to(source, source.size)


def _too_long(path: Path, number: int, piece: _Piece) -> Reject:
    begin = str(piece.begin, "utf-8", "ignore").encode()  # drops a cut character at the end
    reason = f"the text has {piece.size:,} bytes, more than the maximum of {LONGEST_LINE:,}"
    return Reject(path, number, TOO_LONG, reason, begin, is_complete=False)


def _hash_to(source: CheckedFile, end: int) -> None:
    """Adds the bytes of `source` up to the offset `end` to its hash, by reading them."""
    while source.tell() < end and source.read(min(_READ_BYTES, end - source.tell())):
        pass


def _offsets(array: Any) -> Any:
    """Offsets of the texts in an array of the type large_binary: [number of texts + 1]."""
    if not len(array):  # such an array may have no buffer
        return np.zeros(1, np.int64)
    return np.frombuffer(array.buffers()[1], np.int64)[array.offset : array.offset + len(array) + 1]


def _pieces_of_file(descriptor: int, path: Path, column: str) -> Iterator[tuple[int, _Piece]]:
    """Yields the texts in pieces, each with the offset at which its row group ends."""
    file = _open(path, descriptor)
    _require_text(path, file.schema_arrow, column)
    return _decoded(path, file, [column], lambda batch, line: _pieces(batch.column(0)))


def _lines_of_file(descriptor: int, path: Path, column: str) -> Iterator[tuple[int, bytes]]:
    """Yields JSON Lines in pieces, each with the offset at which its row group ends."""
    encoder = msgspec.json.Encoder(enc_hook=str)
    file = _open(path, descriptor)
    of_bytes = [field.name for field in file.schema_arrow if _is_text(field.type, _BYTES)]

    def encoded(batch: Any, line: int) -> Iterator[bytes]:
        try:
            rows = batch.to_pylist()
            for row in rows if of_bytes else ():
                row |= {name: _text_of(row[name], name == column) for name in of_bytes}
        except UnicodeDecodeError as error:
            raise HpcgenError(
                f"rows {line + 1:,} to {line + len(batch):,} have a string that is not UTF-8: {error}",
                "use prepare with bad_documents: skip, or correct the file",
                where=path,
            ) from error
        return _joined(encoder.encode(row) + b"\n" for row in rows)

    return _decoded(path, file, file.schema_arrow.names, encoded)


def _text_of(value: bytes | None, is_required: bool) -> str | bytes | None:
    """The bytes decoded as UTF-8; the bytes themselves if they are not UTF-8.

    Raises:
        UnicodeDecodeError: they are none, and a text is required.
    """
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        if is_required:
            raise
        return value


def _joined(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the lines in pieces of about 4 MiB."""
    begun = bytearray()
    for line in lines:
        begun += line
        if len(begun) >= _BLOCK_BYTES:
            yield bytes(begun)
            begun.clear()
    if begun:
        yield bytes(begun)


def _open(path: Path, descriptor: int) -> Any:
    """Reads the index of the file."""
    try:
        file = pq.ParquetFile(
            _PositionedFile(path, descriptor),
            pre_buffer=False,
            buffer_size=_READ_BYTES,  # otherwise it would read the column of a row group at once
            page_checksum_verification=True,
        )
    except (pa.ArrowException, MemoryError, OSError) as error:
        raise _refusal(path, error) from error
    if not file.metadata.num_rows:
        raise HpcgenError(
            "the file has no rows", "remove it, or exclude it with data.corpus.include", where=path
        )
    return file


def _require_text(path: Path, schema: Any, column: str) -> None:
    """Checks the type of the column with the text: strings, bytes, or a dictionary of them.

    Raises:
        HpcgenError: the column is missing, ambiguous or of another type.
    """
    if (count := schema.names.count(column)) != 1:
        found = f"{count} columns {column!r}" if count else f"no column {column!r}"
        raise HpcgenError(
            f"the file has {found} (its columns are {few([repr(name) for name in schema.names])})",
            "set json_key to the column with the text",
            where=path,
        )
    column_type = schema.field(column).type
    if not _is_text(column_type):
        strings = [field.name for field in schema if _is_text(field.type)]
        hint = f"set json_key to a column of strings ({few([repr(name) for name in strings])})"
        raise HpcgenError(
            f"column {column!r} has the type {column_type}, not string",
            hint if strings else "convert the column to strings",
            where=path,
        )


_STRINGS = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
_BYTES = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)


def _is_text(column_type: Any, kinds: Sequence[Callable[[Any], bool]] = (*_STRINGS, *_BYTES)) -> bool:
    """Returns whether values of the type can be texts. Some programs write strings as bytes without a type."""
    values = column_type.value_type if pa.types.is_dictionary(column_type) else column_type
    return any(is_kind(values) for is_kind in kinds)


def _decoded(
    path: Path, file: Any, columns: Sequence[str], convert: Callable[[Any, int], Iterator[Any]]
) -> Iterator[tuple[int, Any]]:
    """Yields the items that `convert` makes of each batch of `columns`, with the offset at which its row group ends.

    `convert` gets the number of the batch's first row. If a batch needs too much memory, this batch and all later ones
    are read with fewer rows.
    """
    line, rows = 0, _MAX_ROWS
    for index in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(index)
        end, fitting = _extent(group, set(columns))
        rows, first = min(rows, fitting), line
        while line < first + group.num_rows:
            try:
                for batch, number in _batches(file, index, columns, rows, first, line):
                    yield from ((end, item) for item in convert(batch, number))
                    line = number + len(batch)
                break
            except (pa.ArrowException, MemoryError, OSError) as error:
                if rows == 1 or not is_out_of_memory(error):
                    raise _refusal(path, error, f" after row {line:,}") from error
                rows = max(1, rows // _FEWER)
    if line != file.metadata.num_rows:
        raise HpcgenError(
            f"the file has {line:,} rows, but its index has {file.metadata.num_rows:,}",
            "download it again",
            where=path,
        )


def _batches(
    file: Any, group: int, columns: Sequence[str], rows: int, first: int, done: int
) -> Iterator[tuple[Any, int]]:
    """Yields the batches of a row group, which starts at row `first`, from row `done` on, each with its first row."""
    number = first
    for batch in file.iter_batches(rows, row_groups=[group], columns=columns, use_threads=False):
        skipped = min(max(done - number, 0), len(batch))
        if skipped < len(batch):
            yield batch.slice(skipped), number + skipped
        number += len(batch)


def _extent(group: Any, columns: set[str]) -> tuple[int, int]:
    """Returns the offset at which a row group ends, and the number of its rows that take about 4 MiB."""
    end = size = 0
    for index in range(group.num_columns):
        column = group.column(index)
        begin = column.dictionary_page_offset or column.data_page_offset
        end = max(end, begin + column.total_compressed_size)
        if column.path_in_schema.partition(".")[0] in columns or column.path_in_schema in columns:
            size += column.total_uncompressed_size
    rows = _BLOCK_BYTES * group.num_rows // max(size, 1)
    return end, min(max(rows, 1), _MAX_ROWS)


def _pieces(texts: Any) -> Iterator[_Piece]:
    """Yields texts that have at most 4 MiB together. A longer text has a piece of its own."""
    ends = np.cumsum(_sizes(texts))
    begin = before = 0
    while begin < len(ends):
        end = int(np.searchsorted(ends, before + _BLOCK_BYTES, side="right"))
        end = max(end, begin + 1)
        size = int(ends[end - 1]) - before
        if size > LONGEST_LINE:
            start = texts[begin].as_buffer()[:_SHOWN_BYTES].to_pybytes()
            yield _Piece(_serialized(texts[:0]), start, size)
        else:
            yield _Piece(_serialized(texts[begin:end]))
        begin, before = end, int(ends[end - 1])


def _sizes(texts: Any) -> Any:
    """Bytes of each text. Dictionaries are not decoded for that."""
    if pa.types.is_dictionary(texts.type):
        sizes = _sizes(texts.dictionary)
        return (
            sizes[texts.indices.fill_null(0).to_numpy(zero_copy_only=False)]
            if len(sizes)
            else np.zeros(len(texts), np.int64)
        )
    return pc.binary_length(texts.cast(pa.large_binary())).fill_null(0).to_numpy(zero_copy_only=False)


def _serialized(texts: Any) -> bytes:
    if pa.types.is_dictionary(texts.type):
        texts = texts.dictionary_decode()
    batch = pa.record_batch([texts.cast(pa.large_binary())], schema=_TEXTS)
    return bytes(batch.serialize())


def _refusal(path: Path, error: Exception, where: str = "") -> HpcgenError | MemoryError:
    if is_out_of_memory(error):
        return MemoryError(f"{path}: decoding the Parquet data{where}")
    reason = str(error).strip().partition("\n")[0]
    if isinstance(error, pa.ArrowNotImplementedError):
        return HpcgenError(
            f"the file cannot be read{where}: {reason}",
            "write it again with another compression or encoding",
            where=path,
        )
    return HpcgenError(f"damaged or truncated Parquet data{where}: {reason}", "download it again", where=path)


class _PositionedFile(io.RawIOBase):
    """Random access to a file whose descriptor has a position that another process uses."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor
        self._size = os.fstat(descriptor).st_size
        self._position = 0

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def tell(self) -> int:
        """Position in bytes."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Moves to another position."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = start + offset
        return self._position

    def read(self, size: int = -1, /) -> bytes:
        """Returns at most `size` bytes."""
        try:
            data = os.pread(self._descriptor, self._size if size < 0 else size, self._position)
        except OSError as error:
            raise HpcgenError(f"cannot read {self._path}: {error.strerror}") from error
        self._position += len(data)
        return data
