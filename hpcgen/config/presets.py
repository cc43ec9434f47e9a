"""Model presets with their published optimizer settings. Each is a file, hpcgen/presets/NAME.yaml, read only if used.

A preset is part of a run file; values in the run file override it. Next to the sections of a run file, its file has a
`description` and, if the model has a tokenizer of its own, `tokenizer`. Comments name the sources of the numbers.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from hpcgen.config import document
from hpcgen.errors import Problem
from hpcgen.text import did_you_mean
from trainer.contract.record import record

DIRECTORY = Path(__file__).parent.parent / "presets"

Section = dict[str, Any]


@record
class Preset:
    """Named sections of a run file."""

    name: str
    description: str
    """One-line description, with the actual shape if the name is misleading."""
    sections: dict[str, Section]
    eod_token: str | None = None
    """End of a document in the model's own tokenizer. None for a model that takes any tokenizer."""
    tokenizer_repository: str | None = None
    """Repository on the Hugging Face Hub with the model's own tokenizer.json."""

    def tokenizer_command(self, directory: PurePath) -> str:
        """The command that downloads the model's own tokenizer.json into `directory`."""
        words = [
            "hf",
            "download",
            str(self.tokenizer_repository),
            "tokenizer.json",
            "--local-dir",
            str(directory),
        ]
        return shlex.join(words)


NAMES = (
    *("tiny", "tiny-moe"),
    *("125m", "375m", "345m", "857m", "1.3b", "13b", "30b", "175b"),
    *("llama3-8b", "llama3-70b", "llama3-405b"),
    *("mixtral-8x7b", "deepseek-v3"),
)
"""Names of presets, from small to large in each family."""


@functools.cache
def _read(name: str) -> Preset:
    sections = document.read(DIRECTORY / f"{name}.yaml").values
    description, tokenizer = sections.pop("description"), sections.pop("tokenizer", {})
    return Preset(name, description, sections, tokenizer.get("eod_token"), tokenizer.get("repository"))


class _Presets(Mapping[str, Preset]):
    """The presets by name. Each is read when it is looked up."""

    def __getitem__(self, name: str) -> Preset:
        if name not in NAMES:
            raise KeyError(name)
        return _read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(NAMES)

    def __len__(self) -> int:
        return len(NAMES)


PRESETS: Mapping[str, Preset] = _Presets()
"""Presets by name, in the order of NAMES."""


def unknown_preset(name: str) -> str:
    """Hint for an unknown preset. A name with another size does not count as a misspelling."""
    size = re.sub(r"^gpt-?3-", "", name.lower())
    return (
        did_you_mean(size, PRESETS, most=3)
        or f"use one of {', '.join(PRESETS)}, or hpcgen init --from-hf for a Hugging Face model"
    )


def missing_tokenizer(preset: str | None, path: str, stage: str) -> Problem:
    """The problem of a run with `preset` whose `stage` needs the missing tokenizer.json at `path`."""
    own, place = PRESETS.get(preset or ""), PurePath(path)
    hint = "put the model's tokenizer.json there"
    if own is not None and own.tokenizer_repository and place.name == "tokenizer.json":
        hint = f"download it with: {own.tokenizer_command(place.parent)}"
    return Problem("data.tokenizer.tokenizer_file", f"does not exist. Stage {stage} needs {path}", hint)
