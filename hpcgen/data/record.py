"""The record next to each published output: its inputs, its settings and its content. It is published last.

msgspec is imported when a record is read or written, so that stages can be planned without the extra `data`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from hpcgen.config import tokenizer as tokenizers
from hpcgen.config.tokenizer import TokenizerConfig
from hpcgen.files import private_file, publish, sync
from hpcgen.text import counted, harmless
from trainer.contract.files import loss_mask
from trainer.contract.files.hashing import rest_sha256
from trainer.contract.files.index_header import IDX
from trainer.contract.files.regular_file import open_regular
from trainer.contract.files.system_calls import sync_path

FORMAT = 1
"""Version of the outputs. Increase it when the same inputs and settings produce different bytes: all outputs are then
made again."""

SIDE_FILE = ".rejects.jsonl"
"""Suffix of files that a unit makes only if they have content."""

RECORD_FILE = ".record.json"
"""Suffix of records."""


@dataclass(frozen=True)
class FileIdentity:
    """Identity of a file's content: its hash if known, otherwise its size and modification time."""

    name: str
    size: int | None = None
    sha256: str | None = None
    modified_ns: int | None = None
    """Modification time (ns). If the time differs and there is a hash, the file is rehashed, since its content may be
    unchanged."""
    version: str | None = None
    """Version in the store that the file was downloaded from."""

    def without_time(self) -> FileIdentity:
        """Drops the modification time if there is a hash, which identifies the content by itself."""
        return dataclasses.replace(self, modified_ns=None) if self.sha256 else self

    def same_content(self, other: FileIdentity) -> bool:
        """Returns whether both can be the same content. The hash decides if both have one, otherwise the rest."""
        if self.name != other.name:
            return False
        if self.sha256 and other.sha256:
            return self.sha256 == other.sha256
        return all(
            None in pair or pair[0] == pair[1]
            for pair in (
                (self.size, other.size),
                (self.modified_ns, other.modified_ns),
                (self.version, other.version),
            )
        )


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Counts of what a stage read and wrote. Always: documents_in = documents_out + skipped + rejected."""

    documents_in: int = 0
    """Lines of the inputs."""
    documents_out: int = 0
    skipped: int = 0
    """Documents without tokens that were dropped (drop_empty)."""
    rejected: int = 0
    """Lines without a readable text; they are in the side file."""
    empty: int = 0
    """Documents without tokens, dropped or not."""
    sequences: int = 0
    """Documents with tokens."""
    tokens: int = 0
    unknown: int = 0
    """Tokens for unknown text."""
    lost: int = 0
    """Characters that the tokenizer left out because it has no token for them."""
    eod_in_text: int = 0
    """End-of-document ids that the text itself spells out."""
    verified: int = 0
    """Number of documents whose ids were compared with the ids from the library `tokenizers`."""
    learned: int = 0
    """Tokens of chats that are learned."""
    text_bytes: int = 0
    """Uncompressed size of the JSON Lines."""

    @classmethod
    def total(cls, counts: Iterable[Counts]) -> Counts:
        """Sum of `counts`."""
        sums = dict.fromkeys((field.name for field in dataclasses.fields(cls)), 0)
        for part in counts:
            for name in sums:
                sums[name] += getattr(part, name)
        return cls(**sums)

    def __add__(self, other: Counts) -> Counts:
        return Counts.total((self, other))

    @property
    def balanced(self) -> bool:
        """True if every document is accounted for."""
        return self.documents_in == self.documents_out + self.skipped + self.rejected

    @property
    def outcome(self) -> str:
        """The outcome for the documents read, in words."""
        return f"{self.documents_out:,} out + {self.skipped:,} skipped + {self.rejected:,} rejected"

    @property
    def learned_text(self) -> str:
        """The share of learned tokens in words; empty if the documents are not chats."""
        return f"{self.learned:,} tokens ({self.learned / self.tokens:.1%})" if self.learned else ""

    @property
    def warnings(self) -> list[str]:
        """A sentence for each kind of text that the tokenizer could not encode."""
        found = []
        if self.unknown:
            share = f"{100 * self.unknown / self.tokens:.2g}%" if self.tokens else "100%"
            found.append(
                f"{counted(self.unknown, 'token')} ({share} of all) replace text that the tokenizer does not know"
            )
        if self.lost:
            verb = "was" if self.lost == 1 else "were"
            found.append(
                f"{counted(self.lost, 'character')} {verb} left out: the tokenizer has no token for them"
            )
        return found


@dataclass(frozen=True)
class TokenizerIdentity:
    """Identity of the tokenizer that made a pair."""

    kind: str
    eod_id: int
    """The ID that ends each document."""
    vocab_size: int
    files: tuple[str, ...]
    """SHA-256 of each file of the tokenizer."""

    @classmethod
    def of(cls, tokenizer: TokenizerConfig) -> TokenizerIdentity:
        """Identity of a tokenizer, from its files as they are now.

        Raises:
            HpcgenError: a file of the tokenizer is missing or invalid.
        """
        return cls(
            kind=tokenizer.kind,
            eod_id=tokenizers.eod_id(tokenizer),
            vocab_size=tokenizers.vocab_size(tokenizer),
            files=tuple(tokenizers.content_sha256(tokenizer)),
        )


@dataclass(frozen=True, kw_only=True)
class Record:
    """Record of a unit that is done."""

    stage: str
    configuration: str
    """Hash of the settings, from `configuration_hash`."""
    inputs: tuple[FileIdentity, ...]
    """Inputs in order, with the hash of what was read."""
    outputs: tuple[FileIdentity, ...]
    """Outputs with size, SHA-256 and, once published, modification time. Names are relative to the corpus directory."""
    counts: Counts = field(default_factory=Counts)
    seconds: float = 0.0
    """Wall-clock time in seconds."""
    reject_kinds: dict[str, int] = field(default_factory=dict)
    """Number of rejected lines of each kind. Version 0.2.0 did not record it."""
    tokenizer: TokenizerIdentity | None = None
    """The tokenizer of a pair; its hash is also part of `configuration`. Version 0.2.0 did not record it."""

    @property
    def has_masks(self) -> bool:
        """True if the outputs are pairs of chats, which have loss masks."""
        return any(output.name.endswith(loss_mask.SUFFIX) for output in self.outputs)

    def same_work(self, other: Record) -> bool:
        """Returns whether both records agree on everything except modification times, duration and `tokenizer`."""
        return self._without_times() == other._without_times()

    def _without_times(self) -> Record:
        outputs = tuple(output.without_time() for output in self.outputs)
        return dataclasses.replace(self, seconds=0.0, outputs=outputs, tokenizer=None)

    def has_valid_outputs(self, directory: Path, files: Sequence[str]) -> bool:
        """Returns whether the record covers exactly `files` below `directory` and all recorded outputs are unchanged.

        A file with the recorded size and modification time counts as unchanged. A file with another time (it was
        copied or modified) is hashed.
        """
        names = {output.name for output in self.outputs}
        if not names.issuperset(files) or not all(
            name.endswith(SIDE_FILE) for name in names.difference(files)
        ):
            return False
        return self._outputs_are_at(f"{directory}/{output.name}" for output in self.outputs)

    def _outputs_are_at(self, paths: Iterable[Path | str]) -> bool:
        """Returns whether the unchanged outputs are at `paths`, in this order."""
        return all(map(_is_unchanged, paths, self.outputs))


def rejects_text(records: Iterable[Record]) -> str:
    """The number of rejected lines of each kind, the largest first; empty if there are none."""
    kinds = Counter[str]()
    for record in records:
        kinds.update(record.reject_kinds)
    return ", ".join(f"{count:,} {harmless(kind)}" for kind, count in kinds.most_common())


def configuration_hash(settings: Mapping[str, Any]) -> str:
    """Hash of FORMAT and of the settings that determine an output's bytes."""
    text = json.dumps({"format": FORMAT, **settings}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def record_path(output: Path) -> Path:
    """Path of the record of an output; for a pair, `output` is its prefix."""
    return output.with_name(output.name + RECORD_FILE)


def publish_unit(
    files: Sequence[tuple[BinaryIO, Path]], record: Record, output: Path, *, stale: Iterable[Path] = ()
) -> Record:
    """Publishes the outputs of a unit in order, and then their record next to `output`.

    `files` are complete private files (hpcgen.files.private_file), each with its final path. `stale` are paths that
    an older version of the unit may have left; they are removed together with the old record. If another copy of
    this task has already published the same work, nothing changes. The old record is removed before the files change,
    so a record always describes the files next to it, even if the process is killed.

    Returns the published record, which has the modification times of the files.

    Raises:
        OSError: a file cannot be written. If the disk is full, nothing is published and an old unit stays as it was.
    """
    if not record.counts.balanced:  # a bug in hpcgen
        raise AssertionError(f"{output}: documents are not accounted for: {record.counts}")
    for file, _ in files:
        sync(file)
    record = _with_times(record, {path.name: file.name for file, path in files})
    place = record_path(output)
    with private_file(
        place, swept=True
    ) as record_file:  # written before any rename, because it needs disk space
        record_file.write(_encoded(record))
        sync(record_file)
        old = read_record(output)
        if old and old.same_work(record) and old._outputs_are_at(path for _, path in files):
            _remove(stale)
            return old
        # The index goes first: for readers that ignore records, it marks a complete pair.
        _remove([place, *(path for _, path in files if path.suffix == IDX), *stale])
        for file, path in files:
            Path(file.name).replace(path)
        for directory in {path.parent for _, path in files}:
            sync_path(directory)
        Path(record_file.name).replace(place)
        sync_path(place.parent)
    return record


def _with_times(record: Record, paths: Mapping[str, Path | str]) -> Record:
    """Adds the modification times of the outputs, which are at `paths` (by name without directory)."""
    outputs = tuple(
        dataclasses.replace(made, modified_ns=os.stat(paths[_name(made)]).st_mtime_ns)  # noqa: PTH116
        for made in record.outputs
    )
    return dataclasses.replace(record, outputs=outputs)


def _name(made: FileIdentity) -> str:
    """Name of an output without its directory, which is the same for all outputs of a unit."""
    return made.name.rpartition("/")[2]


def _remove(paths: Iterable[Path]) -> None:
    """Removes those of `paths` that exist, and syncs their directories."""
    there = [path for path in paths if path.exists()]
    for path in there:
        path.unlink(missing_ok=True)
    for directory in {path.parent for path in there}:
        sync_path(directory)


def write_record(record: Record, output: Path) -> None:
    """Publishes the record of `output`, which is already published.

    Raises:
        OSError: the record cannot be written, or the output is missing.
    """
    target = record_path(output)
    record = _with_times(record, {_name(made): output.with_name(_name(made)) for made in record.outputs})
    with private_file(target, swept=True) as file:  # run_task has swept the files of all units
        file.write(_encoded(record))
        publish(file, target)


def read_record(output: Path) -> Record | None:
    """Reads the record of `output`; None if it is missing or unreadable, which means that the unit is not done."""
    try:
        # Plain strings and a prepared decoder: there may be a hundred thousand records to read.
        with open_regular(f"{output}{RECORD_FILE}", buffering=0) as file:
            return decode_record(file.read())
    except OSError:
        return None


def decode_record(content: bytes) -> Record | None:
    """The record in a file with this content; None if it is not one."""
    import msgspec

    try:
        return _decoder()(content)
    except msgspec.MsgspecError:
        return None


@functools.cache
def _decoder() -> Callable[[bytes], Record]:
    import msgspec

    return msgspec.json.Decoder(Record).decode


def _encoded(record: Record) -> bytes:
    import msgspec

    return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"


def _is_unchanged(path: Path | str, recorded: FileIdentity) -> bool:
    """Returns whether the file at `path` has the recorded content. If so, restores its modification time."""
    try:
        status = os.stat(path)  # noqa: PTH116
        if status.st_size != recorded.size:
            return False
        if recorded.modified_ns is None or _same_time(status.st_mtime_ns, recorded.modified_ns):
            return True
        with open_regular(path, buffering=0) as file:
            if rest_sha256(file)[0] != recorded.sha256:
                return False
            # By descriptor: the path may name another file by now. This fails in another user's corpus.
            with contextlib.suppress(OSError):
                os.utime(file.fileno(), ns=(status.st_atime_ns, recorded.modified_ns))
            return True
    except OSError:
        return False


def _same_time(one: int, other: int) -> bool:
    """Returns whether two times (ns) are equal, at a resolution of 1 s if one is a full second, as in some archives."""
    return one == other or (one // _SECOND == other // _SECOND and 0 in (one % _SECOND, other % _SECOND))


_SECOND = 1_000_000_000
