"""The manifest: the frozen, ordered list of a corpus's files. It alone determines what every later stage reads.

It is a JSON Lines file. The first line describes the corpus, each further line one file:
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
from hpcgen.data.listed_files import ManifestFile, problems
from hpcgen.errors import HpcgenError
from hpcgen.files import Share, private_file, publish
from hpcgen.text import counted
from trainer.contract.files.regular_file import open_regular, read_bytes

VERSION = 1


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    hpcgen_manifest: int
    source: str
    files: int
    selection: dict[str, str] = {}


@dataclass(frozen=True)
class Manifest:
    """Frozen list of a corpus's files."""

    source: str
    """Description of the source, for messages."""
    files: Sequence[ManifestFile]
    selection: Mapping[str, str] = field(default_factory=dict)
    """Settings of the run file that select files (hpcgen.config.corpus.selection); empty if none are set."""

    @property
    def has_queries(self) -> bool:
        """True if a URL has a query. It may be a signature, which gives its holder access to the corpus."""
        return any("?" in (file.url or "") for file in self.files)

    def of_split(self, split: str) -> list[ManifestFile]:
        """Files of one split, in order."""
        return [file for file in self.files if file.split == split]


def manifest_path(directory: Path) -> Path:
    """Path of the manifest of the corpus in `directory`."""
    return directory / "manifest.jsonl"


def write_manifest(manifest: Manifest, target: Path, share: Share = "private") -> None:
    """Publishes the manifest and replaces an older one.

    A manifest whose URLs have queries is writable only by its owner. The group can read it unless `share` is private.

    Raises:
        HpcgenError: the manifest cannot be written.
    """
    header = _Header(VERSION, manifest.source, len(manifest.files), dict(manifest.selection))
    try:
        with private_file(target) as file:
            if manifest.has_queries:  # before any content is written
                os.fchmod(file.fileno(), 0o600 if share == "private" else 0o640)
            file.write(msgspec.json.Encoder().encode_lines([header, *manifest.files]))
            publish(file, target)
    except OSError as error:
        raise HpcgenError(f"cannot write the manifest {target}: {error.strerror}") from error


def planned(job: CorpusJob) -> Manifest:
    """The manifest of the corpus of a job.

    Raises:
        HpcgenError: see `read_manifest`.
    """
    return read_manifest(manifest_path(job.directory))


def read_manifest(path: Path) -> Manifest:
    """Reads the manifest that `hpcgen data plan` wrote.

    Raises:
        HpcgenError: the file is missing, damaged or not a manifest, or has entries that `hpcgen data plan` would
            reject, such as a name that leads out of the corpus's directory.
    """
    try:
        content = read_bytes(path)
    except FileNotFoundError as error:
        raise HpcgenError("the corpus has no manifest", "run hpcgen data plan first", where=path) from error
    except OSError as error:
        raise HpcgenError(f"cannot read the manifest {path}: {error.strerror}") from error
    first, _, rest = content.partition(b"\n")
    try:
        header = msgspec.json.decode(first, type=_Header)
        files = msgspec.json.Decoder(ManifestFile).decode_lines(rest)
    except msgspec.MsgspecError as error:
        raise HpcgenError(
            f"not an hpcgen manifest: {error}", "run hpcgen data plan --replan", where=path
        ) from error
    if header.hpcgen_manifest != VERSION:
        raise HpcgenError(
            f"format version {header.hpcgen_manifest}, but this hpcgen reads version {VERSION}",
            "run hpcgen data plan --replan",
            where=path,
        )
    if header.files != len(files):
        raise HpcgenError(
            f"it lists {counted(len(files), 'file')}, but its first line has files = {header.files}",
            "run hpcgen data plan --replan",
            where=path,
        )
    if wrong := [problem.reason for problem in problems(files)]:
        raise HpcgenError(
            "; ".join(wrong),
            "the manifest was edited after planning: run hpcgen data plan --replan",
            where=path,
        )
    return Manifest(header.source, files, header.selection)


def require_selection(job: CorpusJob) -> None:
    """Checks that the run file still selects the files of the manifest. Does nothing without a manifest.

    Raises:
        HpcgenError: the selection in the run file has changed; the message names the keys.
    """
    path = manifest_path(job.directory)
    try:
        with open_regular(path) as file:
            planned = msgspec.json.decode(file.readline(), type=_Header).selection
    except (OSError, msgspec.MsgspecError):
        return  # read_manifest reports the error
    if not planned or not job.selection:
        return
    differing = [
        f"data.corpus.{key} was {planned.get(key, 'not set')} and is now {job.selection.get(key, 'not set')}"
        for key in dict.fromkeys((*planned, *job.selection))
        if planned.get(key) != job.selection.get(key)
    ]
    if differing:
        raise HpcgenError(
            f"{path} was planned with a different selection: {'; '.join(differing)}",
            "run hpcgen data plan --replan, or restore the old values",
        )
