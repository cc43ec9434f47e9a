"""Planning of a corpus: list its source, select files, and freeze them in the manifest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcgen.config.corpus import SPLITS, WHOLE, CorpusJob, num_outputs
from hpcgen.data.listed_files import ManifestFile
from hpcgen.data.manifest import Manifest, manifest_path, read_manifest, write_manifest
from hpcgen.data.record import FileIdentity
from hpcgen.data.selection import Selection, select
from hpcgen.data.sources import list_source
from hpcgen.data.sources.directory import with_hashes
from hpcgen.data.stores.local import refuse_in_shared_corpus
from hpcgen.data.unit import is_local
from hpcgen.errors import HpcgenError
from hpcgen.files import make_directory


@dataclass(frozen=True)
class Difference:
    """Difference between an existing manifest and a new one."""

    added: int = 0
    removed: int = 0
    changed: int = 0
    """Files with the same name but a different size, hash, modification time or split."""
    restated: int = 0
    """Files that have the same content, as far as known, but a new URL or a hash that was unknown before."""
    reordered: bool = False
    """True if the common files are in a different order."""

    def __bool__(self) -> bool:
        return self != Difference()

    def __str__(self) -> str:
        counts = {
            "added": self.added,
            "removed": self.removed,
            "changed": self.changed,
            "with another URL or hash": self.restated,
        }
        parts = [f"{count:,} {what}" for what, count in counts.items() if count]
        return ", ".join([*parts, "in another order"] if self.reordered else parts)


@dataclass(frozen=True)
class CorpusPlan:
    """Planned corpus that is not frozen yet."""

    manifest: Manifest
    selection: Selection
    before: Manifest | None
    """The existing manifest, if it is readable."""
    unreadable: str = ""
    """Reason why the existing manifest is unreadable."""
    left_out_links: Sequence[str] = ()
    """Symbolic links in the source directory that lead to directories or to nothing."""

    @property
    def difference(self) -> Difference | None:
        """Difference from the existing manifest; None if there is no readable manifest."""
        return None if self.before is None else difference(self.before, self.manifest)

    @property
    def needs_downloads(self) -> bool:
        """True if some files are not on this file system."""
        return not all(map(is_local, self.manifest.files))


@dataclass(frozen=True)
class SplitSummary:
    """Number and size of a split's files, and number of its outputs."""

    split: str
    files: int
    bytes: int
    """Total of the known file sizes in the source."""
    outputs: int
    """Number of .bin/.idx pairs."""


def split_summaries(job: CorpusJob, manifest: Manifest) -> list[SplitSummary]:
    """Summarizes each split, in the order train, valid, test."""
    outputs = num_outputs(job.corpus)
    by_split = {split: manifest.of_split(split) for split in (*SPLITS, WHOLE)}
    return [
        SplitSummary(split, len(files), sum(file.size or 0 for file in files), outputs.get(split, 0))
        for split, files in by_split.items()
        if files
    ]


def plan_corpus(job: CorpusJob, *, hash_contents: bool = False) -> CorpusPlan:
    """Lists the source and selects files. Writes nothing.

    `hash_contents` computes the SHA-256 of local files, so that they are identified by content and not by modification
    time.

    Raises:
        HpcgenError: the source is missing or denies access, or its files do not match the configuration.
    """
    listing = list_source(job)
    refuse_in_shared_corpus((file.url for file in listing.files if file.url), job.share)
    selection = select(listing.files, job.corpus, listing.source)
    files = with_hashes(selection.files) if hash_contents else selection.files
    manifest, path = Manifest(listing.source, files, job.selection), manifest_path(job.directory)
    before, unreadable = None, ""
    try:
        before = read_manifest(path) if path.exists() else None
    except HpcgenError as error:
        unreadable = str(error)
    return CorpusPlan(manifest, selection, before, unreadable, listing.left_out_links)


def freeze(plan: CorpusPlan, job: CorpusJob, *, replan: bool) -> bool:
    """Writes the manifest. Returns False if the same manifest already exists.

    Other settings that select the same files need no `replan`, because only the manifest's own header changes.

    Raises:
        HpcgenError: another manifest exists and `replan` is false, or the manifest cannot be written.
    """
    path = manifest_path(job.directory)
    if plan.unreadable and not replan:
        raise HpcgenError(plan.unreadable)
    if plan.before == plan.manifest:
        return False
    if plan.difference and not replan:
        raise HpcgenError(
            f"{path} already exists and differs from this plan, which has {plan.difference}",
            "keep it, or replace it with --replan: later stages then make the outputs of changed files again",
        )
    make_directory(job.directory, job.share)
    write_manifest(plan.manifest, path, job.share)
    return True


def difference(old: Manifest, new: Manifest) -> Difference:
    """Compares two manifests."""
    before = {file.name: file for file in old.files}
    after = {file.name: file for file in new.files}
    both = [name for name in after if name in before]
    changed = sum(not _same(before[name], after[name]) for name in both)
    other = sum(before[name] != after[name] for name in both)
    return Difference(
        added=len(after) - len(both),
        removed=len(before) - len(both),
        changed=changed,
        restated=other - changed,
        reordered=both != [name for name in before if name in after],
    )


def _same(old: ManifestFile, new: ManifestFile) -> bool:
    return old.split == new.split and _identity(old).same_content(_identity(new))


def _identity(file: ManifestFile) -> FileIdentity:
    return FileIdentity(file.name, file.size, file.sha256, file.modified_ns, file.version)
