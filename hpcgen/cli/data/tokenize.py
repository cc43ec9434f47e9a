"""hpcgen data tokenize: .bin/.idx of the files that are named, or one task of the stage tokenize."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from click.core import ParameterSource

from hpcgen.cli.data.stage import run_stage, task_options, verify_option
from hpcgen.errors import HpcgenError

if TYPE_CHECKING:
    from hpcgen.config.tokenizer import TokenizerConfig

_FILE = click.Path(path_type=Path)
_FRACTION = click.FloatRange(min=0, max=1)
_OF_STAGE = ("config", "overrides", "task_id", "num_tasks")
_OF_BOTH = ("workers", "as_json", "verify_fraction", *_OF_STAGE)


@click.command("tokenize")
@click.argument("inputs", metavar="[INPUT...]", nargs=-1, type=_FILE)
@click.option(
    "--output-prefix", type=_FILE, help="With INPUT: path of the .bin/.idx pair, without the suffix."
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
@click.option(
    "--bad-documents",
    type=click.Choice(["fail", "skip"]),
    default="fail",
    show_default=True,
    help="What a line without a readable text does: end it all, or go to PREFIX.rejects.jsonl.",
)
@click.option(
    "--max-bad-fraction",
    type=_FRACTION,
    default=0.001,
    show_default=True,
    help="With skip: the largest share of bad documents.",
)
@verify_option
@click.option("--overwrite", is_flag=True, help="Replace an existing pair.")
@click.option(
    "--backend",
    type=click.Choice(["auto", "gigatoken", "tokenizers"]),
    default="auto",
    show_default=True,
    help="Library that encodes; both give the same ids.",
)
@task_options
@click.pass_context
def command(context: click.Context, /, inputs: tuple[Path, ...], **options: Any) -> None:
    """Tokenize the INPUT files into one Megatron .bin/.idx pair, or the concatenated files of a corpus.

    \b
    hpcgen data tokenize a.jsonl b.jsonl.zst c.jsonl.gz --output-prefix tokens/abc
    hpcgen data tokenize -c run.yaml [--task-id T --num-tasks N]
    """
    given = [name for name in options if context.get_parameter_source(name) != ParameterSource.DEFAULT]
    if inputs or options["output_prefix"]:
        _refuse(given, _OF_STAGE, "belong to a corpus (-c RUN.YAML), and not to INPUT files")
        _tokenize(inputs, **{name: value for name, value in options.items() if name not in _OF_STAGE})
    else:
        of_inputs = [name for name in options if name not in _OF_BOTH]
        _refuse(given, of_inputs, "belong to INPUT files; of a corpus, data.corpus and data.tokenizer say it")
        if "config" not in given and not options["config"].exists():
            raise HpcgenError(
                "nothing to tokenize: there is no INPUT, and no run.yaml here",
                "give INPUT... --output-prefix PREFIX, or -c RUN.YAML",
            )
        run_stage("tokenize", **{name: options[name] for name in _OF_BOTH})


def _refuse(given: list[str], others: tuple[str, ...] | list[str], reason: str) -> None:
    """Options that mean something to the other use of the command alone are mistakes."""
    flags = {"overrides": "--set"}
    wrong = [flags.get(name, f"--{name.replace('_', '-')}") for name in given if name in others]
    if wrong:
        raise HpcgenError(
            f"{', '.join(wrong)} {reason}", "use one of the two ways: hpcgen data tokenize --help"
        )


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
    **options: Any,
) -> None:
    if not inputs:
        raise HpcgenError("--output-prefix names no INPUT", "give the .jsonl, .jsonl.zst or .jsonl.gz files")
    if output_prefix is None:
        raise HpcgenError(
            "the INPUT files need a place for their pair",
            "give --output-prefix PREFIX (or -c RUN.YAML alone)",
        )
    from hpcgen.cli.data.progress import shown
    from hpcgen.data.tokenize_files import tokenize_files
    from hpcgen.data.tokenizer import limit_threads, load_tokenizer
    from hpcgen.data.workers import cores

    threads = workers or cores()
    limit_threads(threads)
    config = _tokenizer_config(tokenizer, vocab_file, merges_file, eod_token)
    loaded = load_tokenizer(config, backend, threads=threads)
    if loaded.note:
        click.echo(f"encoding with {loaded.backend}: {loaded.note}", err=True)
    if verify_fraction is not None:
        options["verify_fraction"] = verify_fraction
    with shown() as on_progress:
        report = tokenize_files(
            inputs, output_prefix, loaded, workers=threads, on_progress=on_progress, **options
        )
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
