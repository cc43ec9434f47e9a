"""The record beside each published output: what it was made of, how, and what it holds. It is published last."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from hpcgen.files import private_file, publish, sync, sync_path

FORMAT = 1
"""Changes when the same inputs and settings would give other bytes than before: everything is then made again."""

SIDE_FILE = ".rejects.jsonl"
"""Ends the names of files that a unit makes only when there is something to put into them."""

RECORD_FILE = ".record.json"
"""Ends the names of records."""


@dataclass(frozen=True)
class FileIdentity:
    """Which content a file has: by its hash where that is known, else by size and time."""

    name: str
    size: int | None = None
    sha256: str | None = None
    modified_ns: int | None = None
    """Time of its last change (ns). With a hash it decides nothing, but another time is a reason to hash again."""

    def without_time(self) -> FileIdentity:
        """The content alone, as far as the hash says it."""
        return dataclasses.replace(self, modified_ns=None) if self.sha256 else self

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
    """With size, SHA-256 and, once published, the time of change; names are relative to the corpus's directory."""
    counts: Counts = field(default_factory=Counts)
    seconds: float = 0.0
    """Wall-clock time that it took."""

    def same_work(self, other: Record) -> bool:
        """Whether both say that the same was made of the same: all but when, and the time that it took."""
        return self._without_times() == other._without_times()

    def _without_times(self) -> Record:
        outputs = tuple(output.without_time() for output in self.outputs)
        return dataclasses.replace(self, seconds=0.0, outputs=outputs)

    def is_whole(self, directory: Path, files: Sequence[str]) -> bool:
        """Whether it tells of just these files below `directory`, and all that it tells of are there as published.

        A file whose length and time of change are those of the record is taken for what it was; with another time
        (it was copied, or changed) it is read and hashed.
        """
        names = {output.name for output in self.outputs}
        if not names.issuperset(files) or not all(
            name.endswith(SIDE_FILE) for name in names.difference(files)
        ):
            return False
        return self._is_there(f"{directory}/{output.name}" for output in self.outputs)

    def _is_there(self, paths: Iterable[Path | str]) -> bool:
        """Whether the outputs, in their order, lie at `paths`."""
        return all(map(_holds, paths, self.outputs))


def configuration_hash(settings: Mapping[str, Any]) -> str:
    """A hash of the settings that decide an output's bytes, and of FORMAT."""
    text = json.dumps({"format": FORMAT, **settings}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def record_path(output: Path) -> Path:
    """Where the record of an output (for a pair: of its prefix) lies."""
    return output.with_name(output.name + RECORD_FILE)


def publish_unit(
    files: Sequence[tuple[BinaryIO, Path]], record: Record, output: Path, *, stale: Iterable[Path] = ()
) -> Record:
    """Puts the outputs of a unit in their places, in order, and their record beside `output`, which is the last step.

    `files` are private files (hpcgen.files.private_file), complete, each with its place. `stale` are places of what
    an older version of the unit may have left and this one has not: it goes with the old record. Where the same
    work is published already, by another copy of this task, nothing changes. A unit without a record is not done,
    so whatever ends us on the way, no record ever stands beside files that it does not describe.

    Gives the record as it is published, with the times of the files.

    Raises:
        OSError: they cannot be written. Where the disk is full, nothing is published and an old unit is left as it was.
    """
    if not record.counts.balanced:  # our own mistake, not the user's
        raise AssertionError(f"{output}: documents are not accounted for: {record.counts}")
    for file, _ in files:
        sync(file)
    record = _timed(record, {path.name: file.name for file, path in files})
    place = record_path(output)
    with private_file(place, swept=True) as record_file:  # before anything moves: it needs space as well
        record_file.write(_encoded(record))
        sync(record_file)
        old = read_record(output)
        if (
            old
            and old.same_work(record)
            and old._is_there(output.parent / _name(made) for made in old.outputs)
        ):
            _remove(stale)
            return old
        # an index marks a whole pair, for those who read no records
        _remove([place, *(path for _, path in files if path.suffix == ".idx"), *stale])
        for file, path in files:
            Path(file.name).replace(path)
        for directory in {path.parent for _, path in files}:
            sync_path(directory)
        Path(record_file.name).replace(place)
        sync_path(place.parent)
    return record


def _timed(record: Record, paths: Mapping[str, Path | str]) -> Record:
    """The record with the times of its outputs, which lie at `paths` (by name without directory)."""
    outputs = tuple(
        dataclasses.replace(made, modified_ns=os.stat(paths[_name(made)]).st_mtime_ns)  # noqa: PTH116
        for made in record.outputs
    )
    return dataclasses.replace(record, outputs=outputs)


def _name(made: FileIdentity) -> str:
    """Of an output, without directory: those of a unit lie all in one."""
    return made.name.rpartition("/")[2]


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
        OSError: it cannot be written, or the output is not there.
    """
    target = record_path(output)
    record = _timed(record, {_name(made): output.with_name(_name(made)) for made in record.outputs})
    with private_file(target, swept=True) as file:  # as run_task did for all of them at once
        file.write(_encoded(record))
        publish(file, target)


def read_record(output: Path) -> Record | None:
    """The record of `output`; None where there is none, or none that can be read (it is then not done)."""
    try:
        # plain strings and a decoder that is there: there may be a hundred thousand records to read
        with open(f"{output}{RECORD_FILE}", "rb", buffering=0) as file:  # noqa: PTH123
            return _DECODER.decode(file.read())
    except (OSError, msgspec.MsgspecError):
        return None


def _encoded(record: Record) -> bytes:
    return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"


def _holds(path: Path | str, recorded: FileIdentity) -> bool:
    """Whether the file at `path` is there and is what was recorded; its time is set to the recorded one if it is."""
    try:
        status = os.stat(path)  # noqa: PTH116
        if status.st_size != recorded.size:
            return False
        if recorded.modified_ns is None or _same_time(status.st_mtime_ns, recorded.modified_ns):
            return True
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123
            if _hash(file) != recorded.sha256:
                return False
            # of this very file, even if another takes its place now; it is not ours in a corpus that is shared
            with contextlib.suppress(OSError):
                os.utime(file.fileno(), ns=(status.st_atime_ns, recorded.modified_ns))
            return True
    except OSError:
        return False


def _same_time(one: int, other: int) -> bool:
    """Whether two times (ns) are the same, if need be in whole seconds: some file systems and archives keep no more."""
    return one == other or (one // _SECOND == other // _SECOND and 0 in (one % _SECOND, other % _SECOND))


def _hash(file: FileIO) -> str:
    digest = hashlib.sha256()
    while block := file.read(_BLOCK_BYTES):
        digest.update(block)
    return digest.hexdigest()


_SECOND = 1_000_000_000
_BLOCK_BYTES = 4 << 20
_DECODER = msgspec.json.Decoder(Record)
