"""The command line of `python -m trainer.inference`, and the options and texts that it names."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.chats.prompts import ChatOptions, Texts, texts_of
from trainer.contract.errors import TrainerError
from trainer.contract.prompts import Prompt, parse_prompts
from trainer.inference.generation import Options


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    defaults = Options()
    found = argparse.ArgumentParser(
        prog="python -m trainer.inference", description="Continues prompts with a trained model."
    )
    found.add_argument(
        "checkpoint", type=Path, help="an iter_... directory, or a directory of checkpoints or of a run"
    )
    found.add_argument("--prompts", metavar="FILE", help="JSON Lines with prompts; - is standard input")
    found.add_argument(
        "--tokenizer",
        required=True,
        metavar="gpt2|bytes|PATH",
        help="tokenizer by name, a tokenizer.json, or a directory with tokenizer files",
    )
    found.add_argument("--eod-token", metavar="TOKEN", help="token at the end of a document")
    found.add_argument(
        "--chat", action="store_true", help="without --prompts: each line is a message of the user in a chat"
    )
    found.add_argument("--chat-template", metavar="FILE", help="default: the tokenizer's")
    found.add_argument("--chat-template-name", metavar="NAME", help="one of several templates")
    found.add_argument("--chat-date", metavar="YYYY-MM-DD", help="date for templates that write today's date")
    found.add_argument("--json", action="store_true", help="write JSON Lines")
    found.add_argument(
        "--output", type=Path, metavar="FILE", help="write JSON Lines into this file, once all texts are done"
    )
    found.add_argument("--max-new-tokens", type=int, metavar="N", default=defaults.max_new_tokens)
    found.add_argument("--temperature", type=float, metavar="T", default=defaults.temperature)
    found.add_argument("--top-k", type=int, metavar="K")
    found.add_argument("--top-p", type=float, metavar="P")
    found.add_argument("--repetition-penalty", type=float, metavar="F", default=defaults.repetition_penalty)
    found.add_argument("--stop", action="append", metavar="STRING", default=[])
    found.add_argument("--seed", type=int, metavar="N", default=defaults.seed)
    found.add_argument("--batch-size", type=int, metavar="N", default=defaults.batch_size)
    found.add_argument("--device", choices=("cuda", "cpu"), help="default: a GPU if there is one")
    found.add_argument("--precision", choices=("bf16", "fp16", "fp32"), help="default: as in training")
    found.add_argument(
        "--tensor-model-parallel-size", type=int, metavar="N", help="default: ranks / pipeline stages"
    )
    found.add_argument("--pipeline-model-parallel-size", type=int, metavar="N", default=1)
    return found


def generation_options(arguments: argparse.Namespace, ends: tuple[str, ...] = ()) -> Options:
    """The options for generation. Each of `ends` ends an answer in a chat."""
    values = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(Options)}
    return Options(**values | {"stop": (*arguments.stop, *ends)})


def texts_of_file(arguments: argparse.Namespace) -> Texts:
    """The texts of the prompts in the file of --prompts.

    Raises:
        TrainerError: the file cannot be used, or a chat cannot be rendered.
    """
    return texts_of_prompts(read_prompts(arguments.prompts), arguments)


def texts_of_prompts(prompts: Sequence[Prompt], arguments: argparse.Namespace) -> Texts:
    """The texts of prompts, of which chats are rendered with the chosen template.

    Raises:
        TrainerError: a chat cannot be rendered.
    """
    options = ChatOptions(arguments.chat_template, arguments.chat_template_name, arguments.chat_date)
    return texts_of(prompts, arguments.tokenizer, options)


def read_prompts(path: str) -> list[Prompt]:
    """The prompts of a JSON Lines file; "-" is standard input.

    Raises:
        TrainerError: the file cannot be read, or lines have no prompt.
    """
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise TrainerError(f"{error.strerror}. Name a JSON Lines file with prompts", where=path) from error
    return parse_prompts(path, data)
