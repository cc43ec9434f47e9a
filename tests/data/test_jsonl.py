from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import zstandard

from hpcgen.data.jsonl import Block, read_blocks, text_reader
from hpcgen.errors import HpcgenError


def content(path: Path) -> bytes:
    return b"".join(block.data for block in read_blocks(path))


def compressed(data: bytes, level: int = 3) -> bytes:
    return zstandard.ZstdCompressor(level=level, write_checksum=True).compress(data)


@pytest.fixture
def lines() -> bytes:
    rng = random.Random(1)
    return b"".join(b'{"text": "%d"}\n' % rng.getrandbits(rng.randrange(8, 800)) for _ in range(60))


def test_blocks_are_whole_lines_and_know_where_they_start(tmp_path):
    path = tmp_path / "long.jsonl"
    # Lines around the sizes of a read and of a block, and one much longer than a block.
    sizes = [10, 262_143, 262_144, 4_194_304, 1, 12_000_000, 100, 5_000_000, 7]
    path.write_bytes(b"".join(b"x" * (size - 1) + b"\n" for size in sizes) + b"no newline at the end")
    blocks = list(read_blocks(path))
    assert content(path) == path.read_bytes()
    assert len(blocks) > 2
    for block, following in itertools.pairwise(blocks):
        assert block.data.endswith(b"\n")
        assert following.first_line == block.first_line + block.data.count(b"\n")
    assert blocks[-1].bytes_read == path.stat().st_size


def test_zstd_frames_one_after_another(tmp_path, lines):
    path = tmp_path / "frames.jsonl.zst"
    thirds = [lines[:1000], b"", lines[1000:2000], lines[2000:]]
    skippable = b"\x50\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"abc"
    path.write_bytes(skippable.join(compressed(third) for third in thirds))
    assert content(path) == lines


def test_a_cut_off_zstd_file_is_refused_wherever_it_is_cut(tmp_path, lines):
    path = tmp_path / "cut.jsonl.zst"
    first, second = compressed(lines[:2000]), compressed(lines[2000:])
    whole = first + second
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        if size == len(first):  # a file of its own: only a list of sizes could tell
            assert content(path) == lines[:2000]
            continue
        with pytest.raises(
            HpcgenError, match=r"cut\.jsonl\.zst: the (zstd data is cut off|file holds no documents)"
        ):
            content(path)


def test_flipped_bits_are_refused_or_harmless(tmp_path, lines):
    path = tmp_path / "flipped.jsonl.zst"
    whole = compressed(lines)
    rng = random.Random(2)
    for _ in range(500):
        damaged = bytearray(whole)
        damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            assert content(path) == lines  # a reserved bit of the header, say
        except HpcgenError as error:
            assert "flipped.jsonl.zst" in str(error)  # noqa: PT017


@pytest.mark.parametrize(
    "data", [b"<html>404 Not Found</html>", b"\x00" * 100, b'{"text": "not compressed"}\n']
)
def test_what_is_not_zstd_is_refused(tmp_path, data):
    path = tmp_path / "page.jsonl.zst"
    path.write_bytes(data)
    with pytest.raises(HpcgenError, match=r"page\.jsonl\.zst: damaged zstd data"):
        content(path)


@pytest.mark.parametrize("name", ["empty.jsonl", "empty.jsonl.zst"])
def test_an_empty_file_is_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(HpcgenError, match="the file holds no documents"):
        content(tmp_path / name)


def test_texts():
    first = '{"n": [1, {"text": 2}], "text": "a\\u2028b\\ud83d\\ude00"}\r\n'
    data = first + '{"text": "c\u2028d"}\n \t{"text": ""} \n'
    assert text_reader("text")(Block(Path("x"), 1, data.encode(), 0)) == ["a\u2028b😀", "c\u2028d", ""]
    assert text_reader("a b.c")(Block(Path("x"), 1, b'{"a b.c": "d", "text": 1}', 0)) == ["d"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", "the line is empty"),
        (b" \r", "the line is empty"),
        (b'{"text": "a"', "not valid JSON: Expecting ',' delimiter: line 1 column 13 (char 12)"),
        (b'{"text": "a"} {"text": "b"}', "not valid JSON: Extra data: line 1 column 15 (char 14)"),
        (b'{"text": "a\tb"}', "not valid JSON: Invalid control character at: line 1 column 12 (char 11)"),
        (b'{"text": "a", "n": NaN}', "not valid JSON: JSON is malformed: invalid character (byte 19)"),
        (b'{"text": "a", "n": ' + b"[" * 100_000, "not valid JSON: maximum recursion depth exceeded"),
        (b'{"text": "a\xff"}', "byte 12 of the line (0xff) is not UTF-8"),
        (b'{"text": "a", "n": "\xed\xa0\x80"}', "byte 21 of the line (0xed) is not UTF-8"),
        (b'{"text": "\\ud800"}', r"\ud800 is half of a surrogate pair, which is no character"),
        (b'{"text": "a\\ud83d\\u0041"}', r"\ud83d is half of a surrogate pair"),
        (b'{"text": "a", "n": "\\udfff b"}', r"\udfff is half of a surrogate pair"),
        (b'["text"]', 'expected a JSON object, got ["text"]'),
        (b'"text"', 'expected a JSON object, got "text"'),
        (
            b'{"content": "a", "id": 1}',
            "no key 'text' among 'content', 'id'; name the right one (--json-key)",
        ),
        (b"{}", "no key 'text' among none; name the right one (--json-key)"),
        (b'{"text": null}', "'text' must be a string, got null"),
        (b'{"text": ["a", "b"]}', """'text' must be a string, got ["a", "b"]"""),
    ],
)
def test_a_bad_line_is_named_with_its_reason(line, reason):
    block = Block(Path("d/x.jsonl"), 40, b'{"text": "good"}\n' + line + b'\n{"text": "good"}\n', 0)
    with pytest.raises(HpcgenError) as raised:
        text_reader("text")(block)
    assert str(raised.value).startswith(f"d/x.jsonl:41: {reason}")
