"""Planning a corpus: its source is listed, what it takes is chosen, and the manifest freezes that."""

from __future__ import annotations

from dataclasses import dataclass

from hpcgen.config.corpus import SPLITS, WHOLE, CorpusJob, num_outputs
from hpcgen.data.manifest import Manifest, ManifestFile, manifest_path, read_manifest, write_manifest
from hpcgen.data.record import FileIdentity
from hpcgen.data.selection import Selection, select
from hpcgen.data.sources import list_source
from hpcgen.data.sources.directory import with_hashes
from hpcgen.errors import HpcgenError
from hpcgen.files import make_directory


@dataclass(frozen=True)
class Difference:
    """What a new manifest changes in the one that is there."""

    added: int = 0
    removed: int = 0
    changed: int = 0
    """Files of the same name with another size, hash, time of change or split."""
    restated: int = 0
    """Files of the same content as far as is known, at another address, or whose hash is known only now."""
    reordered: bool = False
    """Whether the files that both have come in another order."""

    def __bool__(self) -> bool:
        return self != Difference()

    def __str__(self) -> str:
        counts = {
            "added": self.added,
            "removed": self.removed,
            "changed": self.changed,
            "with another address or hash": self.restated,
        }
        parts = [f"{count:,} {what}" for what, count in counts.items() if count]
        return ", ".join([*parts, "in another order"] if self.reordered else parts)


@dataclass(frozen=True)
class CorpusPlan:
    """A corpus as it would be frozen."""

    manifest: Manifest
    selection: Selection
    before: Manifest | None
    """The manifest that is there already, when it can be read."""
    unreadable: str = ""
    """Why it cannot."""

    @property
    def difference(self) -> Difference | None:
        """What is new; None where there is no manifest yet."""
        return None if self.before is None else difference(self.before, self.manifest)


@dataclass(frozen=True)
class SplitSummary:
    """What a split holds and becomes."""

    split: str
    files: int
    bytes: int
    """Of the files whose size is known, as the source has them."""
    outputs: int
    """.bin/.idx pairs."""


def split_summaries(job: CorpusJob, manifest: Manifest) -> list[SplitSummary]:
    """One summary for each split, in the order train, valid, test."""
    outputs = num_outputs(job.corpus)
    by_split = {split: manifest.of_split(split) for split in (*SPLITS, WHOLE)}
    return [
        SplitSummary(split, len(files), sum(file.size or 0 for file in files), outputs.get(split, 0))
        for split, files in by_split.items()
        if files
    ]


def plan_corpus(job: CorpusJob, *, hash_contents: bool = False) -> CorpusPlan:
    """Lists the source and chooses; writes nothing.

    `hash_contents` computes the SHA-256 of files that lie here, which then count by their content and not by their
    times.

    Raises:
        HpcgenError: the source is gone or refuses us; what it holds does not fit the configuration.
    """
    listing = list_source(job)
    selection = select(listing.files, job.corpus, listing.source)
    files = with_hashes(selection.files) if hash_contents else selection.files
    manifest, path = Manifest(listing.source, files, job.selection), manifest_path(job.directory)
    try:
        return CorpusPlan(manifest, selection, read_manifest(path) if path.exists() else None)
    except HpcgenError as error:
        return CorpusPlan(manifest, selection, None, str(error))


def freeze(plan: CorpusPlan, job: CorpusJob, *, replan: bool) -> bool:
    """Writes the manifest; False where the same one is there already.

    Another selection that takes the same files needs no `replan`: nothing changes but what the manifest says of it.

    Raises:
        HpcgenError: another manifest is there and `replan` is not given, or it cannot be written.
    """
    path = manifest_path(job.directory)
    if plan.unreadable and not replan:
        raise HpcgenError(plan.unreadable, "with --replan, which replaces it")
    if plan.before == plan.manifest:
        return False
    if plan.difference and not replan:
        raise HpcgenError(
            f"{path} is another manifest: against it, this plan has {plan.difference}",
            "keep it, or use --replan: what later stages made of files that changed is then made again",
        )
    make_directory(job.directory, job.share)
    write_manifest(plan.manifest, path, job.share)
    return True


def difference(old: Manifest, new: Manifest) -> Difference:
    """What `new` changes in `old`."""
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
    return FileIdentity(file.name, file.size, file.sha256, file.modified_ns)
