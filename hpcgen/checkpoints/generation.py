"""Runs the trainer's text generation in a process of its own, since hpcgen does not import torch."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hpcgen.config import tokenizer as tokenizers
from hpcgen.config.corpus import ChatConfig
from hpcgen.config.tokenizer import TokenizerConfig
from hpcgen.errors import FilePlace, HpcgenError
from hpcgen.slurm.processes import end_with_parent, term_exits
from trainer.contract.files.regular_file import read_bytes

MODULE = "trainer.inference"
PACKAGES = {"torch": "torch", "megatron": "megatron-core", "tokenizers": "tokenizers"}
"""Module -> package that installs it."""


def run_generation(arguments: Sequence[str]) -> int:
    """Runs `python -m trainer.inference ARGUMENTS` with this process's input and output. Returns its status.

    Raises:
        HpcgenError: packages that it needs are not installed.
    """
    if missing := [package for module, package in PACKAGES.items() if find_spec(module) is None]:
        needs = f"hpcgen generate needs {', '.join(missing)}"
        raise HpcgenError(f"{needs}. Install it with: pip install 'hpcgen[train,data]'")
    # A local folder named trainer must not be imported.
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", MODULE, *arguments]
    with term_exits(), subprocess.Popen(command, env=environment, preexec_fn=end_with_parent) as process:
        try:
            return process.wait()
        except BaseException:
            process.terminate()
            raise


@contextlib.contextmanager
def prompt_file(*prompts: str) -> Iterator[Path]:
    """A private file with prompts. Other users can see the arguments of a process, but not this file."""
    with tempfile.TemporaryDirectory(prefix="hpcgen-prompt-") as directory:
        path = Path(directory, "prompt.jsonl")
        path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        yield path


def chat_prompts(
    documents: Iterable[tuple[str, Mapping[str, Any]]], tokenizer: TokenizerConfig, chat: ChatConfig | None
) -> tuple[list[str], str | None]:
    """Renders chats that a model is to answer. Returns the prompts, and the token that ends an answer, if it is known.

    Args:
        documents: JSON objects with `messages`, each with its place for error messages.
        chat: How the chats of the model's corpus became text. A template that writes today's date gets its `date`, or
            else the date of today.

    Raises:
        HpcgenError: there is no chat template, or a chat cannot be rendered.
    """
    from hpcgen.data.chat_template import chat_template  # imports Jinja
    from trainer.chats.chat import read_prompt
    from trainer.chats.errors import BadChatError, ChatTemplateError

    today = datetime.datetime.now(tz=datetime.timezone.utc).astimezone().date().isoformat()
    chat = chat or ChatConfig()
    template = chat_template(dataclasses.replace(chat, date=chat.date or today), tokenizer)
    prompts = []
    for place, document in documents:
        try:
            prompts.append(template.render(read_prompt(document), add_generation_prompt=True))
        except BadChatError as error:
            raise HpcgenError(error.reason, where=place) from error
        except ChatTemplateError as error:
            raise HpcgenError(error.mistakes[0]) from error
    return prompts, template.end_of_turn()


def read_chats(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the JSON objects in a JSON Lines file, each with its place. - is standard input.

    Raises:
        HpcgenError: the file cannot be read, or a line is not a JSON object.
    """
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else read_bytes(path)
    except OSError as error:
        raise HpcgenError(f"{error.strerror}", "name a JSON Lines file with messages", where=path) from error
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        place = FilePlace(path, number)
        try:
            document = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise HpcgenError(f"not JSON ({error})", where=place) from error
        if not isinstance(document, dict):
            raise HpcgenError("not a JSON object", 'write lines such as {"messages": [...]}', where=place)
        yield place, document


@contextlib.contextmanager
def tokenizer_arguments(config: TokenizerConfig) -> Iterator[list[str]]:
    """Arguments that name the tokenizer of a run. Its files exist until the end of the block.

    Raises:
        HpcgenError: a key is missing, or a file is missing or invalid.
    """
    for problem in tokenizers.problems(config):
        raise HpcgenError(f"{problem.path} {problem.reason}", problem.hint)
    token = config.eod_token
    end = ["--eod-token", token] if token is not None else []
    if config.kind != "bytes":
        tokenizers.tokens(config)
    if config.kind == "huggingface":
        yield ["--tokenizer", str(Path(str(config.tokenizer_file)).absolute()), *end]
    elif config.vocab_file is None:
        yield ["--tokenizer", config.kind, *end]
    else:
        with tempfile.TemporaryDirectory(prefix="hpcgen-tokenizer-") as directory:
            for file, name in zip(tokenizers.gpt2_files(config), ("vocab.json", "merges.txt"), strict=True):
                Path(directory, name).symlink_to(file.absolute())
            yield ["--tokenizer", directory, *end]
