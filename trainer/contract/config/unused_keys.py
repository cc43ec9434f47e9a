"""Keys of the section `model` that are set, but have no effect without another key."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence

from trainer.contract.config import ModelConfig
from trainer.contract.problem import Problem


def unused_keys(model: ModelConfig, keys: Sequence[str], why: str, needed: str) -> Iterator[Problem]:
    """Yields one mistake for those of `keys` that are set, but have no effect without what is `needed`."""
    fields = (field for field in dataclasses.fields(ModelConfig) if field.name in keys)
    given = {field.name: field.default for field in fields if getattr(model, field.name) != field.default}
    if given:
        first, *more = given
        others = f". The same applies to {', '.join(more)}" if more else ""
        defaults = {name: json.dumps(default).strip('"') for name, default in given.items()}
        unset = ", ".join(f"{name}: {text}" for name, text in defaults.items()) if more else defaults[first]
        yield Problem(f"model.{first}", f"has no effect, because {why}{others}", f"{needed}, or use {unset}")
