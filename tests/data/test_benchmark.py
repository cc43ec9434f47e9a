from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import data, prepare
from hpcgen.data.compression import content
from hpcgen.data.jsonl import Block, read_blocks

from .data_runs import json_lines, write_file


def rate(tmp_path: Path, most_bytes: int, seconds_of) -> tuple[float, list[int]]:
    """The rate of a program that takes so long for so many bytes, and how many it was given each time."""
    file = write_file(tmp_path / "a.jsonl.zst", json_lines(["x" * 989] * 5_000))  # 5 MB
    sizes = []

    def run(path: Path) -> float:
        sizes.append(path.stat().st_size)
        assert json.loads(path.read_bytes().splitlines()[-1])
        return seconds_of(sizes)

    return data.rate_of(run, [file], tmp_path, most_bytes), sizes


def test_a_program_is_given_text_until_its_start_matters_little(tmp_path):
    found, sizes = rate(tmp_path, 100_000, lambda sizes: 0.5 + sizes[-1] / 1e6)
    assert found == pytest.approx(1, rel=1e-3)
    assert sizes[-1] > 1_500_000
    assert sizes == sorted(sizes)


def test_no_rate_is_negative_when_there_is_too_little_text(tmp_path):
    """The start took longer alone than with the work, since other programs ran."""
    found, sizes = rate(tmp_path, 100_000, lambda sizes: 8.0 if len(sizes) < 3 else 5.0)
    assert found == pytest.approx(2, rel=0.01)
    assert sizes[-1] == 5_010_000  # all of it


def test_files_are_joined_in_order_and_in_proportion(tmp_path):
    files = [write_file(tmp_path / f"{name}.jsonl.zst", json_lines([name] * 9)) for name in "abcde"]
    first, second = prepare.join(files, tmp_path / "joined", [0.6, 0.4])
    assert [first.name, second.name] == ["0.jsonl.zst", "1.jsonl.zst"]
    found = [b"".join(block.data for block in blocks(path)) for path in (first, second)]
    assert found == [json_lines(["a"] * 9 + ["b"] * 9 + ["c"] * 9), json_lines(["d"] * 9 + ["e"] * 9)]


def blocks(path: Path) -> Iterator[Block]:
    with path.open("rb") as file:
        yield from read_blocks(path, content(path, file))
