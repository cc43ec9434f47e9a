"""hpcgen checkpoint export: write a checkpoint as a Hugging Face directory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click

from hpcgen.checkpoints.conversion import convert, require_tokenizer, tokenizer_arguments
from hpcgen.checkpoints.finding import find_checkpoint
from hpcgen.cli.checkpoint.paths import complete_checkpoints, destination_option
from hpcgen.cli.options import read_absolute
from hpcgen.config.huggingface_export import FamilyName
from hpcgen.config.tokenizer import TokenizerConfig
from hpcgen.errors import HpcgenError
from hpcgen.text import harmless

if TYPE_CHECKING:
    from trainer.contract.files.checkpoint_files import Checkpoint

GPT2 = "gpt2"


@click.command("export")
@click.argument(
    "checkpoint", metavar="CHECKPOINT", type=click.Path(path_type=Path), shell_complete=complete_checkpoints
)
@destination_option
@click.option(
    "--dtype",
    type=click.Choice(("bf16", "fp16", "fp32")),
    help="Data type of the weights.  [default: the checkpoint's]",
)
@click.option(
    "--tokenizer",
    metavar="gpt2|PATH",
    help="Tokenizer to include: GPT-2's, a tokenizer.json, or a directory with tokenizer files.",
)
@click.option(
    "--eod-token", metavar="TOKEN", help="With a tokenizer.json: the token at the end of a document."
)
@click.option(
    "-c",
    "--config",
    type=click.Path(path_type=Path),
    metavar="RUN.YAML",
    help="Include the tokenizer of this run file, in place of --tokenizer.",
)
@click.option(
    "--family",
    type=click.Choice(get_args(FamilyName)),
    help="Model family.  [default: the first that can express the model]",
)
@click.option(
    "--vocab-size",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of tokens, for a checkpoint that does not record it.",
)
@click.option(
    "--adapter",
    is_flag=True,
    help="Write the LoRA adapters as a directory of PEFT.  [default: merge them into the model]",
)
@click.option(
    "--base-model",
    metavar="NAME|DIR",
    help="With --adapter: the base model that adapter_config.json names.  [default: the imported directory]",
)
@click.option(
    "--check",
    is_flag=True,
    help="Compare logits with transformers, which must be installed, before DIR appears.",
)
@click.pass_context
def command(
    ctx: click.Context,
    checkpoint: Path,
    destination: Path,
    dtype: str | None,
    tokenizer: str | None,
    eod_token: str | None,
    config: Path | None,
    family: str | None,
    vocab_size: int | None,
    adapter: bool,
    base_model: str | None,
    check: bool,
) -> None:
    """CHECKPOINT is a checkpoint of the trainer or of Megatron-LM. For a run directory or a directory of checkpoints,
    the newest complete checkpoint is exported. Needs torch and safetensors, but no GPU.
    """
    found = find_checkpoint(checkpoint)
    if base_model is not None and not adapter:
        raise click.UsageError("--base-model requires --adapter")
    options = {
        "--dtype": dtype,
        "--family": family,
        "--vocab-size": vocab_size,
        "--base-model": base_model,
    }
    flags = [name for name, given in {"--adapter": adapter, "--check": check}.items() if given]
    given = [str(part) for name, value in options.items() if value is not None for part in (name, value)]
    with _tokenizer_arguments(found, tokenizer, eod_token, config) as tokenizer_options:
        arguments = [str(found.path), "--to", str(destination), *given, *tokenizer_options]
        ctx.exit(convert(["export", *arguments, *flags], _echo))


def _echo(line: str) -> None:
    click.echo(harmless(line), err=True)


@contextlib.contextmanager
def _tokenizer_arguments(
    found: Checkpoint, tokenizer: str | None, eod_token: str | None, config: Path | None
) -> Iterator[list[str]]:
    from hpcgen.planning.inputs import chat_template_options

    if config is not None:
        if tokenizer is not None or eod_token is not None:
            raise HpcgenError("--config and --tokenizer both name a tokenizer", "use only one of them")
        run = read_absolute(config)
        require_tokenizer(found, run.data.tokenizer)
        template = [
            f"{name}={value}" for name, value in chat_template_options(run).items() if value is not None
        ]
        with tokenizer_arguments(run.data.tokenizer) as arguments:
            yield [*arguments, *template]
    elif tokenizer == GPT2:
        require_tokenizer(found, TokenizerConfig())
        with tokenizer_arguments(TokenizerConfig()) as arguments:
            yield arguments
    elif tokenizer is not None:
        yield ["--tokenizer", tokenizer, *(("--eos-token", eod_token) if eod_token else ())]
    elif eod_token is not None:
        raise HpcgenError("--eod-token requires --tokenizer", "name a tokenizer.json")
    else:
        yield []
