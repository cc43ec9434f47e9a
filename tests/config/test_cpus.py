from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcgen.config import cpus


@pytest.mark.parametrize(
    ("text", "mask"),
    [("0", 1), ("0-3", 0b1111), ("0-1,4", 0b10011), ("48-95", ((1 << 48) - 1) << 48), ("5-3", 0)],
)
def test_lists(text, mask):
    assert cpus.listed(text) == mask


def test_words_are_those_of_azures_file():
    assert cpus.words(cpus.listed("0-47"), 96) == "00000000,0000ffff,ffffffff"
    assert cpus.words(cpus.listed("48-95"), 96) == "ffffffff,ffff0000,00000000"
    assert cpus.words(1, 3) == "00000001"


@given(st.sets(st.integers(0, 200), min_size=1))
def test_a_mask_comes_back_from_its_list_and_its_words(numbers):
    mask = sum(1 << number for number in numbers)
    assert cpus.listed(cpus.ranges(mask)) == mask
    assert cpus.from_words(cpus.words(mask, 201)) == mask


@pytest.mark.parametrize("text", ["", "xyz", "1_0", "0x1", "123456789", "1,,2", "ffffffff," * 1000 + "1"])
def test_text_that_is_not_a_mask_is_refused(text):
    with pytest.raises(ValueError, match="not a mask"):
        cpus.from_words(text)
