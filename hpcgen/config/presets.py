"""Model presets with their optimizer settings. Each is a file, presets/NAME.yaml, read only if used.

hpcgen ships presets with published settings, and comments in them name the sources of the numbers. Users and sites add
their own. A preset is part of a run file; values in the run file override it.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Annotated, Any

from hpcgen.config import document
from hpcgen.config.directories import configuration_directories, is_below, names_in, readable
from hpcgen.config.fields import Text
from hpcgen.config.trust import require_trusted_file
from hpcgen.config.validation import build, located
from hpcgen.errors import FileErrors, Problem
from hpcgen.resources import shipped
from hpcgen.text import did_you_mean
from trainer.contract.config import (
    CheckpointConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelismConfig,
    TrainingConfig,
)
from trainer.contract.record import config_section, record

Section = dict[str, Any]
Line = Annotated[str, Text(r".{1,200}", "a line of 1 to 200 characters")]


@config_section
class PresetTokenizer:
    """The model's own tokenizer."""

    repository: Annotated[str, Text(r"[\w.-]+(/[\w.-]+)?", "a repository such as meta-llama/Meta-Llama-3-8B")]
    """Repository on the Hugging Face Hub that has its tokenizer.json."""
    eod_token: Line
    """Token at the end of a document."""


@config_section
class PresetConfig:
    """A preset: its description and sections of a run file."""

    description: Line
    """Description in one line, with the actual shape if the name is misleading."""
    tokenizer: PresetTokenizer | None = None
    """The model's own tokenizer; null for a model that takes any tokenizer."""
    model: ModelConfig
    """Shape of the model."""
    parallelism: ParallelismConfig | None = None
    """A layout that fits common GPUs."""
    training: TrainingConfig
    """Batch size, length and precision."""
    optimizer: OptimizerConfig
    """Optimizer and learning-rate schedule."""
    checkpoint: CheckpointConfig | None = None
    """Saving and retention of checkpoints."""
    logging: LoggingConfig | None = None
    """Metrics and profiling."""


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
    file: Path | None = None
    """The user's or the site's file; None for a preset that hpcgen ships."""

    @property
    def origin(self) -> str:
        """The origin of its values in a run: `preset NAME`, with the file if hpcgen does not ship it."""
        return f"preset {self.name}" if self.file is None else f"preset {self.name} ({self.file})"

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


def _directories() -> list[Path]:
    """The directories in which presets are looked up by name. The first match is used."""
    return [*configuration_directories("presets"), shipped("presets")]


def _names() -> list[str]:
    return sorted(names_in(_directories()), key=_family_and_size)


def _family_and_size(name: str) -> tuple[str, float]:
    """The sort key of a name such as 125m, 1.3b or llama3-8b. A name can have no size."""
    found = re.fullmatch(r"(.*?)(?:([\d.]*\d)([mb]))?", name)
    assert found
    family, number, unit = found.groups()
    return family, float(number or 0) * (1000 if unit == "b" else 1)


@functools.cache
def _read(path: Path) -> Preset:
    own = None if is_below(path, shipped("presets")) else path
    if own:
        require_trusted_file(path, looked_up=True)
    read = document.read(path)
    if own:  # the tests check the others
        _, problems = build(PresetConfig, read)
        if problems:
            raise FileErrors(located(problem, read) for problem in problems)
    sections = dict(read.values)
    description, tokenizer = sections.pop("description"), sections.pop("tokenizer", None) or {}
    sections = {name: section for name, section in sections.items() if section is not None}
    return Preset(
        path.stem, description, sections, tokenizer.get("eod_token"), tokenizer.get("repository"), own
    )


class _Presets(Mapping[str, Preset]):
    """The presets by name. Each is read when it is looked up, and reading one with mistakes raises HpcgenError."""

    def __getitem__(self, name: str) -> Preset:
        if name not in _names():
            raise KeyError(name)
        candidates = (directory / f"{name}.yaml" for directory in readable(_directories()))
        return _read(next(path for path in candidates if path.exists()))

    def __contains__(self, name: object) -> bool:
        return name in _names()

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
