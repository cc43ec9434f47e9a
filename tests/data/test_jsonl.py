from __future__ import annotations

import itertools
import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcgen.data import jsonl
from hpcgen.data.jsonl import Block, read_blocks, text_reader
from hpcgen.errors import HpcgenError


def blocks_of(data: bytes, piece: int = 1000) -> list[Block]:
    pieces = (data[begin : begin + piece] for begin in range(0, len(data), piece))
    return list(read_blocks(Path("d/x.jsonl"), pieces))


def block_of(data: bytes) -> Block:
    (block,) = blocks_of(data, len(data))
    return block


@pytest.mark.parametrize("piece", [100_000, 262_144, 5_000_000])
def test_blocks_are_complete_lines_and_know_their_offsets(piece):
    # Lines around the size of a block, and one much longer.
    sizes = [10, 262_143, 262_144, 4_194_304, 1, 12_000_000, 100, 5_000_000, 7]
    data = b"".join(b"x" * (size - 1) + b"\n" for size in sizes) + b"no newline at the end"
    blocks = blocks_of(data, piece)
    assert b"".join(block.data for block in blocks) == data + b"\n"
    assert len(blocks) > 2
    assert sum(block.num_lines for block in blocks) == len(sizes) + 1
    for block, following in itertools.pairwise(blocks):
        assert following.first_line == block.first_line + block.data.count(b"\n")


def test_an_empty_file_is_refused():
    with pytest.raises(HpcgenError, match=r"d/x\.jsonl: the file is empty"):
        blocks_of(b"")


LONGEST = jsonl.LONGEST_LINE
GOOD = b'{"text": "a"}'


@pytest.mark.parametrize("piece", [1_000_003, 4_194_304, 200_000_000])
@pytest.mark.parametrize("last_newline", [b"", b"\n"])
def test_the_length_of_each_line_decides_wherever_a_piece_ends(piece, last_newline):
    sizes = [LONGEST + 1, LONGEST, 5, LONGEST + 1]
    begin = "{é".encode()
    lines = [GOOD, *(begin + b"x" * (size - len(begin)) for size in sizes), GOOD, begin + b"y" * 30_000_000]
    found = []
    for block in blocks_of(b"\n".join(lines) + last_newline, piece):
        assert block.first_line == len(found)
        if block.too_long is None:
            found += block.data.split(b"\n")[:-1]
            assert block.num_bytes == len(block.data)
        else:
            (reject,) = text_reader("text")(block).rejects
            assert (reject.line, reject.is_complete) == (len(found), False)
            assert lines[reject.line].startswith(reject.data)
            said = f"the line has {block.num_bytes - 1:,} bytes, more than the maximum of 25,165,824"
            assert str(reject).startswith(f"d/x.jsonl:{reject.line + 1}: {said}; it starts with '{{é")
            found.append(b"z" * (block.num_bytes - 1))
    assert [len(line) for line in found] == [len(line) for line in lines]
    assert [number for number, line in enumerate(found) if line.startswith(b"z")] == [1, 4, 6]
    assert all(line == lines[number] for number, line in enumerate(found) if not line.startswith(b"z"))


def test_memory_is_bounded_whatever_the_length_of_a_line():
    def content():
        yield GOOD + b"\n"
        for _ in range(3_000):
            yield b"x" * 100_000
        yield b"\n" + GOOD

    tracemalloc.start()
    try:
        blocks = list(read_blocks(Path("d/x.jsonl"), content()))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [block.num_bytes for block in blocks] == [14, 300_000_001, 14]
    assert peak < 100_000_000


def test_texts():
    first = '{"n": [1, {"text": 2}], "text": "a\\u2028b\\ud83d\\ude00"}\r\n'
    data = first + '{"text": "c\u2028d"}\n \t{"text": ""} \n{"text": "x", "text": "the last one counts"}'
    found = text_reader("text")(block_of(data.encode()))
    assert found.texts == ["a\u2028b😀", "c\u2028d", "", "the last one counts"]
    assert found.lines.tolist() == [0, 1, 2, 3]
    assert text_reader("a b.c")(block_of(b'{"a b.c": "d", "text": 1}')).texts == ["d"]


