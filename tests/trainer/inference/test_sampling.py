"""Each filter of the logits keeps the tokens that its definition names."""

from __future__ import annotations

import math

import pytest
import torch

from trainer.contract.errors import TrainerError
from trainer.inference import Options, sampling

LOGITS = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()[None]


def kept(logits: torch.Tensor) -> list[int]:
    return torch.nonzero(logits[0] > -math.inf)[:, 0].tolist()


@pytest.mark.parametrize(("k", "expected"), [(1, [0]), (2, [0, 1]), (4, [0, 1, 2, 3]), (9, [0, 1, 2, 3])])
def test_top_k(k: int, expected: list[int]) -> None:
    assert kept(sampling.keep_top_k(LOGITS, k)) == expected


def test_top_k_keeps_ties() -> None:
    assert kept(sampling.keep_top_k(torch.tensor([[1.0, 3.0, 1.0, 0.0]]), 2)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("p", "expected"), [(0.01, [0]), (0.45, [0]), (0.55, [0, 1]), (0.8, [0, 1, 2]), (1.0, [0, 1, 2, 3])]
)
def test_top_p(p: float, expected: list[int]) -> None:
    assert kept(sampling.keep_top_p(LOGITS, p)) == expected
    assert kept(sampling.keep_top_p(LOGITS.flip(-1), p)) == sorted(3 - index for index in expected)


def test_a_repeated_token_becomes_less_likely() -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0]])
    seen = torch.tensor([[True, True, False, False]])
    assert sampling.penalize_repetition(logits, seen, 2.0).tolist() == [[1.0, -4.0, 2.0, -2.0]]


def test_draws_follow_the_distribution() -> None:
    draws = (torch.arange(100, dtype=torch.float64) + 0.5) / 100
    tokens = sampling.draw(LOGITS.expand(100, 4), draws)
    assert torch.bincount(tokens).tolist() == [50, 25, 15, 10]


def test_a_removed_token_is_never_drawn() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]])
    draws = torch.tensor([0.0, 0.49, 0.5, 1 - 2**-sampling.DRAW_BITS], dtype=torch.float64)
    assert sampling.draw(logits.expand(4, 5), draws).tolist() == [1, 1, 3, 3]


def test_temperature_0_takes_the_most_likely_token_and_a_low_one_nearly_always_does() -> None:
    def choose(temperature: float) -> int:
        draws = torch.tensor([0.5], dtype=torch.float64)
        return int(sampling.choose(LOGITS, draws, temperature=temperature, top_k=None, top_p=None))

    assert choose(0.0) == 0
    assert choose(1e-3) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature = -1.0 must be 0 or a positive number"),
        ({"temperature": math.nan}, "temperature = nan must be"),
        ({"temperature": 1.0, "top_k": 0}, "top_k = 0 must be at least 1"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p = 0.0 must be greater than 0"),
        ({"top_p": 0.5}, "top_p = 0.5 has no effect at temperature 0"),
        ({"stop": ("",)}, "stop = .* must be strings that are not empty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty = 0.0 must be a positive number"),
        ({"max_new_tokens": 0}, "max_new_tokens = 0 must be at least 1"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(TrainerError, match=message):
        Options(**options)
