"""The content of a corpus's file, uncompressed as its name says; what is damaged or cut off is an error.

It comes in pieces that are never large, however well the file is compressed: a reader's memory is bounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import zstandard
from isal import isal_zlib  # uncompresses 2.5 times as fast as zlib

from hpcgen.errors import HpcgenError

SUFFIXES = (".jsonl", ".jsonl.zst", ".jsonl.gz")
_READ_BYTES = 256 * 1024
_ZSTD_BYTES = 2 * 1024
"""Fed to zstandard at once. It has no limit on what it gives back: 128 KiB for each four bytes at the worst."""
_ZSTD_HEADER_BYTES = 18
"""The longest header of a frame."""
_ZSTD_LARGEST_WINDOW = 1 << 31
"""That zstd makes; a header that asks for more is damaged."""
_GZIP_PIECE_BYTES = 1024 * 1024
_MAGIC = {b"\x28\xb5\x2f\xfd": ".zst", b"\x1f\x8b": ".gz"}


class Readable(Protocol):
    """What is read of: a file, or one that is hashed as it is read."""

    def read(self, size: int, /) -> bytes:
        """At most that many bytes, none at the end."""


def content(path: Path, source: Readable) -> Iterator[bytes]:
    """The content of `source`, uncompressed as the suffix of `path` says, to the very end: frame after frame.

    Raises:
        HpcgenError: the data is damaged or cut off, is something else than the suffix says, or takes too much memory
            to uncompress.
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
            for magic, suffix in _MAGIC.items():
                if data.startswith(magic):
                    raise HpcgenError(
                        f"{path}: this is compressed ({suffix}), which its name does not say", "rename it"
                    )
            is_begin = False
        yield data


def _frames(path: Path, source: Readable, frame_type: Any) -> Iterator[bytes]:
    """Uncompresses frame after frame. The libraries accept a cut-off one, so we watch for the end of each."""
    frame: Any = None
    position = 0
    while data := source.read(_READ_BYTES):
        if not position and (found := _something_else(path, data)):
            raise HpcgenError(f"{path}: {found}", "fetch it again")
        position += len(data)
        while data:
            frame = frame or frame_type()
            try:
                yield from frame.pieces(data)
            except (zstandard.ZstdError, isal_zlib.error) as error:  # type: ignore[misc]  # its stub names no type
                if window := _too_large_window(frame, error):
                    long = f"--long={(window - 1).bit_length()} (a window of {window >> 20:,} MiB)"
                    reason = f"compressed with {long}, which takes too much memory to uncompress"
                    raise HpcgenError(f"{path}: {reason}", "compress it again without --long") from error
                where = f"{path}: damaged {path.suffix} data before byte {position:,}"
                raise HpcgenError(f"{where}: {error}", "fetch it again") from error
            data = frame.rest
            if frame.is_whole:
                frame = None
    if frame is not None:
        raise HpcgenError(f"{path}: the {path.suffix} data is cut off at byte {position:,}", "fetch it again")


class _ZstdFrame:
    """One frame of zstd, or one skippable frame, to come."""

    def __init__(self) -> None:
        self._decompressor = zstandard.ZstdDecompressor().decompressobj()
        self.header = b""
        """Its first bytes, the whole header among them."""
        self.rest = b""
        self.is_whole = False

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """The content of `data`, as far as the frame reaches; the `rest` belongs to the next one."""
        view = memoryview(data)
        self.header += data[: _ZSTD_HEADER_BYTES - len(self.header)]
        for begin in range(0, len(data), _ZSTD_BYTES):
            piece = self._decompressor.decompress(view[begin : begin + _ZSTD_BYTES])
            if piece:
                yield piece
            if self._decompressor.eof:
                self.is_whole = True
                used = min(begin + _ZSTD_BYTES, len(data)) - len(self._decompressor.unused_data)
                self.rest = data[used:]
                return
        self.rest = b""


class _GzipFrame:
    """One member of gzip to come."""

    def __init__(self) -> None:
        self._decompressor = isal_zlib.decompressobj(wbits=31)
        self.rest = b""
        self.is_whole = False

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """The content of `data`, as far as the member reaches; the `rest` belongs to the next one."""
        while data and not self._decompressor.eof:
            piece = self._decompressor.decompress(data, _GZIP_PIECE_BYTES)
            data = self._decompressor.unconsumed_tail
            if piece:
                yield piece
        self.is_whole = self._decompressor.eof
        self.rest = self._decompressor.unused_data


def _too_large_window(frame: Any, error: Exception) -> int | None:
    """Bytes that the frame needs in memory at once, where that is why it was refused (128 MiB is the limit)."""
    if not (isinstance(frame, _ZstdFrame) and "requires too much memory" in str(error)):
        return None
    window = zstandard.get_frame_parameters(frame.header).window_size
    return window if window <= _ZSTD_LARGEST_WINDOW else None


def _something_else(path: Path, begin: bytes) -> str | None:
    """What a file is that begins like this, when it is not what its suffix says."""
    if any(begin.startswith(magic) and suffix == path.suffix for magic, suffix in _MAGIC.items()):
        return None
    if begin.lstrip()[:1] == b"<":
        return f"this looks like HTML, not {path.suffix} data: {_shown(begin)}"
    if begin.lstrip()[:1] == b"{":
        return f"this looks like JSON, not {path.suffix} data: {_shown(begin)}"
    return None


def _shown(begin: bytes) -> str:
    return repr(str(begin.lstrip()[:60], "utf-8", "replace"))
