"""`hpcgen data`: from text to the .bin/.idx pairs that the trainer reads."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

if TYPE_CHECKING:
    from hpcgen.config.tokenizer import TokenizerConfig

_FILE = click.Path(path_type=Path)
_PROGRESS_INTERVAL_S = 10.0
"""Between lines of progress in a log file, where no bar can be drawn."""


@click.command("tokenize")
@click.argument("inputs", metavar="INPUT...", nargs=-1, required=True, type=_FILE)
@click.option(
    "--output-prefix", required=True, type=_FILE, help="Path of the .bin/.idx pair, without the suffix."
)
@click.option(
    "--tokenizer", default="gpt2", show_default=True, help="gpt2, bytes, or the path of a tokenizer.json."
)
@click.option("--vocab-file", type=_FILE, help="vocab.json for gpt2.  [default: GPT-2's own]")
@click.option("--merges-file", type=_FILE, help="merges.txt for gpt2.  [default: GPT-2's own]")
@click.option("--eod-token", help="Token after each document; needed with a tokenizer.json.")
@click.option("--json-key", default="text", show_default=True, help="Key of the text in each JSON object.")
@click.option(
    "--drop-empty", is_flag=True, help="Leave out documents without tokens; Megatron-LM keeps them."
)
@click.option("--overwrite", is_flag=True, help="Replace an existing pair.")
@click.option(
    "--workers", type=click.IntRange(min=1), help="Blocks encoded at once.  [default: one per core]"
)
@click.option(
    "--backend",
    type=click.Choice(["auto", "gigatoken", "tokenizers"]),
    default="auto",
    show_default=True,
    help="Library that encodes; both give the same ids.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(
    inputs: tuple[Path, ...],
    tokenizer: str,
    vocab_file: Path | None,
    merges_file: Path | None,
    eod_token: str | None,
    backend: Literal["auto", "gigatoken", "tokenizers"],
    as_json: bool,
    **options: Any,
) -> None:
    """Tokenize .jsonl and .jsonl.zst files into one Megatron .bin/.idx pair."""
    from hpcgen.data.tokenize import tokenize_files
    from hpcgen.data.tokenizer import load_tokenizer

    loaded = load_tokenizer(_tokenizer_config(tokenizer, vocab_file, merges_file, eod_token), backend)
    if loaded.note:
        click.echo(f"encoding with {loaded.backend}: {loaded.note}", err=True)
    with _progress() as progress:
        report = tokenize_files(inputs, tokenizer=loaded, progress=progress, **options)
    click.echo(json.dumps(report.to_dict()) if as_json else str(report))


def _tokenizer_config(
    tokenizer: str, vocab_file: Path | None, merges_file: Path | None, eod_token: str | None
) -> TokenizerConfig:
    from hpcgen.config.tokenizer import TokenizerConfig

    names: dict[str, Literal["gpt2", "bytes"]] = {"gpt2": "gpt2", "bytes": "bytes"}
    return TokenizerConfig(
        kind=names.get(tokenizer, "huggingface"),
        vocab_file=str(vocab_file) if vocab_file else None,
        merges_file=str(merges_file) if merges_file else None,
        tokenizer_file=None if tokenizer in names else tokenizer,
        eod_token=eod_token,
    )


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A function to call with the bytes done and in all: a bar on a terminal, else a line now and then."""
    if not sys.stderr.isatty():
        yield _progress_lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("tokenize", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _progress_lines() -> Callable[[int, int], None]:
    start = last = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _PROGRESS_INTERVAL_S:
            last = now
            rate = done / 1e6 / (now - start)
            click.echo(f"read {done / total:.1%} of {total / 1e6:,.0f} MB at {rate:.1f} MB/s", err=True)

    return show
