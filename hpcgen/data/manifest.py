"""The manifest: the frozen list of a corpus's files, in order. Every later stage is decided by it alone.

A JSON Lines file. The first line describes the corpus, each further line one file:
    {"hpcgen_manifest": 1, "source": "hub cerebras/SlimPajama-627B at 2d0accdd58c5", "files": 59166}
    {"name": "train/chunk1/example_train_0.jsonl.zst", "size": 15700000, "sha256": "...", "split": "train", "url": "https://..."}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hpcgen.errors import HpcgenError
from hpcgen.files import private_file, publish

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


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    hpcgen_manifest: int
    source: str
    files: int


@dataclass(frozen=True)
class Manifest:
    """A corpus, frozen."""

    source: str
    """Where it comes from, for people."""
    files: Sequence[ManifestFile]

    def of_split(self, split: str) -> list[ManifestFile]:
        """The files of one split, in order."""
        return [file for file in self.files if file.split == split]


def manifest_path(directory: Path) -> Path:
    """Where the manifest of a corpus lies."""
    return directory / "manifest.jsonl"


def write_manifest(manifest: Manifest, target: Path) -> None:
    """Publishes the manifest, replacing an older one.

    Raises:
        HpcgenError: it cannot be written.
    """
    header = _Header(VERSION, manifest.source, len(manifest.files))
    try:
        with private_file(target) as file:
            file.write(msgspec.json.Encoder().encode_lines([header, *manifest.files]))
            publish(file, target)
    except OSError as error:
        raise HpcgenError(f"cannot write the manifest {target}: {error.strerror}") from error


def read_manifest(path: Path) -> Manifest:
    """The manifest that `hpcgen data plan` wrote.

    Raises:
        HpcgenError: it is missing, damaged, or not a manifest.
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
        raise HpcgenError(f"{path}: {len(files)} files, and its first line says {header.files}", "plan again")
    return Manifest(header.source, files)
