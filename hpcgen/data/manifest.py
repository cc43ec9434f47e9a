"""The manifest: the frozen list of a corpus's files, in order. Every later stage is decided by it alone.

A JSON Lines file. The first line describes the corpus, each further line one file:
    {"hpcgen_manifest": 1, "source": "hub cerebras/SlimPajama-627B at 2d0accdd58c5", "files": 59166,
     "selection": {"source.huggingface": "cerebras/SlimPajama-627B at main"}}
    {"name": "train/chunk1/example_train_0.jsonl.zst", "size": 15700000, "sha256": "...", "split": "train", "url": "https://..."}
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from hpcgen.config.corpus import CorpusJob
from hpcgen.data.listed_files import problems
from hpcgen.errors import HpcgenError
from hpcgen.files import Share, private_file, publish
from hpcgen.text import counted

VERSION = 1


class ManifestFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One file of a corpus. It has a `url`, or a `path` where it already lies."""

    name: str
    """Relative path with forward slashes; unique in the corpus."""
    split: str
    """train, valid or test where the corpus's own files decide, else "corpus"."""
    size: int | None = None
    """Bytes; None where the source does not say."""
    sha256: str | None = None
    """Of the content, in hexadecimal; None where the source does not say."""
    modified_ns: int | None = None
    """Time of the last change of a file at `path` (ns): tells that it was exchanged after planning."""
    url: str | None = None
    path: str | None = None


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    hpcgen_manifest: int
    source: str
    files: int
    selection: dict[str, str] = {}


@dataclass(frozen=True)
class Manifest:
    """A corpus, frozen."""

    source: str
    """Where it comes from, for people."""
    files: Sequence[ManifestFile]
    selection: Mapping[str, str] = field(default_factory=dict)
    """What the run file said of which files to take (hpcgen.config.corpus.selection); empty where nobody says."""

    @property
    def has_queries(self) -> bool:
        """Whether an address has a query: it may be a signature, and who has that can read the corpus."""
        return any("?" in (file.url or "") for file in self.files)

    def of_split(self, split: str) -> list[ManifestFile]:
        """The files of one split, in order."""
        return [file for file in self.files if file.split == split]


def manifest_path(directory: Path) -> Path:
    """Where the manifest of a corpus lies."""
    return directory / "manifest.jsonl"


def write_manifest(manifest: Manifest, target: Path, share: Share = "private") -> None:
    """Publishes the manifest, replacing an older one. One whose addresses have queries nobody else can write, and
    only the group can read, where `share` says so.

    Raises:
        HpcgenError: it cannot be written.
    """
    header = _Header(VERSION, manifest.source, len(manifest.files), dict(manifest.selection))
    try:
        with private_file(target) as file:
            if manifest.has_queries:  # before anything is in it
                os.fchmod(file.fileno(), 0o600 if share == "private" else 0o640)
            file.write(msgspec.json.Encoder().encode_lines([header, *manifest.files]))
            publish(file, target)
    except OSError as error:
        raise HpcgenError(f"cannot write the manifest {target}: {error.strerror}") from error


def read_manifest(path: Path) -> Manifest:
    """The manifest that `hpcgen data plan` wrote.

    Raises:
        HpcgenError: it is missing, damaged, or not a manifest; or it has what `hpcgen data plan` would refuse, such as
            a name that leads out of the corpus's directory.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise HpcgenError(f"{path}: the corpus is not planned", "run hpcgen data plan first") from error
    except OSError as error:
        raise HpcgenError(f"cannot read the manifest {path}: {error.strerror}") from error
    first, _, rest = content.partition(b"\n")
    try:
        header = msgspec.json.decode(first, type=_Header)
        files = msgspec.json.Decoder(ManifestFile).decode_lines(rest)
    except msgspec.MsgspecError as error:
        raise HpcgenError(
            f"{path}: not a manifest of hpcgen: {error}", "run hpcgen data plan again"
        ) from error
    if header.hpcgen_manifest != VERSION:
        raise HpcgenError(f"{path}: version {header.hpcgen_manifest}, and this hpcgen reads {VERSION}")
    if header.files != len(files):
        raise HpcgenError(
            f"{path}: {counted(len(files), 'file')}, and its first line says {header.files}", "plan again"
        )
    if wrong := [reason for reason, _ in problems(files)]:
        raise HpcgenError(f"{path}: {'; '.join(wrong)}", "somebody edited it: run hpcgen data plan --replan")
    return Manifest(header.source, files, header.selection)


def require_selection(job: CorpusJob) -> None:
    """Looks whether the corpus's manifest lists what the run file takes; where there is none, nothing is said.

    Raises:
        HpcgenError: the run file has changed since; the message says in which keys.
    """
    path = manifest_path(job.directory)
    try:
        with path.open("rb") as file:
            planned = msgspec.json.decode(file.readline(), type=_Header).selection
    except (OSError, msgspec.MsgspecError):
        return  # whoever reads all of it says what is wrong
    if not planned or not job.selection:
        return
    differing = [
        f"data.corpus.{key} was {planned.get(key, 'not given')} and is {job.selection.get(key, 'not given')}"
        for key in dict.fromkeys((*planned, *job.selection))
        if planned.get(key) != job.selection.get(key)
    ]
    if differing:
        raise HpcgenError(
            f"{path} was planned for another selection: {'; '.join(differing)}",
            "run hpcgen data plan --replan, or set it back",
        )
