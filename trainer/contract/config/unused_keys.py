"""Keys of the section `model` that are set but have no effect, because another key is not set."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from trainer.contract.config import ModelConfig
from trainer.contract.problem import Problem


def unused_keys(
    model: ModelConfig, keys: Sequence[str], switch: str, state: str, needed: str
) -> Iterator[Problem]:
    """Yields one problem about the `keys` that are set but have no effect, because the key `switch` is `state`."""
    defaults_of_keys = {key: getattr(ModelConfig, key) for key in keys}
    given = {key: default for key, default in defaults_of_keys.items() if getattr(model, key) != default}
    if given:
        first, *more = given
        others = f". The same applies to {', '.join(more)}" if more else ""
        defaults = {name: json.dumps(default).strip('"') for name, default in given.items()}
        unset = ", ".join(f"{name}: {text}" for name, text in defaults.items()) if more else defaults[first]
        reason = f"has no effect, because {switch} is {state}{others}"
        about = tuple(f"model.{name}" for name in (switch, *more))
        yield Problem(f"model.{first}", reason, f"{needed}, or use {unset}", about=about)
