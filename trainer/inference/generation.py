"""Continues prompts in batches, until each reaches its end, a stop string or the maximum length."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from trainer.contract.config.choice import Choice, text_problem
from trainer.contract.errors import TrainerError
from trainer.contract.record import config_section
from trainer.inference import sampling
from trainer.inference.batch import Batch
from trainer.inference.ending import Ending
from trainer.inference.text_model import TextModel
from trainer.inference.tokenizer import Tokenizer

FinishReason = Literal["eod", "stop", "length", "time"]


@config_section
class Options(Choice):
    """How to continue a prompt (see `trainer.contract.config.choice`).

    Raises:
        TrainerError: values are out of range, or have no effect. Lists all of them.
    """

    def __post_init__(self) -> None:
        if problems := list(self.problems()):
            raise TrainerError("\n".join(map(str, problems)))


@dataclass(frozen=True)
class Completion:
    """A prompt and its continuation."""

    prompt: str
    text: str
    """The new text, without the end-of-document token or the stop string."""
    tokens: list[int]
    """All new token IDs."""
    finish_reason: FinishReason
    """eod (the model ended the document), stop (a stop string), length (max_new_tokens or the model's maximum), or time
    (the time for all texts is over)."""


@dataclass
class _Row:
    """A prompt in progress."""

    prompt: str
    ids: list[int]
    """Token IDs of the prompt."""
    generator: random.Random
    context: list[int]
    """Token of the prompt that new tokens are decoded after (`Tokenizer.context`)."""
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    """The final part of the new text: later tokens do not change it."""
    finish_reason: FinishReason | None = None

    def add(
        self,
        token: int,
        tokenizer: Tokenizer,
        options: Options,
        ending: Ending,
        max_length: int,
        is_shown: bool,
    ) -> None:
        """Add a token and set `finish_reason` if it is the last one. `text` is only kept up to date if `is_shown`."""
        self.tokens.append(token)
        is_end = token == tokenizer.eod_id
        is_full = len(self.tokens) == options.max_new_tokens or len(self.ids) + len(self.tokens) == max_length
        if not (is_end or is_full or is_shown or options.stop):
            return  # nobody reads the text yet, so it is not decoded
        is_stopped = ending.is_spelled(self.tokens)
        if not (is_end or is_full or is_stopped):
            self.text, is_stopped = ending.settled(self.tokens, self.context)
        if is_end or is_full or is_stopped:
            text = ending.text(self.tokens[:-1] if is_end else self.tokens, self.context)
            self.text = ending.cut(text)
            is_stopped = self.text != text or (is_stopped and not is_end)
            self.finish_reason = "stop" if is_stopped else "eod" if is_end else "length"

    def cut_short(self, ending: Ending) -> None:
        """End the text where it is."""
        self.text = ending.cut(ending.text(self.tokens, self.context))
        self.finish_reason = "time"

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        return Completion(self.prompt, self.text, self.tokens, self.finish_reason)


def generate(
    model: TextModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    options: Options | None = None,
    on_text: Callable[[str], None] | None = None,
) -> Iterator[Completion]:
    """Continue `prompts`. Yields a completion for each, in their order, as soon as its batch is done.

    `on_text` receives the text of the first prompt of a batch in pieces, as it is generated. Every rank must call this
    with the same arguments. Replica r of n replicas of the model continues the prompts r, r + n, r + 2n, ...

    Raises:
        TrainerError: a prompt is empty or too long, before the first batch.
    """
    options = options or Options()
    rows = [_row(index, prompt, model, tokenizer, options) for index, prompt in enumerate(prompts)]
    replica, num_replicas = model.replica
    yield from _continue_in_batches(rows[replica::num_replicas], model, tokenizer, options, on_text)


def generate_from_tokens(
    model: TextModel, tokenizer: Tokenizer, prompts: Mapping[int, Sequence[int]], options: Options
) -> Iterator[Completion]:
    """Continue token IDs. The number of a prompt seeds its draws. Every rank of a replica must call this.

    Each prompt has at least one token and fewer than the model has positions. A completion's text has only the new
    tokens. With tokenizers like Llama's, it begins without a space.
    """
    rows = [
        _Row(tokenizer.decode(ids), list(ids), random.Random(f"{options.seed}/{number}"), context=[])
        for number, ids in prompts.items()
    ]
    return _continue_in_batches(rows, model, tokenizer, options, None)


def _continue_in_batches(
    rows: Sequence[_Row],
    model: TextModel,
    tokenizer: Tokenizer,
    options: Options,
    on_text: Callable[[str], None] | None,
) -> Iterator[Completion]:
    for first in range(0, len(rows), options.batch_size):
        batch = rows[first : first + options.batch_size]
        _continue(batch, model, tokenizer, options, on_text)
        yield from (row.completion() for row in batch)


def require_beginning(model: TextModel, prompt: str) -> None:
    """Refuse an empty prompt if the model was not trained to begin a document after the end of another document.

    Raises:
        TrainerError: it was not.
    """
    if not model.follows_documents:
        data = model.config.data
        key = data.separating_key if data.separates_documents else "data.eod_mask_loss"
        raise TrainerError(
            f"{prompt} is empty, but the model was trained with {key} = true and has not learned to begin a text. "
            "Begin it with a word"
        )


def _row(index: int, prompt: str, model: TextModel, tokenizer: Tokenizer, options: Options) -> _Row:
    if problem := text_problem(f"prompt {index + 1}", prompt):
        raise TrainerError(str(problem))
    ids = tokenizer.encode(prompt)
    if not ids:
        require_beginning(model, f"prompt {index + 1}")
    if not ids and tokenizer.eod_id is not None:
        ids = [tokenizer.eod_id]  # in training, a document follows the end of another document
    if not ids:
        raise TrainerError(
            f"prompt {index + 1} is empty, and the end-of-document token, which precedes a document, is unknown. "
            "Name it with eod_token"
        )
    if len(ids) >= model.max_length:
        raise TrainerError(
            f"prompt {index + 1} has {len(ids)} tokens, but the model has {model.max_length} positions for prompt and "
            f"new text (model.max_position_embeddings). Shorten the prompt to at most {model.max_length - 1} tokens"
        )
    return _Row(prompt, ids, random.Random(f"{options.seed}/{index}"), tokenizer.context(ids))


def _continue(
    rows: Sequence[_Row],
    model: TextModel,
    tokenizer: Tokenizer,
    options: Options,
    on_text: Callable[[str], None] | None,
) -> None:
    """Continue `rows` together until each has a finish_reason."""
    num_slots = min(max(len(row.ids) for row in rows) + options.max_new_tokens, model.max_length)
    with model.computing(len(rows), num_slots):
        draws = [_draws(row, options) for row in rows]
        choose = functools.partial(_choose, options=options)
        batch = Batch(model, [row.ids for row in rows], draws, choose, num_slots)
        ending = Ending(tokenizer, options.stop)
        running, num_shown = list(rows), 0
        while running:
            for row, token in zip(running, batch.next_tokens(), strict=True):
                if row.finish_reason is None:
                    is_shown = on_text is not None and row is rows[0]
                    row.add(token, tokenizer, options, ending, model.max_length, is_shown)
            if model.is_out_of_time():  # on every rank alike, so that all leave the loop together
                for row in running:
                    if row.finish_reason is None:
                        row.cut_short(ending)
            if on_text is not None and len(rows[0].text) > num_shown:
                on_text(rows[0].text[num_shown:])
                num_shown = len(rows[0].text)
            kept = [index for index, row in enumerate(running) if row.finish_reason is None]
            if 2 * len(kept) <= len(running):  # a smaller batch costs a copy of the cache, and a new graph
                running = [running[index] for index in kept]
                if kept:
                    batch.keep(kept)


def _draws(row: _Row, options: Options) -> list[float]:
    """Numbers with which the new tokens are drawn."""
    count = options.max_new_tokens if options.temperature > 0 else 0
    return [sampling.next_draw(row.generator) for _ in range(count)]


def _choose(
    logits: torch.Tensor, ids: torch.Tensor, draws: torch.Tensor, *, options: Options
) -> torch.Tensor:
    """The next token of each row [b], given logits [b, vocabulary], the previous tokens [b, S] and draws [b]."""
    if options.repetition_penalty != 1:
        seen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, ids, True)
        logits = sampling.penalize_repetition(logits, seen, options.repetition_penalty)
    return sampling.choose(
        logits, draws, temperature=options.temperature, top_k=options.top_k, top_p=options.top_p
    )
