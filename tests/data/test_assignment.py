"""The rule by which inputs go to outputs: contiguous, complete, proportional, and the same everywhere."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcgen.data.assignment import Share, assign
from hpcgen.errors import HpcgenError

SIZES = st.lists(st.integers(1, 10**12), min_size=1, max_size=60)
COUNTS = st.integers(1, 80)


@given(SIZES, COUNTS)
def test_every_input_and_every_output_once_in_order(sizes, num_outputs):
    shares = assign(sizes, num_outputs)
    assert [index for share in shares for index in share.inputs] == list(range(len(sizes)))
    assert [index for share in shares for index in share.outputs] == list(range(num_outputs))
    for share in shares:  # none is empty, and many to many there is not
        assert min(len(share.inputs), len(share.outputs)) == 1


@given(SIZES, COUNTS)
def test_groups_are_as_equal_in_bytes_as_files_allow(sizes, num_outputs):
    shares = assign(sizes, num_outputs)
    if len(sizes) < num_outputs:
        return
    total, done = sum(sizes), 0
    for before, after in pairwise(shares):
        done += sum(sizes[index] for index in before.inputs)
        goal = total * before.outputs.stop / num_outputs
        forced = len(before.inputs) == 1 or len(after.inputs) == 1  # no file is left to move
        # moving the cut by a file, to either side, brings it no nearer
        if not forced:
            assert abs(done - goal) <= abs(done - sizes[before.inputs[-1]] - goal) + 1
            assert abs(done - goal) <= abs(done + sizes[after.inputs[0]] - goal) + 1


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=20), st.integers(1, 400))
def test_few_inputs_get_outputs_in_proportion(sizes, num_outputs):
    if len(sizes) >= num_outputs:
        return
    total, ideal = sum(sizes), 0.0
    shares = assign(sizes, num_outputs)
    for size, share in zip(sizes, shares, strict=True):
        ideal += size * num_outputs / total
        # rounded to the nearest, and moved by the inputs that would else get none: at most one each
        assert abs(share.outputs.stop - ideal) <= 0.5 + len(sizes)
        assert len(share.outputs) >= 1


def test_equal_files_are_cut_equally():
    assert [len(share.inputs) for share in assign([7] * 12, 4)] == [3, 3, 3, 3]
    assert [len(share.outputs) for share in assign([7] * 4, 12)] == [3, 3, 3, 3]


def test_slimpajama_is_cut_into_72_files_of_equal_bytes():
    sizes = [15_000_000 + index * 7919 % 1_000_000 for index in range(59_166)]
    shares = assign(sizes, 72)
    weights = [sum(sizes[index] for index in share.inputs) for share in shares]
    assert len(shares) == 72
    assert max(weights) - min(weights) <= 2 * max(sizes)


@given(SIZES, COUNTS)
def test_an_unknown_size_counts_as_the_mean_of_the_others(sizes, num_outputs):
    mean = max(1, sum(sizes) // len(sizes))
    assert assign([*sizes, None], num_outputs) == assign([*sizes, mean], num_outputs)


def test_without_any_size_files_count_alike():
    assert (
        assign([None] * 6, 3)
        == assign([1] * 6, 3)
        == [Share(range(2 * i, 2 * i + 2), range(i, i + 1)) for i in range(3)]
    )


def test_no_input_is_an_error():
    with pytest.raises(HpcgenError, match="no input files"):
        assign([], 3)
