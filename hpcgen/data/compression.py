"""Decompresses files of a corpus by their suffix. Damaged or truncated data is an error.

Even highly compressed data is yielded in small pieces, so a reader's memory is bounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import zstandard
from isal import isal_zlib  # decompresses 2.5 times as fast as zlib

from hpcgen.data.first_bytes import binary_suffix
from hpcgen.errors import HpcgenError

_READ_BYTES = 256 * 1024
_ZSTD_BYTES = 2 * 1024
"""Input bytes per call of zstandard. A call's output is not limited: at worst, 128 KiB for every four bytes."""
_HEADER_BYTES = 18
"""Maximum length of the header of a zstd frame."""
_MAGIC_BYTES = 4
_FIRST_BYTES = b"\x1f\x28" + bytes(range(0x50, 0x60))
"""First bytes of gzip members, zstd frames and skippable frames."""
_ZSTD_LARGEST_WINDOW = 1 << 31
"""Largest window that zstd produces; a header with a larger window is damaged."""
_GZIP_PIECE_BYTES = 1024 * 1024


class Readable(Protocol):
    """A file that may be hashed while it is read."""

    def read(self, size: int, /) -> bytes:
        """Returns at most `size` bytes; empty at the end of the file."""


def content(path: Path, source: Readable) -> Iterator[bytes]:
    """Yields the content of `source`, uncompressed according to the suffix of `path`. Reads all frames.

    Raises:
        HpcgenError: the data is damaged or truncated, does not match the suffix, or needs too much memory.
    """
    if path.suffix == ".zst":
        return _frames(path, source, _ZstdFrame)
    if path.suffix == ".gz":
        return _frames(path, source, _GzipFrame)
    return _plain(path, source)


def _plain(path: Path, source: Readable) -> Iterator[bytes]:
    is_begin = True
    while data := source.read(_READ_BYTES):
        if is_begin:
            if suffix := binary_suffix(data):
                raise HpcgenError(
                    f"the content is {suffix} data, but the name does not end in {suffix}",
                    f"add {suffix} to the name",
                    where=path,
                )
            is_begin = False
        yield data


def _frames(path: Path, source: Readable, frame_type: Any) -> Iterator[bytes]:
    """Decompresses all frames. The libraries accept a truncated frame, so this function checks that each one ends."""
    frame: Any = None
    position = begin = 0
    while data := source.read(_READ_BYTES):
        if not position and (found := _unexpected_content(path, data)):
            raise HpcgenError(found, "download it again", where=path)
        position += len(data)
        while data:
            if frame is None:
                frame, begin = frame_type(), position - len(data)
            try:
                yield from frame.pieces(data)
            except (zstandard.ZstdError, isal_zlib.error) as error:  # type: ignore[misc]  # its stub names no type
                if window := _too_large_window(frame, error):
                    long = f"--long={(window - 1).bit_length()} (a window of {window >> 20:,} MiB)"
                    reason = f"compressed with {long}, which needs too much memory to decompress"
                    raise HpcgenError(reason, "compress it again without --long", where=path) from error
                _require_frame(path, frame, begin)
                where = f"{path}: damaged {path.suffix} data before byte {position:,}"
                raise HpcgenError(f"{where}: {error}", "download it again") from error
            data = frame.rest
            if frame.is_complete:
                frame = None
    if frame is not None:
        _require_frame(path, frame, begin)
        raise HpcgenError(
            f"the {path.suffix} data is truncated at byte {position:,}", "download it again", where=path
        )


def _require_frame(path: Path, frame: Any, begin: int) -> None:
    """Refuses data after a complete frame that is not a frame. The libraries would call it damaged or truncated."""
    is_cut = len(frame.header) < _MAGIC_BYTES and frame.header[:1] in _FIRST_BYTES
    if begin and not is_cut and binary_suffix(frame.header) != path.suffix:
        raise HpcgenError(
            f"the {path.suffix} data ends at byte {begin:,}, and other data follows it",
            "remove that data, or download the file again",
            where=path,
        )


class _ZstdFrame:
    """One zstd frame or skippable frame."""

    def __init__(self) -> None:
        self._decompressor = zstandard.ZstdDecompressor().decompressobj()
        self.header = b""
        """First bytes of the frame, including the complete header."""
        self.rest = b""
        self.is_complete = False

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """Yields the content of `data` up to the end of the frame; `rest` belongs to the next one."""
        view = memoryview(data)
        self.header += data[: _HEADER_BYTES - len(self.header)]
        for begin in range(0, len(data), _ZSTD_BYTES):
            piece = self._decompressor.decompress(view[begin : begin + _ZSTD_BYTES])
            if piece:
                yield piece
            if self._decompressor.eof:
                self.is_complete = True
                used = min(begin + _ZSTD_BYTES, len(data)) - len(self._decompressor.unused_data)
                self.rest = data[used:]
                return
        self.rest = b""


class _GzipFrame:
    """One gzip member."""

    def __init__(self) -> None:
        self._decompressor = isal_zlib.decompressobj(wbits=31)
        self.header = b""
        """First bytes of the member."""
        self.rest = b""
        self.is_complete = False

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """Yields the content of `data` up to the end of the member; `rest` belongs to the next one."""
        self.header += data[: _MAGIC_BYTES - len(self.header)]
        while data and not self._decompressor.eof:
            piece = self._decompressor.decompress(data, _GZIP_PIECE_BYTES)
            data = self._decompressor.unconsumed_tail
            if piece:
                yield piece
        self.is_complete = self._decompressor.eof
        self.rest = self._decompressor.unused_data


def _too_large_window(frame: Any, error: Exception) -> int | None:
    """Window size of the frame in bytes, if the library rejected it for exceeding its limit of 128 MiB."""
    if not (isinstance(frame, _ZstdFrame) and "requires too much memory" in str(error)):
        return None
    window = zstandard.get_frame_parameters(frame.header).window_size
    return window if window <= _ZSTD_LARGEST_WINDOW else None


def _unexpected_content(path: Path, begin: bytes) -> str | None:
    """Describes the content of a file that starts with `begin`, if it contradicts the suffix."""
    if binary_suffix(begin) == path.suffix:
        return None
    if begin.lstrip()[:1] == b"<":
        return f"this looks like HTML, not {path.suffix} data: {_excerpt(begin)}"
    if begin.lstrip()[:1] == b"{":
        return f"this looks like JSON, not {path.suffix} data: {_excerpt(begin)}"
    return None


def _excerpt(begin: bytes) -> str:
    return repr(str(begin.lstrip()[:60], "utf-8", "replace"))
