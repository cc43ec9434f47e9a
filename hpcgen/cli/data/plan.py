"""hpcgen data plan: freeze the list of a corpus's files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcgen.cli.data.stage import corpus_options, read_job_to_plan
from hpcgen.cli.options import program, run_arguments
from hpcgen.errors import HpcgenError

if TYPE_CHECKING:
    from hpcgen.config.corpus import CorpusJob
    from hpcgen.data.corpus_plan import CorpusPlan, SplitSummary

_USUAL_PAIR = 16_000_000_000
"""Bytes of source files for one pair: a few minutes of a task with several cores."""
_LARGE_PAIR = 2 * _USUAL_PAIR


@click.command("plan")
@corpus_options
@click.option(
    "--hash",
    "hash_contents",
    is_flag=True,
    help="Read all local files and record their SHA-256.",
)
@click.option("--replan", is_flag=True, help="Replace an existing manifest that differs.")
@click.option("--dry-run", is_flag=True, help="Print the plan without writing the manifest.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def command(
    config: Path, overrides: tuple[str, ...], hash_contents: bool, replan: bool, dry_run: bool, as_json: bool
) -> None:
    """Lists the source, selects files and writes manifest.jsonl, which every later stage reads in place of the source.
    The first documents of local files are read, so that mistakes such as another key of the text are found before a
    job is queued.
    """
    from hpcgen.data.corpus_plan import freeze, plan_corpus
    from hpcgen.data.first_documents import check_first_documents
    from hpcgen.data.manifest import manifest_path
    from hpcgen.data.unit import is_local
    from hpcgen.files import shared_as

    job = read_job_to_plan(config, overrides)
    plan = plan_corpus(job, hash_contents=hash_contents)
    check_first_documents(job, plan.manifest)
    with shared_as(job.share):
        written = not dry_run and freeze(plan, job, replan=replan)
    if as_json:
        summary = _summary(plan, job)
        click.echo(json.dumps({"manifest": str(manifest_path(job.directory)), "written": written, **summary}))
        return
    for line in _lines(plan, job):
        click.echo(line)
    path = manifest_path(job.directory)
    if dry_run:
        click.echo(f"dry run: did not write {path}", err=True)
        return
    click.echo(f"wrote {path}" if written else f"{path} is up to date", err=True)
    downloads = not all(map(is_local, plan.manifest.files))
    stages = "download prepare" if downloads else "prepare"
    click.echo(f"next: {program()} submit {stages} {run_arguments(config, overrides)}", err=True)


def _summary(plan: CorpusPlan, job: CorpusJob) -> dict[str, Any]:
    """The plan as JSON."""
    from dataclasses import asdict

    from hpcgen.data.corpus_plan import split_summaries

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


def _lines(plan: CorpusPlan, job: CorpusJob) -> list[str]:
    """The plan as lines of text."""
    from hpcgen.data.corpus_plan import split_summaries
    from hpcgen.data.unit import is_local
    from hpcgen.text import counted, few, size_text

    summary, selection = _summary(plan, job), plan.selection
    unknown = summary["files_of_unknown_size"]
    size = f"{size_text(summary['bytes'])}{f', {unknown:,} of unknown size' if unknown else ''}"
    rows = [("source", plan.manifest.source), ("files", f"{summary['files']:,} ({size})")]
    for split in split_summaries(job, plan.manifest):
        pairs = counted(split.outputs, ".bin/.idx pair")
        text = f"{counted(split.files, 'file')}, {size_text(split.bytes)} -> {pairs}"
        rows.append((split.split, text))
    left_out = {
        "not recognized as data by name": selection.not_data,
        "matching no pattern of include": selection.not_included,
        "not in the sample": selection.not_sampled,
    }
    rows += [("left out", f"{counted(count, 'file')} {why}") for why, count in left_out.items() if count]
    if names := selection.in_no_split:
        rows.append(
            ("left out", f"{counted(len(names), 'file')} matching no pattern of splits: {few(names)}")
        )
    if links := plan.left_out_links:
        rows.append(("left out", f"{counted(len(links), 'link')} to directories or to nothing: {few(links)}"))
    rows += _space_rows(plan, job)
    rows += _large_pair_rows(split_summaries(job, plan.manifest))
    if plan.manifest.has_queries:
        readers = "you" if job.share == "private" else "you and your group"
        rows.append(
            (
                "note",
                f"URLs contain queries, which may be signatures, so only {readers} can read the manifest",
            )
        )
    if unhashed := sum(is_local(file) and file.sha256 is None for file in plan.manifest.files):
        damage = "damage is detected only by checksums inside the files; --hash records their SHA-256"
        rows.append(
            ("note", f"{counted(unhashed, 'file')} known only by size and modification time: {damage}")
        )
    if plan.difference:
        rows.append(("changes", f"from the existing manifest: {plan.difference}"))
    return [f"{heading:<9} {text}" for heading, text in rows]


def _large_pair_rows(splits: Sequence[SplitSummary]) -> list[tuple[str, str]]:
    """Advice for splits with few and large pairs."""
    from hpcgen.text import counted, size_text

    rows = []
    for split in splits:
        if split.bytes > _LARGE_PAIR * split.outputs:
            key = "num_eval_output_files" if split.split in ("valid", "test") else "num_output_files"
            pairs = counted(split.outputs, "pair")
            advice = f"set data.corpus.{key} to about {-(-split.bytes // _USUAL_PAIR)}"
            reason = "one task makes a pair, and starts it again after a kill"
            rows.append(("note", f"{size_text(split.bytes)} in {pairs}: {reason}; {advice}"))
    return rows


def _space_rows(plan: CorpusPlan, job: CorpusJob) -> list[tuple[str, str]]:
    """The disk space of each route from the source to pairs; empty if the tokenizer is not available here."""
    from hpcgen.data.space import Need, bounds_text, estimates
    from hpcgen.data.stages import ROUTES

    try:
        needs = estimates(job, plan.manifest)
    except HpcgenError:
        return []
    rows = []
    for route in ROUTES:
        needed = [stage.name for stage in route if needs[stage.name].most]
        total = sum((needs[stage] for stage in needed), Need())
        rows.append(("space", f"{' + '.join(needed)}: {bounds_text(total)}"))
    return rows
