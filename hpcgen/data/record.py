"""The record beside each published output: what it was made of, how, and what it holds. It is published last."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from hpcgen.files import private_file, publish, sync, sync_path

FORMAT = 1
"""Changes when the same inputs and settings would give other bytes than before: everything is then made again."""

SIDE_FILE = ".rejects.jsonl"
"""Ends the names of files that a unit makes only when there is something to put into them."""


@dataclass(frozen=True)
class FileIdentity:
    """Which content a file has: by its hash where that is known, else by size and time."""

    name: str
    size: int | None = None
    sha256: str | None = None
    modified_ns: int | None = None

    def same_content(self, other: FileIdentity) -> bool:
        """Whether the two may be the same content: the hash decides where both have one, else what both know."""
        if self.name != other.name:
            return False
        if self.sha256 and other.sha256:
            return self.sha256 == other.sha256
        return all(
            None in pair or pair[0] == pair[1]
            for pair in ((self.size, other.size), (self.modified_ns, other.modified_ns))
        )


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

    @classmethod
    def total(cls, counts: Iterable[Counts]) -> Counts:
        """The sum of all of them."""
        sums = dict.fromkeys((field.name for field in dataclasses.fields(cls)), 0)
        for part in counts:
            for name in sums:
                sums[name] += getattr(part, name)
        return cls(**sums)

    def __add__(self, other: Counts) -> Counts:
        return Counts.total((self, other))

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

    def same_work(self, other: Record) -> bool:
        """Whether both say that the same was made of the same: all but the time that it took."""
        return dataclasses.replace(self, seconds=other.seconds) == other

    def is_whole(self, directory: Path, files: Sequence[str]) -> bool:
        """Whether it tells of just these files below `directory`, and all that it tells of are there in full length.

        Their content is not read: the next stage, which reads it anyway, and `hpcgen data verify` compare the hashes.
        """
        names = {output.name for output in self.outputs}
        if not names.issuperset(files) or not all(
            name.endswith(SIDE_FILE) for name in names.difference(files)
        ):
            return False
        return all(_size(f"{directory}/{output.name}") == output.size for output in self.outputs)


def configuration_hash(settings: Mapping[str, Any]) -> str:
    """A hash of the settings that decide an output's bytes, and of FORMAT."""
    text = json.dumps({"format": FORMAT, **settings}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def record_path(output: Path) -> Path:
    """Where the record of an output (for a pair: of its prefix) lies."""
    return output.with_name(output.name + _SUFFIX)


def publish_unit(files: Sequence[tuple[BinaryIO, Path]], record: Record, output: Path) -> None:
    """Puts the outputs of a unit in their places, in order, and their record beside `output`, which is the last step.

    `files` are private files (hpcgen.files.private_file), complete, each with its place. Where the same work is
    published already, by another copy of this task, nothing changes. A unit without a record is not done, so
    whatever ends us on the way, no record ever stands beside files that it does not describe.

    Raises:
        OSError: they cannot be written. Where the disk is full, nothing is published and an old unit is left as it was.
    """
    for file, _ in files:
        sync(file)
    place = record_path(output)
    with private_file(place, swept=True) as record_file:  # before anything moves: it needs space as well
        record_file.write(_encoded(record))
        sync(record_file)
        old = read_record(output)
        if old and old.same_work(record) and all(_size(path) == _size(file.name) for file, path in files):
            return
        # an index marks a whole pair, for those who read no records
        _remove([place, *(path for _, path in files if path.suffix == ".idx")])
        for file, path in files:
            Path(file.name).replace(path)
        for directory in {path.parent for _, path in files}:
            sync_path(directory)
        Path(record_file.name).replace(place)
        sync_path(place.parent)


def _remove(paths: Iterable[Path]) -> None:
    """Removes those that are there, for good."""
    there = [path for path in paths if path.exists()]
    for path in there:
        path.unlink(missing_ok=True)
    for directory in {path.parent for path in there}:
        sync_path(directory)


def write_record(record: Record, output: Path) -> None:
    """Publishes the record of `output`, which is in its place already.

    Raises:
        OSError: it cannot be written.
    """
    target = record_path(output)
    with private_file(target, swept=True) as file:  # as run_task did for all of them at once
        file.write(_encoded(record))
        publish(file, target)


def read_record(output: Path) -> Record | None:
    """The record of `output`; None where there is none, or none that can be read (it is then not done)."""
    try:
        # plain strings and a decoder that is there: there may be a hundred thousand records to read
        with open(f"{output}{_SUFFIX}", "rb", buffering=0) as file:  # noqa: PTH123
            return _DECODER.decode(file.read())
    except (OSError, msgspec.MsgspecError):
        return None


def _encoded(record: Record) -> bytes:
    return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"


def _size(path: Path | str) -> int | None:
    try:
        return os.stat(path).st_size  # noqa: PTH116
    except OSError:
        return None


_SUFFIX = ".record.json"
_DECODER = msgspec.json.Decoder(Record)
