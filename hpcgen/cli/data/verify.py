"""hpcgen data verify: check pairs, their records, and how Megatron-Core reads them."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcgen.cli.options import run_file_option
from hpcgen.errors import HpcgenError
from hpcgen.text import counted, duration, few, size_text

if TYPE_CHECKING:
    from hpcgen.data.verification import OnProgress, PairReport, VerifyReport

PROGRESS_INTERVAL_S = 10.0
"""Seconds between progress lines when stderr is not a terminal."""


@click.command("verify")
@click.argument("prefixes", metavar="[PREFIX]...", nargs=-1, type=click.Path(path_type=Path))
@run_file_option(
    "Run file with the tokenizer; without PREFIX, all its pairs are verified.  [default without PREFIX: run.yaml]"
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of pairs read in parallel.  [default: one per core]",
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
    """Checks the index against the token IDs, and sizes and SHA-256 against the record next to the pair. If
    Megatron-Core is installed, also compares counts and documents with what its IndexedDataset reads. PREFIX is a
    pair's path with or without the suffix .bin or .idx, or a directory that `hpcgen data export` wrote. Rows of an
    export are compared with the pairs that they were made from. Exits with status 1 if there are problems.
    """
    from hpcgen.data.verification import verify
    from hpcgen.run_plan import pairs

    if exports := [path for path in prefixes if path.is_dir()]:
        noun, report = "shard", _verify_export(prefixes, exports[0], workers)
    else:
        run = pairs.read_named(prefixes, config, overrides)
        manifest = pairs.manifest_of_run(run)
        with _progress() as on_progress:
            report = verify(
                pairs.expected_pairs(prefixes, run, manifest),
                workers=workers,
                megatron=not no_megatron,
                on_progress=on_progress,
                manifest=manifest,
            )
        noun = "pair"
    if as_json:
        shown = [{**vars(pair), "findings": list(map(str, pair.findings))} for pair in report.pairs]
        click.echo(json.dumps({**vars(report), "pairs": shown}, indent=1))
    else:
        for pair in report.pairs:
            _show(pair)
    _summarize(report, noun)
    if report.num_wrong:
        sys.exit(1)


def _verify_export(named: tuple[Path, ...], directory: Path, workers: int | None) -> VerifyReport:
    """Verifies the export in a directory, the only path that may be named."""
    from hpcgen.data.export_verification import verify_export

    if len(named) > 1:
        raise HpcgenError(
            f"{directory} is an export, and {counted(len(named) - 1, 'other path')} cannot be verified with it",
            "name it alone",
        )
    with _progress() as on_progress:
        return verify_export(directory, workers=workers, on_progress=on_progress)


@contextlib.contextmanager
def _progress() -> Iterator[OnProgress]:
    """A callback for the bytes read and the total: a bar on a terminal, occasional lines elsewhere."""
    if not sys.stderr.isatty():
        yield _progress_lines()
        return
    from hpcgen.cli.terminal import (
        BarColumn,
        DownloadColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
        bars,
    )

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with bars(*columns) as bar:
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


def _summarize(report: VerifyReport, noun: str) -> None:
    pairs = report.pairs
    hashed = sum(pair.hashes_checked for pair in pairs)
    total = size_text(sum(pair.bytes for pair in pairs))
    click.echo(f"{report.num_wrong} of {counted(len(pairs), noun)} wrong, {total} read", err=True)
    click.echo(f"SHA-256: {hashed} compared with their records, {len(pairs) - hashed} without one", err=True)
    megatron = (
        f"megatron-core {report.megatron_core}: read {sum(pair.megatron_checked for pair in pairs)}"
        if report.megatron_core
        else f"megatron-core: not checked: {report.not_checked}"
    )
    rows = sum(pair.rows_checked for pair in pairs)
    without = (
        f", {len(pairs) - rows} not compared, because the pair is gone or has changed"
        if rows < len(pairs)
        else ""
    )
    click.echo(megatron if noun == "pair" else f"rows: {rows} compared with their pairs{without}", err=True)
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
