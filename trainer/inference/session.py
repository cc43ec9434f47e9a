"""A loaded model that answers the prompts of a file or a terminal. Imports megatron.core: after `prepare_device`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from trainer.chats.prompts import Texts
from trainer.contract.errors import TrainerError
from trainer.contract.files.checkpoint_files import Checkpoint
from trainer.contract.files.run_directory import publish
from trainer.contract.prompts import Prompt
from trainer.contract.wording import counted
from trainer.distributed import groups
from trainer.distributed.rendezvous import Ranks
from trainer.inference.arguments import generation_options, texts_of_file, texts_of_prompts
from trainer.inference.generation import Completion, generate
from trainer.inference.loading import load
from trainer.inference.model import Model
from trainer.inference.tokenizer import Tokenizer

T = TypeVar("T")

WAIT_S = 24 * 3600
"""Time that replicas wait for each other."""


@dataclass(frozen=True)
class Session:
    """A loaded model with its tokenizer, on all ranks, and the arguments of the command line."""

    model: Model
    tokenizer: Tokenizer
    arguments: argparse.Namespace
    ranks: Ranks

    @classmethod
    def load(
        cls,
        found: Checkpoint,
        tokenizer: Tokenizer,
        arguments: argparse.Namespace,
        ranks: Ranks,
        *,
        device: Literal["cuda", "cpu"],
        tensor_parallel: int,
    ) -> Session:
        """Load the model of a checkpoint.

        Raises:
            TrainerError: it cannot be loaded.
        """
        model = load(
            found,
            ranks,
            device=device,
            precision=arguments.precision,
            tensor_parallel=tensor_parallel,
            pipeline_parallel=arguments.pipeline_model_parallel_size,
            vocab_size=tokenizer.size,
        )
        return cls(model, tokenizer, arguments, ranks)

    def answer(self, found: Texts | None) -> None:
        """Continue the prompts of a file. `found` are those that have been read early."""
        found = self._from_rank_0(lambda: found or texts_of_file(self.arguments))
        prompts, options = found.texts, generation_options(self.arguments, found.ends)
        # A terminal shows a single text while it is generated.
        is_shown = (
            len(prompts) == 1
            and not self.arguments.json
            and not self.arguments.output
            and sys.stdout.isatty()
        )
        started, num_tokens, lines = time.monotonic(), 0, []
        on_text = _print if is_shown and self.ranks.rank == 0 else None
        completions = generate(self.model, self.tokenizer, prompts, options, on_text)
        if self.model.replica[1] > 1:
            completions = self._from_replicas(completions)
        for completion in completions:
            num_tokens += len(completion.tokens)
            if self.arguments.output is not None:
                lines.append(_json(completion))
            elif self.ranks.rank == 0:
                _show(completion, self.arguments.json, with_prompt=len(prompts) > 1, is_shown=is_shown)
        if self.ranks.rank != 0:
            return
        if self.arguments.output is not None:
            _write(self.arguments.output, "".join(lines))
        if self.arguments.json or self.arguments.output is not None or len(prompts) > 1:
            seconds = time.monotonic() - started
            print(
                f"{counted(len(prompts), 'prompt')}, {counted(num_tokens, 'new token')} in {seconds:.1f} s "
                f"({num_tokens / max(seconds, 1e-9):,.0f} tokens/s)",
                file=sys.stderr,
            )

    def converse(self) -> None:
        """Continue lines typed on a terminal, until its end. In a chat, a line is the user's next message."""
        messages: list[dict[str, str]] = []
        while (line := self._from_rank_0(_read_line)) is not None:
            asked = [*messages, {"role": "user", "content": line}]
            prompt: Prompt = {"messages": asked} if self.arguments.chat else line
            on_text = _print if self.ranks.rank == 0 else None
            try:
                found = self._from_rank_0(lambda prompt=prompt: texts_of_prompts([prompt], self.arguments))  # type: ignore[misc]
                options = generation_options(self.arguments, found.ends)
                for completion in generate(self.model, self.tokenizer, found.texts, options, on_text):
                    _print("\n" if self.ranks.rank == 0 else "")
                    messages = [*asked, {"role": "assistant", "content": completion.text}]
            except TrainerError as error:  # a prompt that is too long
                restart = ". The chat begins again with the next line" if messages else ""
                _print(f"{error}{restart}\n" if self.ranks.rank == 0 else "")
                messages = []
        _print("\n" if self.ranks.rank == 0 else "")

    def end(self) -> None:
        """Wait for all ranks, and close their connections."""
        if self.ranks.world_size > 1:
            groups.finalize()

    def _from_replicas(self, completions: Iterator[Completion]) -> Iterator[Completion]:
        """The completions of all replicas in the order of the prompts, on rank 0."""
        groups.set_group_timeouts(WAIT_S)  # the first replica to finish waits for the last one
        replica, num_replicas = self.model.replica
        own = [(replica + index * num_replicas, completion) for index, completion in enumerate(completions)]
        return (completion for _, completion in groups.gathered(own if self.model.reports else []))

    def _from_rank_0(self, function: Callable[[], T]) -> T:
        """The result of `function` on rank 0, on every rank."""
        return function() if self.ranks.world_size == 1 else groups.from_rank_0(function)


def _write(path: Path, text: str) -> None:
    """Write the results at once, so that a file that exists is complete."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        publish(path, text)
    except OSError as error:
        raise TrainerError(f"{path} cannot be written: {error.strerror}", retry=True) from error
    print(f"texts: {path}", file=sys.stderr)


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
