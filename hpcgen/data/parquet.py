"""Reads the documents of Parquet files: one document per row, in batches of bounded size.

A Parquet file is read at several places, because its index is at the end. Its SHA-256 needs all bytes in order. The
hash therefore runs one row group ahead of the reader, so that both need only one pass over the disk.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hpcgen.data.jsonl import LONGEST_LINE, Reject, Texts
from hpcgen.errors import HpcgenError
from hpcgen.text import few

if TYPE_CHECKING:
    from hpcgen.data.hashed_files import CheckedFile

_BLOCK_BYTES = 4 * 1024 * 1024
_READ_BYTES = 1024 * 1024
_SHOWN_BYTES = 200
"""Bytes of an overlong text that are kept for messages."""
_MAX_ROWS = 16384
"""Maximum number of rows to decode at once, for columns that are much larger than their encoding."""


@dataclass(frozen=True)
class Rows:
    """Texts of consecutive rows of one file. The counterpart of `jsonl.Block`."""

    path: Path
    first_line: int
    """Number of the first row, counted from 0."""
    texts: Any
    """Array of the type large_binary: the texts in UTF-8, or null."""

    @property
    def num_lines(self) -> int:
        """Number of rows."""
        return len(self.texts)

    @property
    def num_bytes(self) -> int:
        """Size of all texts in bytes."""
        offsets = _offsets(self.texts)
        return int(offsets[-1] - offsets[0])

    def read(self) -> Texts:
        """Decodes the texts. Rejects rows that are null, too long or not UTF-8."""
        if self.texts.null_count == 0 and self.num_bytes <= LONGEST_LINE:
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
            try:
                if value.is_valid and len(value.as_buffer()) <= LONGEST_LINE:
                    texts.append(str(value.as_buffer(), "utf-8"))
                    numbers.append(number)
                    continue
                rejects.append(_rejected(self.path, number, value))
            except UnicodeDecodeError as error:
                reason = (
                    f"byte {error.start + 1} of the text (0x{error.object[error.start]:02x}) is not UTF-8"
                )
                rejects.append(Reject(self.path, number, reason, value.as_py()))
        return Texts(texts, np.asarray(numbers, np.int64), rejects)


def _rejected(path: Path, number: int, value: Any) -> Reject:
    """Describes a text that is null or too long."""
    if not value.is_valid:
        return Reject(path, number, "the text is null", b"")
    size = len(value.as_buffer())
    begin = value.as_buffer()[:_SHOWN_BYTES].to_pybytes()
    begin = str(begin, "utf-8", "ignore").encode()  # drops a cut character at the end
    reason = f"the text has {size:,} bytes, more than the maximum of {LONGEST_LINE:,}"
    return Reject(path, number, reason, begin, is_complete=False)


def read_rows(path: Path, source: CheckedFile, column: str) -> Iterator[Rows]:
    """Yields the texts under `column` in blocks of about 4 MiB.

    Memory does not depend on the size of row groups. It does depend on the size of the file's pages, about 1 MiB.

    Raises:
        HpcgenError: the file has no rows or no such column of strings, or it is damaged or truncated.
    """
    file = _open(path, source)
    column_type = _require_text(path, file.schema_arrow, column)
    line = 0
    for batch in _batches(path, source, file, [column]):
        array = batch.column(0)
        if pa.types.is_dictionary(column_type):
            array = array.dictionary_decode()
        array = array.cast(pa.large_binary())
        for begin, end in _pieces(_offsets(array)):
            yield Rows(path, line + begin, array.slice(begin, end - begin))
        line += len(array)


def json_lines(path: Path, source: CheckedFile) -> Iterator[bytes]:
    """Yields all rows as JSON Lines, with all columns. Values that JSON lacks, such as intervals, become strings.

    Raises:
        HpcgenError: the file has no rows, is damaged or truncated, or a string is not UTF-8.
    """
    encoder = msgspec.json.Encoder(enc_hook=str)
    file = _open(path, source)
    line = 0
    for batch in _batches(path, source, file, file.schema_arrow.names):
        try:
            rows = batch.to_pylist()
        except UnicodeDecodeError as error:
            raise HpcgenError(
                f"{path}: rows {line + 1:,} to {line + len(batch):,} have a string that is not UTF-8: {error}",
                "use prepare with bad_documents: skip, or correct the file",
            ) from error
        yield encoder.encode_lines(rows)
        line += len(batch)


def _open(path: Path, source: CheckedFile) -> Any:
    """Reads the index of the file."""
    try:
        file = pq.ParquetFile(
            _PositionedFile(source),
            pre_buffer=False,
            buffer_size=_READ_BYTES,  # otherwise it would read the column of a row group at once
            page_checksum_verification=True,
        )
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, error) from error
    if not file.metadata.num_rows:
        raise HpcgenError(
            f"{path}: the file has no rows", "remove it, or exclude it with data.corpus.include"
        )
    return file


def _require_text(path: Path, schema: Any, column: str) -> Any:
    """Returns the type of the column with the text, a string type or a dictionary of strings.

    Raises:
        HpcgenError: the column is missing, ambiguous or of another type.
    """
    if (count := schema.names.count(column)) != 1:
        found = f"{count} columns {column!r}" if count else f"no column {column!r}"
        raise HpcgenError(
            f"{path}: the file has {found} (its columns are {few([repr(name) for name in schema.names])})",
            "set json_key to the one with the text",
        )
    column_type = schema.field(column).type
    values = column_type.value_type if pa.types.is_dictionary(column_type) else column_type
    if not (
        pa.types.is_string(values) or pa.types.is_large_string(values) or pa.types.is_string_view(values)
    ):
        strings = [field.name for field in schema if pa.types.is_string(field.type)]
        hint = f"set json_key to a column of strings ({few([repr(name) for name in strings])})"
        raise HpcgenError(
            f"{path}: column {column!r} has the type {column_type}, not string",
            hint if strings else "convert the column to strings",
        )
    return column_type


def _batches(path: Path, source: CheckedFile, file: Any, columns: Sequence[str]) -> Iterator[Any]:
    """Yields the rows of `columns` in batches of about 4 MiB, and hashes all bytes of `source` in order."""
    line = 0
    try:
        for group in range(file.metadata.num_row_groups):
            end, rows = _extent(file.metadata.row_group(group), set(columns))
            _hash_to(source, end)
            for batch in file.iter_batches(rows, row_groups=[group], columns=columns, use_threads=False):
                yield batch
                line += len(batch)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, error, f" after row {line:,}") from error
    _hash_to(source, source.size)
    if line != file.metadata.num_rows:
        raise HpcgenError(
            f"{path}: the file has {line:,} rows, but its index has {file.metadata.num_rows:,}",
            "download it again",
        )


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


def _hash_to(source: CheckedFile, end: int) -> None:
    """Adds the bytes of `source` up to the offset `end` to its hash, by reading them."""
    while source.tell() < end and source.read(min(_READ_BYTES, end - source.tell())):
        pass


def _pieces(offsets: Any) -> Iterator[tuple[int, int]]:
    """Yields ranges of texts that have at most 4 MiB together. A longer text has a range of its own."""
    begin = 0
    while begin < len(offsets) - 1:
        end = int(np.searchsorted(offsets, offsets[begin] + _BLOCK_BYTES, side="right")) - 1
        end = max(end, begin + 1)
        yield begin, end
        begin = end


def _offsets(array: Any) -> Any:
    """Offsets of the texts in an array of the type large_binary: [number of texts + 1]."""
    return np.frombuffer(array.buffers()[1], np.int64)[array.offset : array.offset + len(array) + 1]


def _damaged(path: Path, error: Exception, where: str = "") -> HpcgenError:
    reason = str(error).strip().partition("\n")[0]
    if isinstance(error, pa.ArrowNotImplementedError):
        return HpcgenError(
            f"{path}: the file cannot be read{where}: {reason}",
            "write it again with another compression or encoding",
        )
    return HpcgenError(f"{path}: damaged or truncated Parquet data{where}: {reason}", "download it again")


class _PositionedFile(io.RawIOBase):
    """Random access to a `CheckedFile`. Does not affect its hash."""

    def __init__(self, source: CheckedFile) -> None:
        self._source = source
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
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._source.size}[whence]
        self._position = start + offset
        return self._position

    def read(self, size: int = -1, /) -> bytes:
        """Returns at most `size` bytes."""
        data = self._source.read_at(self._position, self._source.size if size < 0 else size)
        self._position += len(data)
        return data
