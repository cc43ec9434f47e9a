"""hpcgen data inspect: show statistics of a pair, or one of its documents."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from hpcgen.cli.options import run_file_option
from hpcgen.config.tokenizer import TokenizerConfig
from hpcgen.errors import HpcgenError
from hpcgen.text import counted, harmless, padded

if TYPE_CHECKING:
    from hpcgen.data.inspection import Document, InspectedChat, Inspection

BAR_WIDTH = 40
SHOWN_CHARACTERS = 2000
SHOWN_IDS = 100
_NO_TOKENIZER = "to show the text, add --tokenizer (gpt2, bytes or a tokenizer.json) or -c run.yaml"


@click.command("inspect")
@click.argument("prefix", type=click.Path(path_type=Path))
@click.option(
    "--document", "number", type=int, metavar="N", help="Show document N, counted from 0; -1 is the last."
)
@click.option(
    "--chat",
    "chat_number",
    type=int,
    metavar="[N]",
    is_flag=False,
    flag_value=0,
    help="Show chat N, default 0, with the tokens that are learned in color or in ⟦brackets⟧.",
)
@click.option("--whole", is_flag=True, help="With --document or --chat: show the entire document.")
@click.option(
    "--tokenizer", metavar="NAME", help="Tokenizer of the pair: gpt2, bytes, or the path of a tokenizer.json."
)
@run_file_option("Run file that names the tokenizer, in place of --tokenizer.")
@click.option("--png", type=click.Path(path_type=Path), metavar="FILE", help="Draw the histogram to FILE.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, including the entire document.")
def command(
    prefix: Path,
    number: int | None,
    chat_number: int | None,
    whole: bool,
    tokenizer: str | None,
    config: Path | None,
    overrides: tuple[str, ...],
    png: Path | None,
    as_json: bool,
) -> None:
    """PREFIX is the pair's path without suffix. Also reads pairs made by Megatron-LM's preprocess_data.py."""
    from hpcgen.data import inspection, pair

    if number is not None and chat_number is not None:
        raise HpcgenError("--document and --chat both choose a document", "use only one of them")
    made_by = _tokenizer(tokenizer, config, overrides)
    inspected, opened = inspection.inspect_pair(pair.as_prefix(prefix))
    document = inspection.read_document(opened, number, made_by) if number is not None else None
    chat = None if chat_number is None else inspection.read_inspected_chat(opened, chat_number, made_by)
    if png is not None:
        inspection.draw_png(inspected, png)
        click.echo(f"wrote {png}", err=True)
    if as_json:
        click.echo(json.dumps(_json(inspected, document, chat)))
    elif document is not None:
        _show_document(document, whole)
    elif chat is not None:
        _show_chat(chat, whole)
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


def _json(inspection: Inspection, document: Document | None, chat: InspectedChat | None) -> dict[str, Any]:
    shown = {"document": document, "chat": chat}
    return dataclasses.asdict(inspection) | {
        name: dataclasses.asdict(value) for name, value in shown.items() if value is not None
    }


def _show(inspection: Inspection) -> None:
    click.secho(f"{inspection.prefix}.bin, .idx  ({inspection.dtype})", bold=True)
    documents, empty = inspection.documents, inspection.empty_documents
    click.echo(f"documents  {documents:,} ({empty:,} empty), {counted(inspection.sequences, 'sequence')}")
    click.echo(f"tokens     {inspection.tokens:,}, mean {inspection.mean_length:,.1f} per document")
    if inspection.learned is not None:
        share = inspection.learned / inspection.tokens if inspection.tokens else 0
        answers = counted(inspection.answers or 0, "answer")
        click.echo(f"learned    {counted(inspection.learned, 'token')} ({share:.1%}) of {answers}")
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
    lines = ["  ".join(cells) for cells in padded(rows, right=range(4))]
    highest = max(bin.documents for bin in inspection.histogram)
    room = max(10, min(BAR_WIDTH, shutil.get_terminal_size().columns - len(lines[0]) - 2))
    bars = ["", *(_bar(bin.documents / highest * room) for bin in inspection.histogram)]
    for line, bar in zip(lines, bars, strict=True):
        click.echo(line + (f"  {click.style(bar, fg='cyan')}" if bar else ""))


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
        click.echo(_NO_TOKENIZER, err=True)
        return
    text = document.text if whole else document.text[:SHOWN_CHARACTERS]
    click.echo(harmless(text, keep="\n\t") + _rest(len(document.text) - len(text), "characters"))


def _show_chat(chat: InspectedChat, whole: bool) -> None:
    """Shows the text of a chat; without a tokenizer, its IDs."""
    learned = (
        f"{chat.learned:,} learned ({chat.learned / chat.tokens:.1%}) in {counted(chat.answers, 'answer')}"
    )
    click.secho(f"chat {chat.number:,}: {counted(chat.tokens, 'token')}, {learned}", bold=True)
    has_color = sys.stdout.isatty() and click.get_current_context().color is not False
    left = sys.maxsize if whole else SHOWN_CHARACTERS
    hidden = 0
    for piece in chat.pieces:
        text = " ".join(map(str, piece.ids)) if piece.text is None else harmless(piece.text, keep="\n\t")
        shown, separator = text[:left], " " if piece.text is None else ""
        left, hidden = left - len(shown), hidden + len(text) - len(shown)
        if not shown or not piece.learned:
            click.echo(shown + separator, nl=False)
        else:
            click.echo(
                (click.style(shown, fg="green", bold=True) if has_color else f"⟦{shown}⟧") + separator,
                nl=False,
            )
    click.echo(_rest(hidden, "characters"))
    if any(piece.text is None for piece in chat.pieces):
        click.echo(_NO_TOKENIZER, err=True)


def _rest(count: int, what: str) -> str:
    return click.style(f" ... and {count:,} more {what} (--whole)", dim=True) if count else ""
