"""The answers of the model in training to the prompts of a file.

They are for people who look on: training does not notice them. Each line of answers.jsonl is an answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from trainer.chats.prompts import ChatOptions, Texts, texts_of
from trainer.contract.config import AnswersConfig, TrainerConfig
from trainer.contract.config.answers import MAX_PROMPTS
from trainer.contract.errors import TrainerError
from trainer.contract.files.regular_file import read_bytes
from trainer.contract.files.run_directory import RunDirectory, open_nofollow, publish
from trainer.contract.prompts import parse_prompts
from trainer.contract.wording import counted
from trainer.distributed.groups import gathered
from trainer.faults.storage import at_rank_0, reason
from trainer.inference.generation import Completion, Options, generate
from trainer.inference.tokenizer import Tokenizer, load_tokenizer
from trainer.inference.training_model import TrainingModel
from trainer.metrics.console import Log
from trainer.step import TrainingState
from trainer.validation import evaluating


@dataclass
class Answers:
    """The prompts of a run, and the file of its answers."""

    prompts: Sequence[str]
    tokenizer: Tokenizer
    options: Options
    max_seconds: float
    file: Path
    log: Log
    last: int | None
    """Iteration of the newest answers in the file."""

    def is_due(self, iteration: int, config: TrainerConfig) -> bool:
        """True if the answers after `iteration` are due and not in the file yet."""
        interval, last = config.training.eval_interval, config.training.train_iters
        is_due = iteration in (0, last) or (interval is not None and iteration % interval == 0)
        return is_due and iteration != self.last

    def answer(
        self,
        state: TrainingState,
        config: TrainerConfig,
        groups: ProcessGroupCollection,
        beat: Callable[[], None],
    ) -> None:
        """Answer all prompts and write the answers. Calls `beat` before each token. Every rank must call this.

        Raises:
            TrainerError: a prompt is too long.
        """
        started = time.monotonic()
        model = TrainingModel(state.model, state.objective, config, groups, len(self.prompts), beat)
        model.limit(self.max_seconds)
        with evaluating(state.model):
            completions = list(generate(model, self.tokenizer, self.prompts, self.options))
        replica, num_parts = model.replica
        own = [(replica + index * num_parts, completion) for index, completion in enumerate(completions)]
        found = gathered(own if model.reports else [])
        self.last = state.iteration
        if torch.distributed.get_rank() == 0:
            self._write(state.iteration, found, time.monotonic() - started)

    def _write(self, iteration: int, found: Sequence[tuple[int, Completion]], seconds: float) -> None:
        """Append the answers. If they cannot be written, the log says so and training continues."""
        now = time.time()
        lines = [
            {
                "iteration": iteration,
                "time": now,
                "number": number,
                "prompt": completion.prompt,
                "answer": completion.text,
                "tokens": len(completion.tokens),
                "finish_reason": completion.finish_reason,
            }
            for number, completion in found
        ]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        try:
            with open(self.file, "ab", opener=open_nofollow) as file:
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            self.log.line(f"{reason(error, self.file)}. The answers at iteration {iteration} are missing")
            return
        late = sum(completion.finish_reason == "time" for _, completion in found)
        ended = f"; answers.max_seconds = {self.max_seconds:g} has ended {late} of them" if late else ""
        self.log.line(
            f"iteration {iteration}: {counted(len(found), 'answer')} in {seconds:.1f} s ({self.file.name}){ended}"
        )


def open_answers(config: TrainerConfig, run: RunDirectory, iteration: int, log: Log) -> Answers | None:
    """Read the prompts, and remove the answers that an attempt resuming from `iteration` gives again.

    None if there are no prompts. Every rank must call this.

    Raises:
        TrainerError: the prompts or the tokenizer cannot be used, or the file cannot be written.
    """
    settings = config.answers
    if settings is None or settings.prompts is None:
        return None
    tokenizer = load_tokenizer(settings.tokenizer or "", settings.eod_token)
    tokenizer.check_fits(config.model.num_tokens)
    path = settings.prompts
    found = at_rank_0(lambda: _read_prompts(path, settings), Path(path))
    prompts = found.texts
    last = at_rank_0(lambda: _drop_after(run.answers, iteration, len(prompts)), run.answers, "written")
    values = {field.name: getattr(settings, field.name) for field in dataclasses.fields(Options)}
    options = Options(**values | {"stop": (*settings.stop, *found.ends)})
    _require_room(path, prompts, tokenizer, config.model.seq_length)
    return Answers(prompts, tokenizer, options, settings.max_seconds, run.answers, log, last)


def _read_prompts(path: str, settings: AnswersConfig) -> Texts:
    prompts = parse_prompts(path, read_bytes(Path(path)))
    if len(prompts) > MAX_PROMPTS:
        raise TrainerError(
            f"answers.prompts: {path} has {len(prompts)} prompts, and every evaluation would wait for their answers. "
            f"Keep at most {MAX_PROMPTS}"
        )
    options = ChatOptions(settings.chat_template_file, settings.chat_template, settings.chat_date)
    return texts_of(prompts, settings.tokenizer or "", options)


def _require_room(path: str, prompts: Sequence[str], tokenizer: Tokenizer, seq_length: int) -> None:
    """Refuse a prompt that leaves no room for a token, before the first step.

    Raises:
        TrainerError: there is one.
    """
    for number, prompt in enumerate(prompts, 1):
        if (size := len(tokenizer.encode(prompt))) >= seq_length:
            raise TrainerError(
                f"answers.prompts: prompt {number} of {path} has {size} tokens, but the model is trained with "
                f"{seq_length} (model.seq_length). Shorten it"
            )


def _drop_after(path: Path, iteration: int, num_prompts: int) -> int | None:
    """Remove what an attempt resuming from `iteration` writes again. Returns the iteration of the newest answers kept.

    It writes the answers of later iterations, and all those of `iteration` if some are missing. An earlier iteration is
    never answered again, so its answers stay, also if it has had fewer prompts.

    Raises:
        OSError: the file cannot be read or written. It is unchanged.
    """
    try:
        lines = read_bytes(path).splitlines(keepends=True)
    except FileNotFoundError:
        return None
    found = [(line, at) for line in lines if (at := _iteration(line)) is not None and at <= iteration]
    counts = {at: sum(1 for _ in group) for at, group in itertools.groupby(at for _, at in found)}
    newest = max(counts, default=None)
    if newest == iteration and counts[newest] < num_prompts:
        found = [(line, at) for line, at in found if at != newest]
        newest = None
    kept = b"".join(line for line, _ in found)
    if kept != b"".join(lines):
        publish(path, kept)
    return newest


def _iteration(line: bytes) -> int | None:
    """The iteration of an answer; None if the line is incomplete."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        at = json.loads(line)["iteration"]
        if line.endswith(b"\n") and isinstance(at, int):
            return at
    return None
