"""hpcgen data plan: freeze the list of a corpus's files."""

from __future__ import annotations

import json
from pathlib import Path

import click

from hpcgen.cli.data.stage import corpus_options
from hpcgen.cli.options import program, run_arguments, warn
from hpcgen.files import shared_as


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
    The first documents of local files are read, so that mistakes such as a wrong key of the text are found before a job
    is queued.
    """
    from hpcgen.data import corpus_plan, first_documents, manifest, plan_summary
    from hpcgen.run_plan.corpus_job import read_job_to_plan

    job, warnings = read_job_to_plan(config, overrides)
    warn(warnings)
    plan = corpus_plan.plan_corpus(job, hash_contents=hash_contents)
    first_documents.check_first_documents(job, plan.manifest)
    path = manifest.manifest_path(job.directory)
    with shared_as(job.share):
        written = not dry_run and corpus_plan.freeze(plan, job, replan=replan)
    if as_json:
        summary = plan_summary.summarize(plan, job)
        click.echo(json.dumps({"manifest": str(path), "written": written, **summary}))
        return
    for line in plan_summary.plan_lines(plan, job):
        click.echo(line)
    if dry_run:
        click.echo(f"dry run: did not write {path}", err=True)
        return
    click.echo(f"wrote {path}" if written else f"{path} is up to date", err=True)
    stages = "download prepare" if plan.needs_downloads else "prepare"
    click.echo(f"next: {program()} submit {stages} {run_arguments(config, overrides)}", err=True)
