"""Choice of the next token. Each filter is a function of logits [b, vocabulary]; a removed token has -inf."""

from __future__ import annotations

import math
import random

import torch

DRAW_BITS = 32
"""Random bits per draw. With at most 52, the product of a draw and a probability is always below the probability."""


def penalize_repetition(logits: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Make the tokens in `seen` [b, vocabulary] (boolean) less likely: divide positive logits, multiply negative ones.

    Source: Keskar et al., "CTRL", arXiv 1909.05858, section 4.1, with the sign rule of Hugging Face transformers.
    """
    penalized = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, penalized, logits)


def keep_top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Keep the `k` most likely tokens, and all tokens that tie with the last of them."""
    smallest = logits.topk(min(k, logits.shape[-1])).values[:, -1:]
    return logits.masked_fill(logits < smallest, -math.inf)


def keep_top_p(logits: torch.Tensor, p: float) -> torch.Tensor:
    """Keep the most likely tokens until their probabilities add up to at least `p`.

    Source: Holtzman et al., "The curious case of neural text degeneration", arXiv 1904.09751, section 3.1.
    """
    ordered, indices = logits.sort(descending=True, stable=True)
    probabilities = ordered.double().softmax(-1)
    before = probabilities.cumsum(-1) - probabilities  # of the more likely tokens
    removed = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, indices, before >= p)
    return logits.masked_fill(removed, -math.inf)


def draw(logits: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Draw a token for each row from its distribution, with a number in [0, 1) per row [b], in fp64."""
    cumulative = logits.double().softmax(-1).cumsum(-1)
    targets = draws[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True)[:, 0]


def next_draw(generator: random.Random) -> float:
    """The next number in [0, 1)."""
    return generator.getrandbits(DRAW_BITS) / 2**DRAW_BITS


def choose(
    logits: torch.Tensor, draws: torch.Tensor, *, temperature: float, top_k: int | None, top_p: float | None
) -> torch.Tensor:
    """The next token of each row [b]: the most likely one at temperature 0, else drawn with the row's number."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits / temperature
    if top_k is not None:
        logits = keep_top_k(logits, top_k)
    if top_p is not None:
        logits = keep_top_p(logits, top_p)
    return draw(logits, draws)
