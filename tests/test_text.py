"""Numbers, lists and names as people read them: hpcgen.text, and trainer.contract.wording below it."""

from __future__ import annotations

import pytest

from hpcgen.text import between, did_you_mean, duration, few, ranges, scaled, size_text, time_between


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


KNOWN = (
    "train",
    "training",
    "tokenize",
    "num_attention_heads",
    "moe_z_loss_coeff",
    "moe_layer_freq",
    "v2",
    "lint",
)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        *((name, "did you mean train?") for name in ("trian", "tran", "traain", "trein", "TRAIN", "train_")),
        *((name, "did you mean training?") for name in ("trainign", "rtaining", "traiming")),
        *((name, "did you mean num_attention_heads?") for name in ("num_heads", "heads-num-attention")),
        *(
            (name, "did you mean moe_z_loss_coeff?")
            for name in ("moe_z_loss", "moe_zloss_coef", "moeZLossCoeff")
        ),
        ("moe_layer_frequency", "did you mean moe_layer_freq?"),
        ("token", "names that begin with token: tokenize"),
        *(
            (name, "")
            for name in ("xyz", "tail", "brain", "rain", "line", "link", "v3", "v", "loss", "heads", "", "-")
        ),
    ],
)
def test_a_misspelling_is_no_other_word(name, hint):
    assert did_you_mean(name, KNOWN) == hint


def test_a_name_of_any_length_is_compared_quickly():
    """A file that is no run file may have one. Comparing it with all keys took half a minute."""
    assert did_you_mean("a" * 10**8, KNOWN * 1000) == ""


def test_several_names_are_suggested_only_if_all_are_equally_near():
    known = ["adam_beta1", "adam_beta2", "lr_decay_iters", "lr_decay_style"]
    assert did_you_mean("lr_decay", known) == "did you mean lr_decay_iters or lr_decay_style?"
    assert did_you_mean("lr_decay", known, most=1) == (
        "names that begin with lr_decay: lr_decay_iters, lr_decay_style"
    )
    assert did_you_mean("adam_bta1", known) == "did you mean adam_beta1?"
    assert did_you_mean("adam_beta", known) == "names that begin with adam_beta: adam_beta1, adam_beta2"


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (345_123, 421_987, "350,000 to 420,000"),
        (1.234, 5.67, "1.2 to 5.7"),
        (99.6, 101.2, "about 100"),
        (0.0123, 0.0151, "0.012 to 0.015"),
        (0, 0, "about 0"),
    ],
)
def test_rough_figures_have_two_digits(low, high, text):
    assert between(low, high) == text


@pytest.mark.parametrize(
    ("low_s", "high_s", "text"),
    [
        (26 * 86400, 32 * 86400, "26 to 32 days"),
        (30 * 3600, 48 * 3600, "1.2 to 2 days"),
        (30 * 3600, 40 * 3600, "30 to 40 hours"),
        (100, 125, "1.7 to 2.1 minutes"),
        (5, 6, "5 to 6 seconds"),
    ],
)
def test_a_range_of_durations_has_one_unit(low_s, high_s, text):
    assert time_between(low_s, high_s) == text
