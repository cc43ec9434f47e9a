from __future__ import annotations

import gzip
import io
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from hpcgen.data.compression import content
from hpcgen.errors import HpcgenError


def read(name: str, data: bytes) -> bytes:
    return b"".join(content(Path(name), io.BytesIO(data)))


def zstd(data: bytes, level: int = 3) -> bytes:
    return zstandard.ZstdCompressor(level=level, write_checksum=True).compress(data)


def gz(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


@pytest.fixture(scope="module")
def lines() -> bytes:
    rng = random.Random(1)
    return b"".join(b'{"text": "%d"}\n' % rng.getrandbits(rng.randrange(8, 800)) for _ in range(120))


Compress = Callable[[bytes], bytes]
BOTH = pytest.mark.parametrize(("name", "compress"), [("x.jsonl.zst", zstd), ("x.jsonl.gz", gz)])


@BOTH
def test_frames_one_after_another(name, compress, lines):
    thirds = [lines[:1000], b"", lines[1000:2000], lines[2000:]]
    assert read(name, b"".join(map(compress, thirds))) == lines


def test_skippable_frames_of_zstd(lines):
    skippable = b"\x50\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"abc"
    assert (
        read("x.jsonl.zst", skippable + zstd(lines[:50]) + skippable + zstd(lines[50:]) + skippable) == lines
    )


@BOTH
def test_large_frames(name, compress):
    rng = random.Random(3)
    data = b"".join(rng.randbytes(10) * rng.randrange(1, 9) for _ in range(60_000))
    assert read(name, compress(data) + compress(data[:7])) == data + data[:7]


@BOTH
def test_memory_does_not_depend_on_the_compression_ratio(name, compress):
    data = compress(b"x" * 200_000_000)
    tracemalloc.start()
    try:
        size = sum(map(len, content(Path(name), io.BytesIO(data))))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size == 200_000_000
    assert peak < 140_000_000


@BOTH
def test_a_file_cut_at_a_thousand_offsets_is_refused_at_each(name, compress, lines):
    first, second = compress(lines[: len(lines) // 2]), compress(lines[len(lines) // 2 :])
    whole = first + second
    assert len(whole) > 2_000
    for size in random.Random(4).sample(range(1, len(whole)), 1_000):
        if size == len(first):  # a file of its own: only its size in the manifest tells
            assert read(name, whole[:size]) == lines[: len(lines) // 2]
            continue
        with pytest.raises(HpcgenError, match=rf"{name}: the \.\w+ data is truncated at byte {size:,}"):
            read(name, whole[:size])


@BOTH
def test_a_thousand_flipped_bits_are_all_noticed(name, compress, lines):
    """All are noticed but those that change no byte of the content: in a file name or a time in gzip's header, say.

    Those are for the hash in the manifest (test_tokenize).
    """
    whole = compress(lines)
    harmless = 0
    for bit in random.Random(5).sample(range(8 * len(whole)), 1_000):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            assert read(name, bytes(damaged)) == lines
            assert bit < 8 * 10  # within the header
            harmless += 1
        except HpcgenError as error:
            assert name in str(error)  # noqa: PT017
    assert harmless < 10


@pytest.mark.parametrize("before", [b"", zstd(b"{}\n")])
def test_a_window_that_needs_too_much_memory_is_not_reported_as_damage(before):
    def long_frame(log: int) -> bytes:
        settings = zstandard.ZstdCompressionParameters(window_log=log, chain_log=6, hash_log=6)
        frame = zstandard.ZstdCompressor(compression_params=settings).compressobj()
        return before + frame.compress(b'{"text": "a"}\n') + frame.flush()

    assert read("a.jsonl.zst", long_frame(27)).endswith(b'{"text": "a"}\n')
    for log, size in ((28, "256"), (31, "2,048")):
        message = (
            rf"a\.jsonl\.zst: compressed with --long={log} \(a window of {size} MiB\).*; compress it again"
        )
        with pytest.raises(HpcgenError, match=message):
            read("a.jsonl.zst", long_frame(log))


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a.jsonl.zst", b"\n<!DOCTYPE html><html>404", r"this looks like HTML, not \.zst data: '<!DOCTYPE"),
        ("a.jsonl.gz", b"<html>404 Not Found</html>", r"this looks like HTML, not \.gz data: '<html>404"),
        ("a.jsonl.gz", b'{"error": "gone"}', r"this looks like JSON, not \.gz data: '{\"error\""),
        ("a.jsonl.zst", b"\x00" * 100, r"damaged \.zst data before byte 100: "),
        ("a.jsonl.gz", b"\x00" * 100, r"damaged \.gz data before byte 100: "),
        ("a.jsonl.zst", b"\x28\xb5", r"the \.zst data is truncated at byte 2"),
        ("a.jsonl", zstd(b"{}"), r"the content is \.zst data, but the name does not end in \.zst"),
        ("a.jsonl", gz(b"{}"), r"the content is \.gz data, but the name does not end in \.gz"),
        ("a.jsonl.zst", zstd(b"{}") + b"tail of something", r"the \.zst data ends at byte 15, and other"),
        ("a.jsonl.gz", gz(b"{}") + b"tail of something", r"the \.gz data ends at byte 22, and other data"),
        ("a.jsonl.zst", zstd(b"{}") + b"\n", r"the \.zst data ends at byte 15, and other data follows it"),
        ("a.jsonl.gz", gz(b"{}") + b"\n", r"the \.gz data ends at byte 22, and other data follows it"),
    ],
)
def test_content_of_another_type_is_named(name, data, reason):
    with pytest.raises(HpcgenError, match=rf"{name}: {reason}"):
        read(name, data)


def test_plain_content_is_unchanged(lines):
    assert read("a.jsonl", lines) == lines
