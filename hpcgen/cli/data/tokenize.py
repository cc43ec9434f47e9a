"""hpcgen data tokenize: tokenize the given files, or run one task of the stage tokenize."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import click
from click.core import ParameterSource

from hpcgen.cli.data.progress import shown
from hpcgen.cli.data.stage import run_stage, task_options, verify_option
from hpcgen.config.corpus import ChatConfig
from hpcgen.config.tokenizer import TokenizerConfig
from hpcgen.errors import HpcgenError

_FILE = click.Path(path_type=Path)
_FRACTION = click.FloatRange(min=0, max=1)
_STAGE_OPTIONS = ("config", "overrides", "task_id", "num_tasks")
_SHARED_OPTIONS = ("workers", "as_json", "verify_fraction", *_STAGE_OPTIONS)


@click.command("tokenize")
@click.argument("inputs", metavar="[INPUT...]", nargs=-1, type=_FILE)
@click.option(
    "--output-prefix", type=_FILE, help="With INPUT: path of the .bin/.idx pair, without the suffix."
)
@click.option(
    "--tokenizer", default="gpt2", show_default=True, help="gpt2, bytes, or the path of a tokenizer.json."
)
@click.option("--vocab-file", type=_FILE, help="vocab.json for gpt2.  [default: shipped with hpcgen]")
@click.option("--merges-file", type=_FILE, help="merges.txt for gpt2.  [default: shipped with hpcgen]")
@click.option("--eod-token", help="Token after each document; required with a tokenizer.json.")
@click.option(
    "--json-key",
    default="text",
    show_default=True,
    help="Key of the text in each JSON object, or its column in Parquet files.",
)
@click.option("--chat", is_flag=True, help="The documents are chats, and only the answers are learned.")
@click.option(
    "--chat-template",
    type=_FILE,
    help="With --chat: path of a chat template.  [default: the one next to the tokenizer.json]",
)
@click.option(
    "--chat-date",
    type=click.DateTime(["%Y-%m-%d"]),
    metavar="YYYY-MM-DD",
    help="With --chat: date that the chat template writes.",
)
@click.option(
    "--drop-empty",
    is_flag=True,
    help="Drop documents without tokens. Default: keep them, as Megatron-LM does.",
)
@click.option(
    "--bad-documents",
    type=click.Choice(["fail", "skip"]),
    default="fail",
    show_default=True,
    help="Lines or rows without readable text: fail stops, skip writes them to PREFIX.rejects.jsonl.",
)
@click.option(
    "--max-bad-fraction",
    type=_FRACTION,
    metavar="F",
    default=0.001,
    show_default=True,
    help="With --bad-documents skip: maximum fraction of bad documents.",
)
@verify_option
@click.option("--overwrite", is_flag=True, help="Replace an existing pair.")
@click.option(
    "--backend",
    type=click.Choice(["auto", "gigatoken", "tokenizers"]),
    default="auto",
    show_default=True,
    help="Tokenizer library. Both produce the same token IDs.",
)
@task_options
@click.pass_context
def command(context: click.Context, /, inputs: tuple[Path, ...], **options: Any) -> None:
    """INPUT files become one Megatron .bin/.idx pair.

    \b
    hpcgen data tokenize a.jsonl b.jsonl.zst c.jsonl.gz d.parquet --output-prefix tokens/abc
    hpcgen data tokenize -c run.yaml [--task-id T --num-tasks N]
    """
    given = [name for name in options if context.get_parameter_source(name) != ParameterSource.DEFAULT]
    if inputs or options["output_prefix"]:
        _refuse(given, _STAGE_OPTIONS, "cannot be used with INPUT files, only with a corpus (-c RUN.YAML)")
        _tokenize(inputs, **{name: value for name, value in options.items() if name not in _STAGE_OPTIONS})
    else:
        input_options = [name for name in options if name not in _SHARED_OPTIONS]
        _refuse(
            given,
            input_options,
            "can only be used with INPUT files. For a corpus, set data.corpus and data.tokenizer in the run file",
        )
        if "config" not in given and not options["config"].exists():
            raise HpcgenError(
                "nothing to tokenize: no INPUT was given and there is no run.yaml here",
                "use INPUT... --output-prefix PREFIX, or -c RUN.YAML",
            )
        run_stage("tokenize", **{name: options[name] for name in _SHARED_OPTIONS})


def _refuse(given: list[str], others: tuple[str, ...] | list[str], reason: str) -> None:
    """Refuses options that apply only to the other use of the command."""
    flags = {"overrides": "--set"}
    wrong = [flags.get(name, f"--{name.replace('_', '-')}") for name in given if name in others]
    if wrong:
        raise HpcgenError(f"{', '.join(wrong)} {reason}", "see hpcgen data tokenize --help")


def _tokenize(
    inputs: tuple[Path, ...],
    *,
    output_prefix: Path | None,
    tokenizer: str,
    vocab_file: Path | None,
    merges_file: Path | None,
    eod_token: str | None,
    backend: Literal["auto", "gigatoken", "tokenizers"],
    as_json: bool,
    verify_fraction: float | None,
    workers: int | None,
    chat: bool,
    chat_template: Path | None,
    chat_date: datetime | None,
    **options: Any,
) -> None:
    if not inputs:
        raise HpcgenError(
            "--output-prefix requires INPUT files", "add .jsonl, .jsonl.zst, .jsonl.gz or .parquet files"
        )
    if output_prefix is None:
        raise HpcgenError(
            "INPUT files require --output-prefix", "add --output-prefix PREFIX, the path of the pair to write"
        )
    from hpcgen.data.tokenize_files import tokenize_files
    from hpcgen.data.tokenizer import load_tokenizer

    config = _tokenizer_config(tokenizer, vocab_file, merges_file, eod_token)
    options["chat"] = _chat_config(chat, chat_template, chat_date)
    loaded = load_tokenizer(config, backend)
    if loaded.note:
        click.echo(f"encoding with {loaded.backend}: {loaded.note}", err=True)
    if verify_fraction is not None:
        options["verify_fraction"] = verify_fraction
    with shown() as on_progress:
        report = tokenize_files(
            inputs, output_prefix, loaded, workers=workers, on_progress=on_progress, **options
        )
    click.echo(json.dumps(report.to_dict()) if as_json else str(report))


def _chat_config(chat: bool, template: Path | None, date: datetime | None) -> ChatConfig | None:
    given = {"--chat-template": template, "--chat-date": date}
    if not chat:
        for name, value in given.items():
            if value is not None:
                raise HpcgenError(f"{name} has no effect without --chat", "add --chat, or remove it")
        return None
    return ChatConfig(
        chat_template_file=str(template) if template else None,
        date=date.date().isoformat() if date else None,
    )


def _tokenizer_config(
    tokenizer: str, vocab_file: Path | None, merges_file: Path | None, eod_token: str | None
) -> TokenizerConfig:
    names: dict[str, Literal["gpt2", "bytes"]] = {"gpt2": "gpt2", "bytes": "bytes"}
    return TokenizerConfig(
        kind=names.get(tokenizer, "huggingface"),
        vocab_file=str(vocab_file) if vocab_file else None,
        merges_file=str(merges_file) if merges_file else None,
        tokenizer_file=None if tokenizer in names else tokenizer,
        eod_token=eod_token,
    )
