"""hpcgen generate: continue prompts with a trained model."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcgen.checkpoints import generation
from hpcgen.checkpoints.finding import find_checkpoint
from hpcgen.cli.checkpoint.paths import complete_checkpoints
from hpcgen.cli.options import override_option, read_absolute
from hpcgen.errors import ConfigErrors, HpcgenError
from trainer.contract.config.choice import text_problem
from trainer.contract.files.run_directory import RunDirectory

if TYPE_CHECKING:
    from hpcgen.config.run import RunConfig

PASSED_ON = (
    *("max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "seed", "batch_size"),
    *("device", "precision"),
)
"""Options that are passed to the trainer unchanged."""


@click.command("generate")
@click.option(
    "-c",
    "--config",
    type=click.Path(path_type=Path),
    metavar="RUN.YAML",
    help="The run file: its tokenizer, and its newest complete checkpoint.",
)
@override_option
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    metavar="PATH",
    shell_complete=complete_checkpoints,
    help="An iter_... directory, or the newest complete checkpoint in a directory of checkpoints or of a run.",
)
@click.option(
    "--tokenizer",
    metavar="gpt2|bytes|PATH",
    help="Without -c: the tokenizer by name, a tokenizer.json, or a directory with tokenizer files.",
)
@click.option("--eod-token", metavar="TOKEN", help="With --tokenizer: the token at the end of a document.")
@click.option("--prompt", metavar="TEXT", help="Text to continue.")
@click.option(
    "--prompts",
    type=click.Path(path_type=Path, allow_dash=True),
    metavar="FILE.JSONL",
    help='JSON Lines such as {"prompt": "Once upon a time"}; - reads standard input.',
)
@click.option(
    "--chat",
    is_flag=True,
    help="Answer --prompt, or each line typed, as the user's message in a chat. Uses the chat template of the corpus, "
    "or else the tokenizer's.",
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="Maximum number of new tokens.  [default: 128]",
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    metavar="T",
    help="Draw tokens from the distribution at this temperature.  [default: 0, always the most likely token]",
)
@click.option(
    "--top-k", type=click.IntRange(min=1), metavar="K", help="Draw only from the K most likely tokens."
)
@click.option(
    "--top-p",
    type=click.FloatRange(min=0, max=1, min_open=True),
    metavar="P",
    help="Draw only from the most likely tokens whose probabilities add up to P.",
)
@click.option(
    "--repetition-penalty",
    type=click.FloatRange(min=0, min_open=True),
    metavar="F",
    help="Factor by which tokens that already occur in the text become less likely.  [default: 1]",
)
@click.option("--stop", multiple=True, metavar="STRING", help="End the text before this string; repeatable.")
@click.option("--seed", type=int, metavar="N", help="Seed of the draws.  [default: 1234]")
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of prompts to continue together.  [default: 32]",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Write JSON Lines. Default for --prompts unless the output is a terminal.",
)
@click.option(
    "--device", type=click.Choice(["cuda", "cpu"]), help="Device.  [default: a GPU if there is one]"
)
@click.option(
    "--precision",
    type=click.Choice(["bf16", "fp16", "fp32"]),
    help="Data type of the weights.  [default: as in training]",
)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    config: Path | None,
    overrides: tuple[str, ...],
    checkpoint: Path | None,
    tokenizer: str | None,
    eod_token: str | None,
    prompt: str | None,
    prompts: Path | None,
    chat: bool,
    stop: tuple[str, ...],
    as_json: bool,
    **options: object,
) -> None:
    """Loads a checkpoint of any layout into one process, on a GPU or on a CPU. Without --prompt and --prompts,
    continues the lines typed on a terminal. Needs torch, megatron-core and tokenizers.
    """
    if prompt is not None and prompts is not None:
        raise HpcgenError("--prompt and --prompts both give prompts", "use only one of them")
    if chat and prompts is not None:
        hint = "remove it; lines of --prompts with messages are chats without it"
        raise HpcgenError("--chat has no effect with --prompts", hint)
    if prompt is None and prompts is None and not sys.stdin.isatty():
        raise HpcgenError("no prompt, and standard input is not a terminal", "use --prompt or --prompts")
    texts = (("--prompt", prompt or ""), *(("--stop", string) for string in stop))
    if problems := [problem for option, text in texts if (problem := text_problem(option, text))]:
        raise ConfigErrors(problems)
    run = _read_run(config, overrides)
    where = checkpoint or _checkpoints_of(run)
    found = find_checkpoint(where)
    arguments = [str(found.path)]
    for name in PASSED_ON:
        if options[name] is not None:
            arguments += [f"--{name.replace('_', '-')}", str(options[name])]
    if run is not None and (chat or prompts is not None):  # lines of --prompts can be chats too
        arguments += _chat_options(run)
    arguments += [f"--stop={string}" for string in stop]
    if as_json or (prompts is not None and not sys.stdout.isatty()):
        arguments.append("--json")
    with contextlib.ExitStack() as stack:
        arguments += stack.enter_context(_tokenizer(run, tokenizer, eod_token))
        if prompt is not None:
            message = {"messages": [{"role": "user", "content": prompt}]}
            prompts = stack.enter_context(generation.prompt_file(message if chat else {"prompt": prompt}))
        if prompts is not None:
            arguments += ["--prompts", str(prompts)]
        elif chat:
            arguments.append("--chat")
        status = generation.run_generation(arguments)
    ctx.exit(status)


def _chat_options(run: RunConfig) -> Iterator[str]:
    """The options for the chat template of the run's corpus."""
    from hpcgen.stages.generate import chat_options

    return chat_options(run)


def _read_run(config: Path | None, overrides: tuple[str, ...]) -> RunConfig | None:
    """The run file with absolute paths; None if there is no run file."""
    if config is None:
        if overrides:
            raise HpcgenError("--set requires a run file", "use -c run.yaml")
        return None
    return read_absolute(config, overrides)


def _checkpoints_of(run: RunConfig | None) -> Path:
    """The directory in which a run saves its checkpoints."""
    if run is None:
        raise HpcgenError("no checkpoint is named", "use --checkpoint PATH, or -c run.yaml")
    directory = RunDirectory.at(Path(run.paths.run_dir), save=run.checkpoint.save).checkpoints
    if not directory.is_dir():
        raise HpcgenError(
            "no such directory, so the run has no checkpoint yet", "train it first", where=directory
        )
    return directory


@contextlib.contextmanager
def _tokenizer(run: RunConfig | None, tokenizer: str | None, eod_token: str | None) -> Iterator[list[str]]:
    """Arguments that name the tokenizer."""
    if run is not None:
        if tokenizer is not None or eod_token is not None:
            raise HpcgenError("--config and --tokenizer both name a tokenizer", "use only one of them")
        with generation.tokenizer_arguments(run.data.tokenizer) as arguments:
            yield arguments
        return
    if tokenizer is None:
        raise HpcgenError(
            "a checkpoint does not record its tokenizer",
            "use -c run.yaml, or --tokenizer gpt2, bytes or PATH",
        )
    yield ["--tokenizer", tokenizer, *(("--eod-token", eod_token) if eod_token is not None else ())]
