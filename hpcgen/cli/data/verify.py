"""hpcgen data verify: check pairs, their records, and how Megatron-Core reads them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcgen.cli.data.pairs import RunPairs, read_pairs, run_file_option
from hpcgen.errors import HpcgenError
from hpcgen.text import counted, duration, few, size_text

if TYPE_CHECKING:
    from hpcgen.data.manifest import Manifest
    from hpcgen.data.verification import Expected, OnProgress, PairReport, VerifyReport

PROGRESS_INTERVAL_S = 10.0
"""Seconds between progress lines when stderr is not a terminal."""


@click.command("verify")
@click.argument("prefixes", metavar="[PREFIX]...", nargs=-1, type=click.Path(path_type=Path))
@run_file_option(
    "Run file with the tokenizer; without PREFIX, all its pairs are verified.  [default without PREFIX: run.yaml]"
)
@click.option(
    "--workers", type=click.IntRange(min=1), help="Number of pairs read in parallel.  [default: one per core]"
)
@click.option("--no-megatron", is_flag=True, help="Do not run Megatron-Core's reader.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def command(
    prefixes: tuple[Path, ...],
    config: Path | None,
    overrides: tuple[str, ...],
    workers: int | None,
    no_megatron: bool,
    as_json: bool,
) -> None:
    """Read .bin/.idx pairs completely and report problems.

    Checks the index against the token ids, and sizes and SHA-256 against the record next to the pair. If Megatron-Core
    is installed, also compares counts and documents with those that its IndexedDataset reads. PREFIX is a pair's path
    with or without the suffix .bin or .idx. Exits with status 1 if there are problems.
    """
    from hpcgen.data.task import cores
    from hpcgen.data.verification import verify

    run = _read(prefixes, config, overrides)
    manifest = _manifest(run)
    with _progress() as on_progress:
        report = verify(
            _expected(prefixes, run, manifest),
            workers=workers or cores(),
            megatron=not no_megatron,
            on_progress=on_progress,
            manifest=manifest,
        )
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(report), indent=1))
    else:
        for pair in report.pairs:
            _show(pair)
    _summarize(report)
    if report.num_wrong:
        sys.exit(1)


def _read(named: tuple[Path, ...], config: Path | None, overrides: tuple[str, ...]) -> RunPairs | None:
    """The pairs of the run file; None without a run file."""
    if config is None and not named and Path("run.yaml").exists():
        config = Path("run.yaml")
    return read_pairs(config, overrides) if config is not None else None


def _manifest(run: RunPairs | None) -> Manifest | None:
    """The manifest of the run's corpus, if there is one."""
    from hpcgen.data.manifest import manifest_path, read_manifest

    if run is None or run.job is None:
        return None
    path = manifest_path(run.job.directory)
    return read_manifest(path) if path.exists() else None


def _expected(
    named: tuple[Path, ...], run: RunPairs | None, manifest: Manifest | None
) -> dict[Path, Expected]:
    """The expected properties of each pair to verify."""
    from hpcgen.config import tokenizer as tokenizers
    from hpcgen.data.pair import as_prefixes
    from hpcgen.data.pair_records import find_records, pairs_without_vocabulary_hash, stale_pairs
    from hpcgen.data.verification import Expected

    prefixes = as_prefixes(named) or (list(run.prefixes) if run else [])
    if not prefixes:
        raise HpcgenError(
            "no pairs to verify", "name prefixes, or with -c a run file that has a corpus or datasets"
        )
    records = find_records(prefixes)
    if run is None:
        return {prefix: Expected(record=records.get(prefix)) for prefix in prefixes}
    made = {prefix for prefix in prefixes if _is_made(run, prefix)}
    recorded = {prefix: record for prefix, record in records.items() if prefix in made}
    stale = stale_pairs(run.job, manifest, recorded) if run.job else {}
    unnamed = pairs_without_vocabulary_hash(run.job, recorded) if run.job else set()
    size, eod = tokenizers.vocab_size(run.tokenizer), tokenizers.eod_id(run.tokenizer)
    return {
        prefix: Expected(
            record=records.get(prefix),
            needs_record=prefix in made,
            stale=stale.get(prefix, ""),
            vocab_size=size,
            eod_id=eod,
            encoded_by=run.tokenizer if prefix in unnamed else None,
        )
        for prefix in prefixes
    }


def _is_made(run: RunPairs, prefix: Path) -> bool:
    """Returns True if the run's own stages produce the pair."""
    return run.job is not None and prefix.absolute().parent == run.job.directory / "tokens"


@contextlib.contextmanager
def _progress() -> Iterator[OnProgress]:
    """A callback for the bytes read and the total: a bar on a terminal, occasional lines elsewhere."""
    if not sys.stderr.isatty():
        yield _progress_lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("verify", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _progress_lines() -> OnProgress:
    start = last = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= PROGRESS_INTERVAL_S:
            last = now
            rate = done / (now - start)
            remaining = duration(round((total - done) / rate))
            click.echo(
                f"read {done / total:.1%} of {size_text(total)} at {size_text(round(rate))}/s, {remaining} left",
                err=True,
            )

    return show


def _show(pair: PairReport) -> None:
    word = click.style("WRONG", fg="red") if pair.findings else click.style("ok", fg="green")
    held = f"{counted(pair.documents, 'document')}, {counted(pair.tokens, 'token')}, "
    held += f"{size_text(pair.bytes)}, {pair.dtype}"
    note = "" if pair.findings or pair.hashes_checked else ", no record"
    click.echo(f"{click.style(pair.prefix, bold=True)}: {word}" + (f"  {held}{note}" if pair.dtype else ""))
    for finding in pair.findings:
        click.echo(f"    {finding}")


def _summarize(report: VerifyReport) -> None:
    pairs = report.pairs
    hashed = sum(pair.hashes_checked for pair in pairs)
    total = size_text(sum(pair.bytes for pair in pairs))
    click.echo(f"{report.num_wrong} of {counted(len(pairs), 'pair')} wrong, {total} read", err=True)
    click.echo(f"SHA-256: {hashed} compared with their records, {len(pairs) - hashed} without one", err=True)
    megatron = (
        f"megatron-core {report.megatron_core}: read {sum(pair.megatron_checked for pair in pairs)}"
        if report.megatron_core
        else f"megatron-core: not checked: {report.not_checked}"
    )
    click.echo(megatron, err=True)
    if encoded := [pair for pair in pairs if pair.documents_encoded]:
        held, again = (
            sum(getattr(pair, key) for pair in encoded) for key in ("documents", "documents_encoded")
        )
        click.echo(
            f"vocabulary: the records of {counted(len(encoded), 'pair')} were written by an older hpcgen and do not "
            f"identify GPT-2's vocabulary. Encoding {again:,} of {counted(held, 'document')} again gave the same ids",
            err=True,
        )
    if report.unmeasured:
        click.echo(
            f"sources: {counted(len(report.unmeasured), 'file')} with neither size nor SHA-256 in the manifest, "
            f"so truncated downloads would not be noticed ({few(report.unmeasured)})",
            err=True,
        )
