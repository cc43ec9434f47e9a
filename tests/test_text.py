"""Numbers, lists and names as people read them: hpcgen.text, and trainer.contract.wording below it."""

from __future__ import annotations

import pytest

from hpcgen.text import did_you_mean, duration, few, ranges, scaled, size_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (0.254, "0.25 s"),
        (7, "7 s"),
        (9.96, "10 s"),
        (42.4, "42 s"),
        (59.7, "1 min"),
        (129, "2 min 9 s"),
        (3599.6, "1 h"),
        (12_000, "3 h 20 min"),
        (86_399.9, "1 d"),
        (273_700, "3 d 4 h"),
    ],
)
def test_a_duration_has_its_two_largest_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_sizes_round_into_the_next_unit() -> None:
    sizes = (0, 999, 1000, 999_949, 999_950, 15_700_000, 895 * 10**9, 2.7e12, 10**16, 10**19)
    assert [size_text(size) for size in sizes] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "999.9 kB",
        "1.0 MB",
        "15.7 MB",
        "895.0 GB",
        "2.7 TB",
        "10.0 PB",
        "10000.0 PB",
    ]
    assert [scaled(12), scaled(12_345_678)] == ["12", "12.3 M"]


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 4, 6, 7], "0-2,4,6-7"), (range(8), "0-7")]
)
def test_consecutive_numbers_become_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text


def test_many_texts_are_cut() -> None:
    assert few(["a", "b"]) == "a, b"
    assert few([str(number) for number in range(1003)]) == "0, 1, 2 and 1,000 more"


def test_a_misspelled_name_suggests_similar_names() -> None:
    known = ["train", "training", "tokenize"]
    assert did_you_mean("trian", known) == "did you mean train or training?"
    assert did_you_mean("trian", known, most=1) == "did you mean train?"
    assert did_you_mean("xyz", known) == ""
