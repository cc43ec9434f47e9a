"""The kinds of attention, and which of them a model has. To add one, add its module and its object in KINDS."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.contract.attention.kind import Attention
from trainer.contract.attention.latent import LATENT
from trainer.contract.attention.usual import USUAL
from trainer.contract.config import ModelConfig
from trainer.contract.config.unused_keys import unused_keys
from trainer.contract.problem import Problem

KINDS: tuple[Attention, ...] = (LATENT, USUAL)
"""All kinds. The last one has no key."""

SWITCHES = tuple(kind.key for kind in KINDS if kind.key is not None)
"""Keys of the section `model` that choose a kind."""


def attention_of(model: ModelConfig) -> Attention:
    """The kind of attention of `model`, which may still be unresolved."""
    return next(kind for kind in KINDS if kind.is_chosen(model))


def attention_problems(model: ModelConfig) -> Iterator[Problem]:
    """Yields the keys that contradict the kind of attention of `model`, or that need another kind."""
    chosen = attention_of(model)
    yield from chosen.problems(model)
    for kind in KINDS:
        if kind is not chosen and kind.key is not None:
            yield from unused_keys(model, kind.keys, kind.key, "false", f"set {kind.key} to true")
