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


@functools.cache
def _names() -> tuple[str, ...]:
    return tuple(sorted((file.stem for file in DIRECTORY.glob("*.yaml")), key=_family_and_size))


def _family_and_size(name: str) -> tuple[str, float]:
    """The sort key of a name such as 125m, 1.3b or llama3-8b. A name can have no size."""
    found = re.fullmatch(r"(.*?)(?:([\d.]+)([mb]))?", name)
    assert found
    family, number, unit = found.groups()
    return family, float(number or 0) * (1000 if unit == "b" else 1)


@functools.cache
def _read(name: str) -> Preset:
    sections = document.read(DIRECTORY / f"{name}.yaml").values
    description, tokenizer = sections.pop("description"), sections.pop("tokenizer", {})
    return Preset(name, description, sections, tokenizer.get("eod_token"), tokenizer.get("repository"))


class _Presets(Mapping[str, Preset]):
    """The presets by name. Each is read when it is looked up."""

    def __getitem__(self, name: str) -> Preset:
        if name not in _names():
            raise KeyError(name)
        return _read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_names())

    def __len__(self) -> int:
        return len(_names())


PRESETS: Mapping[str, Preset] = _Presets()
"""Presets by name: GPT-3's sizes, then the other families, each from small to large."""


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
