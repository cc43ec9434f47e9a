"""What a source holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcgen.config.corpus import WHOLE
from hpcgen.data.manifest import ManifestFile

UNSPLIT = WHOLE
"""The split of files before `hpcgen.data.selection` says which they belong to."""


@dataclass(frozen=True)
class Listing:
    """The files of a source, in order."""

    source: str
    """Where they come from, for people."""
    files: Sequence[ManifestFile]
