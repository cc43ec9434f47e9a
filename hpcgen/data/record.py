"""The record beside each published output: what it was made of, how, and what it holds. It is published last."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from hpcgen.files import private_file, publish

FORMAT = 1
"""Changes when the same inputs and settings would give other bytes than before: everything is then made again."""


@dataclass(frozen=True)
class FileIdentity:
    """Which content a file has: by its hash where that is known, else by size and time."""

    name: str
    size: int | None = None
    sha256: str | None = None
    modified_ns: int | None = None

    def same_content(self, other: FileIdentity) -> bool:
        """Whether the two may be the same content: the hash decides where both have one."""
        if self.name != other.name:
            return False
        if self.sha256 and other.sha256:
            return self.sha256 == other.sha256
        return self.size == other.size and self.modified_ns == other.modified_ns


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What a stage read and wrote. documents_in = documents_out + skipped + rejected, always."""

    documents_in: int = 0
    """Lines of the inputs."""
    documents_out: int = 0
    skipped: int = 0
    """Documents without tokens that were left out (drop_empty)."""
    rejected: int = 0
    """Lines without a readable text, which stand in the side file."""
    empty: int = 0
    """Documents without tokens, left out or not."""
    sequences: int = 0
    """Documents with tokens."""
    tokens: int = 0
    eod_in_text: int = 0
    """End-of-document ids that the text itself spelled out."""
    verified: int = 0
    """Documents whose ids were compared with those of the library tokenizers."""
    text_bytes: int = 0
    """Bytes of JSON Lines, uncompressed."""

    def __add__(self, other: Counts) -> Counts:
        mine, theirs = dataclasses.asdict(self), dataclasses.asdict(other)
        return Counts(**{name: mine[name] + theirs[name] for name in mine})

    @property
    def balanced(self) -> bool:
        """Whether every document is accounted for."""
        return self.documents_in == self.documents_out + self.skipped + self.rejected


@dataclass(frozen=True, kw_only=True)
class Record:
    """One unit of a stage, done."""

    stage: str
    configuration: str
    """Of `configuration_hash`."""
    inputs: tuple[FileIdentity, ...]
    """In order, with the hash of what was read."""
    outputs: tuple[FileIdentity, ...]
    """With size and SHA-256; names are relative to the corpus's directory."""
    counts: Counts = field(default_factory=Counts)
    seconds: float = 0.0
    """Wall-clock time that it took."""


def configuration_hash(settings: Mapping[str, Any]) -> str:
    """A hash of the settings that decide an output's bytes, and of FORMAT."""
    text = json.dumps({"format": FORMAT, **settings}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def record_path(output: Path) -> Path:
    """Where the record of an output (for a pair: of its prefix) lies."""
    return output.with_name(output.name + ".record.json")


def write_record(record: Record, output: Path) -> None:
    """Publishes the record of `output`.

    Raises:
        OSError: it cannot be written.
    """
    target = record_path(output)
    with private_file(target) as file:
        file.write(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
        publish(file, target)


def read_record(output: Path) -> Record | None:
    """The record of `output`; None where there is none, or none that can be read (it is then not done)."""
    try:
        return msgspec.json.decode(record_path(output).read_bytes(), type=Record)
    except (OSError, msgspec.MsgspecError):
        return None


def matches(
    record: Record,
    directory: Path,
    stage: str,
    configuration: str,
    inputs: Sequence[FileIdentity],
) -> bool:
    """Whether `record` is of this work: the same stage, settings and inputs, and outputs of the recorded sizes."""
    if (record.stage, record.configuration) != (stage, configuration) or len(record.inputs) != len(inputs):
        return False
    if not all(map(FileIdentity.same_content, record.inputs, inputs)):
        return False
    return all(_size(directory / output.name) == output.size for output in record.outputs)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
