"""hpcgen data inspect: show statistics of a pair, or one of its documents."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from hpcgen.cli.options import run_file_option
from hpcgen.config.tokenizer import TokenizerConfig
from hpcgen.errors import HpcgenError
from hpcgen.text import counted, harmless

if TYPE_CHECKING:
    from hpcgen.data.inspection import Document, Inspection

BAR_WIDTH = 40
SHOWN_CHARACTERS = 2000
SHOWN_IDS = 100


@click.command("inspect")
@click.argument("prefix", type=click.Path(path_type=Path))
@click.option(
    "--document", "number", type=int, metavar="N", help="Show document N, counted from 0; -1 is the last."
)
@click.option("--whole", is_flag=True, help="With --document: show the entire document.")
@click.option(
    "--tokenizer", metavar="NAME", help="Tokenizer of the pair: gpt2, bytes, or the path of a tokenizer.json."
)
@run_file_option("Run file that names the tokenizer, in place of --tokenizer.")
@click.option("--png", type=click.Path(path_type=Path), metavar="FILE", help="Draw the histogram to FILE.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, including the entire document.")
def command(
    prefix: Path,
    number: int | None,
    whole: bool,
    tokenizer: str | None,
    config: Path | None,
    overrides: tuple[str, ...],
    png: Path | None,
    as_json: bool,
) -> None:
    """PREFIX is the pair's path without suffix. Also reads pairs made by Megatron-LM's preprocess_data.py."""
    from hpcgen.data import inspection, pair

    made_by = _tokenizer(tokenizer, config, overrides)
    inspected, opened = inspection.inspect_pair(pair.as_prefix(prefix))
    document = inspection.read_document(opened, number, made_by) if number is not None else None
    if png is not None:
        inspection.draw_png(inspected, png)
        click.echo(f"wrote {png}", err=True)
    if as_json:
        click.echo(json.dumps(_json(inspected, document)))
    elif document is not None:
        _show_document(document, whole)
    else:
        _show(inspected)


def _tokenizer(name: str | None, config: Path | None, overrides: tuple[str, ...]) -> TokenizerConfig | None:
    if name is not None and config is not None:
        raise HpcgenError("--tokenizer and -c both name a tokenizer", "use only one of them")
    if config is not None:
        from hpcgen.run_plan.pairs import read_pairs

        return read_pairs(config, overrides).tokenizer
    if name is None:
        return None
    kinds: dict[str, Literal["gpt2", "bytes"]] = {"gpt2": "gpt2", "bytes": "bytes"}
    return TokenizerConfig(
        kind=kinds.get(name, "huggingface"), tokenizer_file=None if name in kinds else name
    )


def _json(inspection: Inspection, document: Document | None) -> dict[str, Any]:
    found = dataclasses.asdict(inspection)
    return found | ({"document": dataclasses.asdict(document)} if document else {})


def _show(inspection: Inspection) -> None:
    click.secho(f"{inspection.prefix}.bin, .idx  ({inspection.dtype})", bold=True)
    documents, empty = inspection.documents, inspection.empty_documents
    click.echo(f"documents  {documents:,} ({empty:,} empty), {counted(inspection.sequences, 'sequence')}")
    click.echo(f"tokens     {inspection.tokens:,}, mean {inspection.mean_length:,.1f} per document")
    if not inspection.histogram:
        return
    shortest = f"{inspection.shortest:,} (document {inspection.shortest_document:,})"
    longest = f"{inspection.longest:,} (document {inspection.longest_document:,})"
    click.echo(f"shortest   {shortest}\nlongest    {longest}")
    percentiles = ", ".join(f"{percent}% {length:,}" for percent, length in inspection.percentiles.items())
    click.echo(f"lengths    {percentiles}  (percentiles)\n")
    _show_histogram(inspection)


def _show_histogram(inspection: Inspection) -> None:
    rows = [("tokens per document", "documents", "share", "share of tokens")]
    for bin in inspection.histogram:
        share = bin.documents / (inspection.documents - inspection.empty_documents)
        span = f"{bin.shortest:,} to {bin.longest:,}" if bin.longest > bin.shortest else f"{bin.shortest:,}"
        rows.append((span, f"{bin.documents:,}", f"{share:.1%}", f"{bin.tokens / inspection.tokens:.1%}"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    highest = max(bin.documents for bin in inspection.histogram)
    room = max(10, min(BAR_WIDTH, shutil.get_terminal_size().columns - sum(widths) - 8))
    bars = ["", *(_bar(bin.documents / highest * room) for bin in inspection.histogram)]
    for row, bar in zip(rows, bars, strict=True):
        cells = "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        click.echo(cells + (f"  {click.style(bar, fg='cyan')}" if bar else ""))


def _bar(length: float) -> str:
    """A bar of block characters with a resolution of one eighth."""
    whole, eighths = divmod(round(length * 8), 8)
    return "█" * whole + " ▏▎▍▌▋▊▉"[eighths].strip()


def _show_document(document: Document, whole: bool) -> None:
    ids = document.ids
    click.secho(f"document {document.number:,}: {counted(len(ids), 'token')}", bold=True)
    shown = ids if whole else ids[:SHOWN_IDS]
    click.echo(f"ids {' '.join(map(str, shown))}" + _rest(len(ids) - len(shown), "ids"))
    if document.text is None:
        click.echo(
            "to show the text, add --tokenizer (gpt2, bytes or a tokenizer.json) or -c run.yaml",
            err=True,
        )
        return
    text = document.text if whole else document.text[:SHOWN_CHARACTERS]
    click.echo(harmless(text, keep="\n\t") + _rest(len(document.text) - len(text), "characters"))


def _rest(count: int, what: str) -> str:
    return click.style(f" ... and {count:,} more {what} (--whole)", dim=True) if count else ""
