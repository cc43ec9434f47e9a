"""Result of listing a source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcgen.config.corpus import WHOLE
from hpcgen.data.listed_files import ManifestFile

UNSPLIT = WHOLE
"""Split of files before `hpcgen.data.selection` assigns them."""


@dataclass(frozen=True)
class Listing:
    """The files of a source, in order."""

    source: str
    """Description of the source, for messages."""
    files: Sequence[ManifestFile]
    left_out_links: Sequence[str] = ()
    """Names of symbolic links that are not listed: to directories, or to nothing."""
