"""The plan of a corpus as JSON and as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

from hpcgen.config.corpus import CorpusJob
from hpcgen.data.corpus_plan import CorpusPlan, SplitSummary, split_summaries
from hpcgen.data.space import Need, bounds_text, estimates
from hpcgen.data.stages import ROUTES
from hpcgen.data.unit import is_local
from hpcgen.errors import HpcgenError
from hpcgen.text import counted, few, size_text

Row: TypeAlias = tuple[str, str]
"""The heading of a line and its text."""

_USUAL_PAIR = 16_000_000_000
"""Bytes of source files for one pair: a few minutes of a task with several cores."""
_LARGE_PAIR = 2 * _USUAL_PAIR


def summarize(plan: CorpusPlan, job: CorpusJob) -> dict[str, Any]:
    """The plan as JSON."""
    files, selection = plan.manifest.files, plan.selection
    return {
        "source": plan.manifest.source,
        "files": len(files),
        "bytes": sum(file.size or 0 for file in files),
        "files_of_unknown_size": sum(file.size is None for file in files),
        "files_of_known_hash": sum(file.sha256 is not None for file in files),
        "splits": {summary.split: asdict(summary) for summary in split_summaries(job, plan.manifest)},
        "left_out": {
            "not_data": selection.not_data,
            "not_included": selection.not_included,
            "in_no_split": len(selection.in_no_split),
            "not_sampled": selection.not_sampled,
            "links": len(plan.left_out_links),
        },
        "difference": None if plan.difference is None else asdict(plan.difference),
    }


def plan_lines(plan: CorpusPlan, job: CorpusJob) -> list[str]:
    """The plan as lines of text."""
    rows = [
        *_file_rows(plan, job),
        *_left_out_rows(plan),
        *_space_rows(plan, job),
        *_large_pair_rows(split_summaries(job, plan.manifest)),
        *_manifest_rows(plan, job),
    ]
    return [f"{heading:<9} {text}" for heading, text in rows]


def _file_rows(plan: CorpusPlan, job: CorpusJob) -> Iterator[Row]:
    """Yields the source, and the files of each split."""
    summary = summarize(plan, job)
    unknown = summary["files_of_unknown_size"]
    size = f"{size_text(summary['bytes'])}{f', {unknown:,} of unknown size' if unknown else ''}"
    yield "source", plan.manifest.source
    yield "files", f"{summary['files']:,} ({size})"
    for split in split_summaries(job, plan.manifest):
        pairs = counted(split.outputs, ".bin/.idx pair")
        yield split.split, f"{counted(split.files, 'file')}, {size_text(split.bytes)} -> {pairs}"


def _left_out_rows(plan: CorpusPlan) -> Iterator[Row]:
    """Yields the files of the source that are not in the corpus."""
    selection = plan.selection
    left_out = {
        "not recognized as data by name": selection.not_data,
        "matching no pattern of include": selection.not_included,
        "not in the sample": selection.not_sampled,
    }
    for why, count in left_out.items():
        if count:
            yield "left out", f"{counted(count, 'file')} {why}"
    if names := selection.in_no_split:
        yield "left out", f"{counted(len(names), 'file')} matching no pattern of splits: {few(names)}"
    if links := plan.left_out_links:
        yield "left out", f"{counted(len(links), 'link')} to directories or to nothing: {few(links)}"


def _manifest_rows(plan: CorpusPlan, job: CorpusJob) -> Iterator[Row]:
    """Yields who can read the manifest, files that it does not identify by a hash, and what it changes."""
    if plan.manifest.has_queries:
        readers = "you" if job.share == "private" else "you and your group"
        yield (
            "note",
            f"URLs contain queries, which may be signatures, so only {readers} can read the manifest",
        )
    if unhashed := sum(is_local(file) and file.sha256 is None for file in plan.manifest.files):
        damage = "damage is detected only by checksums inside the files; --hash records their SHA-256"
        yield "note", f"{counted(unhashed, 'file')} known only by size and modification time: {damage}"
    if plan.difference:
        yield "changes", f"from the existing manifest: {plan.difference}"


def _large_pair_rows(splits: Sequence[SplitSummary]) -> Iterator[Row]:
    """Yields advice for splits with few and large pairs."""
    for split in splits:
        if split.bytes > _LARGE_PAIR * split.outputs:
            key = "num_eval_output_files" if split.split in ("valid", "test") else "num_output_files"
            pairs = counted(split.outputs, "pair")
            advice = f"set data.corpus.{key} to about {-(-split.bytes // _USUAL_PAIR)}"
            reason = "one task makes a pair, and starts it again after a kill"
            yield "note", f"{size_text(split.bytes)} in {pairs}: {reason}; {advice}"


def _space_rows(plan: CorpusPlan, job: CorpusJob) -> Iterator[Row]:
    """Yields the disk space of each route from the source to pairs; nothing if the tokenizer is not available here."""
    try:
        needs = estimates(job, plan.manifest)
    except HpcgenError:
        return
    for route in ROUTES:
        needed = [stage.name for stage in route if needs[stage.name].most]
        total = sum((needs[stage] for stage in needed), Need())
        yield "space", f"{' + '.join(needed)}: {bounds_text(total)}"
