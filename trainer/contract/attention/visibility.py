"""Tokens that a query sees: all previous tokens, or the tokens in a window (model.window_size)."""

from __future__ import annotations

from collections.abc import Iterable

from trainer.contract.config import ModelConfig


def limiting_key(model: ModelConfig) -> str | None:
    """Key of the section `model` that hides tokens before a query. None if a query sees all of them."""
    return None if model.window_size is None else "window_size"


def hides_tokens(model: ModelConfig) -> bool:
    """True if some query of a sample does not see all tokens before it."""
    return model.window_size is not None and model.window_size < model.seq_length


def visible_pairs(model: ModelConfig, documents: Iterable[int]) -> float:
    """Number of pairs of a query and a visible key in causal attention. `documents` are lengths in tokens.

    It is l^2 / 2 for a document of l tokens, and w x l - w^2 / 2 in a window of w < l.
    """
    pairs = 0.0
    for length in documents:
        window = min(model.window_size or length, length)
        pairs += window * (length - window / 2)
    return pairs


def exchanges(model: ModelConfig) -> tuple[str, ...]:
    """Ways in which Transformer Engine's context-parallel ranks can exchange keys and values, the default first.

    Transformer Engine's p2p refuses windows (context_parallel.py, attn_forward_func_with_cp).
    """
    return ("p2p", "all_gather", "a2a", "a2a+p2p") if model.window_size is None else ("all_gather", "a2a")


def exchange(model: ModelConfig, cp_comm_type: str | None) -> str:
    """How Transformer Engine's context-parallel ranks exchange keys and values."""
    return cp_comm_type or exchanges(model)[0]