BAD_LINES = [
    (b"", "the line is empty"),
    (
        b'\xef\xbb\xbf{"text": "a"}',
        "the line starts with a byte order mark; save the file as UTF-8 without it",
    ),
    (b" \r", "the line is empty"),
    (b'{"text": "a"', "not valid JSON: Expecting ',' delimiter: line 1 column 13 (char 12)"),
    (b'{"text": "a"} {"text": "b"}', "not valid JSON: Extra data: line 1 column 15 (char 14)"),
    (b'{"text": "a\tb"}', "not valid JSON: Invalid control character at: line 1 column 12 (char 11)"),
    (b'{"text": "a", "n": nan}', "not valid JSON: Expecting value: line 1 column 20 (char 19)"),
    (b'{"text": NaN}', "'text' must be a string, got NaN"),
    (b'{"text": "a", "text": 1}', "'text' must be a string, got 1"),
    (b'{"text": "a", "n": ' + b"[" * 100_000, "not valid JSON: maximum recursion depth exceeded"),
    (b'{"text": "a", "n": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not valid JSON: maximum recursion"),
    (b"\0" * 9, "byte 1 of the line is NUL: the file is damaged, or it is not UTF-8"),
    (b'{"text": "a", \0}', "byte 15 of the line is NUL: the file is damaged, or it is not UTF-8"),
    (
        json.dumps({str(key): 0 for key in range(1000)}).encode(),
        "missing key 'text' (the keys are '0', '1', '2', '3', '4', '5', '6', '7' and 992 more)",
    ),
    (b'{"text": "a\xff"}', "byte 12 of the line (0xff) is not UTF-8"),
    (b'{"text": "a", "n": "\xed\xa0\x80"}', "byte 21 of the line (0xed) is not UTF-8"),
    (b'{"text": "a", "n": "\xc3"}', "byte 21 of the line (0xc3) is not UTF-8"),
    (b'{"text": "\\ud800"}', r"'text' contains \ud800, an unpaired surrogate, which is not a character"),
    (b'{"text": "a\\ud83d\\u0041"}', r"'text' contains \ud83d, an unpaired surrogate"),
    (b'{"text": "\\udc00", "n": NaN}', r"'text' contains \udc00, an unpaired surrogate"),
    (b'["text"]', 'expected a JSON object, got ["text"]'),
    (b'"text"', 'expected a JSON object, got "text"'),
    (
        b'{"content": "a", "id": 1}',
        "missing key 'text' (the keys are 'content', 'id'); set json_key to the key",
    ),
    (b"{}", "missing key 'text' (the keys are none); set json_key to the key with the text"),
    (b'{"text": null}', "'text' must be a string, got null"),
    (b'{"text": ["a", "b"]}', """'text' must be a string, got ["a", "b"]"""),
    (b"<!DOCTYPE html><html>503", "this looks like HTML, not JSON: '<!DOCTYPE html><html>503'"),
]


ODD_VALUES = [
    *(b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-0", b"9" * 400, b"1" * 5000, b"[" * 500 + b"]" * 500),
    *(rb'"\ud800"', rb'"\udc00\ud800"', rb'{"\ud800": NaN}', rb'"\u0000"', rb'{"text": 1}', b'""', b"null"),
]
"""Values that Python's json accepts, of which some are not JSON."""


@pytest.mark.parametrize("value", ODD_VALUES, ids=lambda value: value[:20].decode())
def test_a_line_that_megatron_lm_reads_has_the_same_text_whatever_its_other_fields_hold(value):
    text = rb'"g\u00f6\ud83d\ude00d \u2028"'
    lines = [
        b'{"n": ' + value + b', "text": ' + text + b"}",
        b'{"text": ' + text + b', "n": {"m": [' + value + b"]}} ",
        b'{"text": ' + value + b', "n": ' + value + b', "text": ' + text + b"}",
        b'{"text": 1, "te\\u0078t": ' + text + b', "n": ' + value + b"}",
        rb'{"\ud800": ' + value + b', "text": ' + text + b"}",
    ]
    found = text_reader("text")(block_of(b"\n".join(lines)))
    assert found.rejects == []
    assert found.texts == [json.loads(line, parse_int=str)["text"] for line in lines]


def test_rejects_have_kinds():
    lines = [line for line, _ in BAD_LINES if not line.startswith(b"[")]
    rejects = text_reader("text")(block_of(b"\n".join(lines) + b"\n")).rejects
    assert {reject.kind for reject in rejects} == {
        *("empty line", "not JSON", "not UTF-8", "not a JSON object", "missing key 'text'"),
        *("'text' is not a string", "unpaired surrogate in the text"),
    }


def test_a_nested_key_is_not_read():
    (reject,) = text_reader("data.text")(block_of(b'{"data": {"text": "a"}, "id": 1}')).rejects
    assert reject.reason == (
        "missing key 'data.text' (the keys are 'data', 'id'); keys inside 'data' are not read: copy the text to a key "
        "of the record itself, for example with jq -c '.text = .data.text'"
    )


@pytest.mark.parametrize(("line", "reason"), BAD_LINES)
def test_a_bad_line_is_named_with_its_reason_and_the_others_are_read(line, reason):
    block = block_of(b'{"text": "good"}\n' + line + b'\n{"text": "g\xc3\xb6\xc3\xb6d"}\n')
    found = text_reader("text")(block)
    assert found.texts == ["good", "gööd"]
    assert found.lines.tolist() == [0, 2]
    (reject,) = found.rejects
    assert (reject.line, reject.data) == (1, line)
    assert str(reject).startswith(f"d/x.jsonl:2: {reason}")


def test_many_short_lines_are_spread_over_blocks():
    """A bad line needs hundreds of bytes of memory, so a block of 4 MiB of empty lines would need gigabytes."""
    lines = [b'{"text": "a"}', *[b""] * 200_000, b'{"text": "b"}', b""]
    blocks = blocks_of(b"\n".join(lines), 1 << 20)
    counts = [block.num_lines for block in blocks]
    assert counts == [65_536, 65_536, 65_536, 3394]
    assert [block.first_line for block in blocks] == [0, *itertools.accumulate(counts[:-1])]
    assert b"".join(block.data for block in blocks) == b"\n".join(lines)
    last = text_reader("text")(blocks[-1])
    assert (last.texts, last.lines.tolist(), len(last.rejects)) == (["b"], [200_001], counts[-1] - 1)


def test_bad_bytes_are_found_wherever_they_are():
    # Around the pieces in which the UTF-8 of a block is looked at, and within a character that is cut in two there.
    line = b'{"text": "a", "n": "' + "é".encode() * 150_000 + b'"}'
    assert text_reader("text")(block_of(line)).rejects == []
    for position in (65_534, 65_535, 65_536, 131_071, len(line) - 3):
        damaged = line[:position] + b"\xff" + line[position + 1 :]
        (reject,) = text_reader("text")(block_of(damaged)).rejects
        assert "is not UTF-8" in reject.reason


lines = st.one_of(
    st.sampled_from([line for line, _ in BAD_LINES if len(line) < 100]),
    st.sampled_from(
        [
            b'{"text":',
            b'"a"}',
            b'{"text":"a"}{"text":"b"}',
            b'{"text":"a"}',
            b'{"text":"b"',
            b"}",
            b"{",
            b"{}",
        ]
    ),
    st.text(st.characters(exclude_categories=["Cs"])).map(
        lambda text: json.dumps({"text": text}, ensure_ascii=False).encode()
    ),
)


@given(st.lists(lines, min_size=1, max_size=6), st.sampled_from([b"\n", b"\r\n", b" \n"]))
@settings(max_examples=100, deadline=None)
def test_a_line_is_read_the_same_alone_and_among_others(some_lines, end):
    read = text_reader("text")
    together = read(block_of(b"".join(line + end for line in some_lines)))
    alone = [read(block_of(line + end)) for line in some_lines]
    assert together.texts == [text for found in alone for text in found.texts]
    assert together.lines.tolist() == [number for number, found in enumerate(alone) if found.texts]
    assert [reject.reason for reject in together.rejects] == [
        reject.reason for found in alone for reject in found.rejects
    ]
