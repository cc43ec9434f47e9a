"""Answers to the prompts of a file, or of a terminal, from all ranks. Imports megatron.core: after `prepare_device`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from trainer.chats.prompts import Texts
from trainer.contract.errors import TrainerError
from trainer.contract.files.run_directory import publish
from trainer.contract.prompts import Prompt
from trainer.contract.wording import counted
from trainer.distributed import groups
from trainer.distributed.rendezvous import Ranks
from trainer.inference.arguments import generation_options, texts_of_file, texts_of_prompts
from trainer.inference.generation import Completion, generate
from trainer.inference.model import Model
from trainer.inference.tokenizer import Tokenizer

T = TypeVar("T")

WAIT_S = 24 * 3600
"""Time that replicas wait for each other."""


def answer(
    model: Model, tokenizer: Tokenizer, found: Texts | None, arguments: argparse.Namespace, ranks: Ranks
) -> None:
    """Continue the prompts of a file. `found` are those that have been read early."""
    found = _from_rank_0(lambda: found or texts_of_file(arguments), ranks)
    prompts, options = found.texts, generation_options(arguments, found.ends)
    # A terminal shows a single text while it is generated.
    is_shown = len(prompts) == 1 and not arguments.json and not arguments.output and sys.stdout.isatty()
    started, num_tokens, lines = time.monotonic(), 0, []
    on_text = _print if is_shown and ranks.rank == 0 else None
    completions = generate(model, tokenizer, prompts, options, on_text)
    if model.replica[1] > 1:
        completions = _from_replicas(model, completions)
    for completion in completions:
        num_tokens += len(completion.tokens)
        if arguments.output is not None:
            lines.append(_json(completion))
        elif ranks.rank == 0:
            _show(completion, arguments.json, with_prompt=len(prompts) > 1, is_shown=is_shown)
    if ranks.rank != 0:
        return
    if arguments.output is not None:
        _write(arguments.output, "".join(lines))
    if arguments.json or arguments.output is not None or len(prompts) > 1:
        seconds = time.monotonic() - started
        print(
            f"{counted(len(prompts), 'prompt')}, {counted(num_tokens, 'new token')} in {seconds:.1f} s "
            f"({num_tokens / max(seconds, 1e-9):,.0f} tokens/s)",
            file=sys.stderr,
        )


def _from_replicas(model: Model, completions: Iterator[Completion]) -> Iterator[Completion]:
    """The completions of all replicas in the order of the prompts, on rank 0."""
    groups.set_group_timeouts(WAIT_S)  # the first replica to finish waits for the last one
    replica, num_replicas = model.replica
    own = [(replica + index * num_replicas, completion) for index, completion in enumerate(completions)]
    return (completion for _, completion in groups.gathered(own if model.reports else []))


def _write(path: Path, text: str) -> None:
    """Write the results at once, so that a file that exists is complete."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        publish(path, text)
    except OSError as error:
        raise TrainerError(f"{path} cannot be written: {error.strerror}", retry=True) from error
    print(f"texts: {path}", file=sys.stderr)


def converse(model: Model, tokenizer: Tokenizer, arguments: argparse.Namespace, ranks: Ranks) -> None:
    """Continue lines typed on a terminal, until its end. In a chat, a line is the user's next message."""
    messages: list[dict[str, str]] = []
    while (line := _from_rank_0(_read_line, ranks)) is not None:
        asked = [*messages, {"role": "user", "content": line}]
        prompt: Prompt = {"messages": asked} if arguments.chat else line
        on_text = _print if ranks.rank == 0 else None
        try:
            found = _from_rank_0(lambda prompt=prompt: texts_of_prompts([prompt], arguments), ranks)  # type: ignore[misc]
            options = generation_options(arguments, found.ends)
            for completion in generate(model, tokenizer, found.texts, options, on_text):
                _print("\n" if ranks.rank == 0 else "")
                messages = [*asked, {"role": "assistant", "content": completion.text}]
        except TrainerError as error:  # a prompt that is too long
            restart = ". The chat begins again with the next line" if messages else ""
            _print(f"{error}{restart}\n" if ranks.rank == 0 else "")
            messages = []
    _print("\n" if ranks.rank == 0 else "")


def _from_rank_0(function: Callable[[], T], ranks: Ranks) -> T:
    """The result of `function` on rank 0, on every rank."""
    return function() if ranks.world_size == 1 else groups.from_rank_0(function)


def _read_line() -> str | None:
    try:
        return input("> ")
    except EOFError:
        return None


def _show(completion: Completion, as_json: bool, *, with_prompt: bool, is_shown: bool) -> None:
    if as_json:
        print(_json(completion), end="", flush=True)
    elif is_shown:
        _print("\n")
    else:
        _print(f"{completion.prompt}{completion.text}\n\n" if with_prompt else f"{completion.text}\n")


def _json(completion: Completion) -> str:
    return json.dumps(dataclasses.asdict(completion), ensure_ascii=False) + "\n"


def _print(text: str) -> None:
    """Print text at once. On a terminal, control characters are replaced: a model may write any byte."""
    if sys.stdout.isatty():
        text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
    sys.stdout.write(text)
    sys.stdout.flush()


def end(ranks: Ranks) -> None:
    """Wait for all ranks, and close their connections."""
    if ranks.world_size > 1:
        groups.finalize()
