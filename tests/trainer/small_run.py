"""A run that takes a second, and a way to disturb its saves and loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.trainer.runs import GPT, gpt_config

HOOK = str(Path(__file__).parent / "snapshot_hook")
"""Directory for PYTHONPATH, with a sitecustomize.py that makes saves and loads fail as variables say."""

SMALL = GPT | {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "seq_length": 16,
    "vocab_size": 512,
}


def small_config(corpus: str, directory: Path, **checkpoint_keys: Any) -> dict[str, Any]:
    return gpt_config(corpus, directory, SMALL) | {"checkpoint": {"save_interval": 2, **checkpoint_keys}}
