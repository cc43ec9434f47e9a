"""Divides requests among the replicas of the model.

Only rank 0 runs lm-eval, so that one process reads datasets, and an error in a task is raised once. It sends the
requests of all tasks to the other ranks, which serve until they are released. The replicas divide the requests by
themselves: their number does not depend on how lm-eval splits documents.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from trainer.evaluate.progress import Progress
from trainer.inference.generation import Options, generate_from_tokens
from trainer.inference.model import Model
from trainer.inference.tokenizer import Tokenizer
from trainer.metrics.console import Log

Pair = tuple[Sequence[int], Sequence[int]]
"""Tokens of a context, and tokens of a continuation whose log-probability is computed."""

Prompt = tuple[Sequence[int], Options]
"""Tokens to continue, and how."""


class Replicas:
    """All replicas of a model. Rank 0 calls `score` and `generate`; the other ranks call `serve`."""

    def __init__(self, model: Model, tokenizer: Tokenizer, batch_size: int, log: Log) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self._batch_size = batch_size
        self._log = log
        self._has_others = torch.distributed.get_world_size() > 1

    def score(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, and whether each of its tokens is the most likely one."""
        self._send((_score, pairs))
        return _score(self, pairs)

    def generate(self, prompts: Sequence[Prompt]) -> list[str]:
        """New text of each prompt."""
        self._send((_generate, prompts))
        return _generate(self, prompts)

    def serve(self) -> None:
        """Serve the requests of rank 0 until it calls `release`."""
        while True:
            box: list[Any] = [None]
            torch.distributed.broadcast_object_list(box, src=0)
            if box[0] is None:
                return
            function, arguments = box[0]
            function(self, arguments)

    def release(self) -> None:
        """End `serve` on the other ranks."""
        self._send(None)

    def share(self, lengths: Sequence[int]) -> Iterable[list[int]]:
        """Batches of this replica, as numbers of sequences. The longest sequences come first."""
        order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
        batches = [
            order[first : first + self._batch_size] for first in range(0, len(order), self._batch_size)
        ]
        replica, num_replicas = self.model.replica
        return batches[replica::num_replicas]

    def progress(self, total: int, noun: str) -> Callable[[int], None]:
        """Function that counts what this replica has finished, and logs progress."""
        progress = Progress(self._log, "tasks", total, noun)
        return lambda count: progress.advance(count * self.model.replica[1])

    def _send(self, command: tuple[Callable[..., Any], Any] | None) -> None:
        if self._has_others:
            torch.distributed.broadcast_object_list([command], src=0)


def _score(replicas: Replicas, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
    model = replicas.model
    # Continuations that differ in their last token share all that the model reads, such as " A" and " B" of a question.
    continuations: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, (context, continuation) in enumerate(pairs):
        # Without the last token, which is only predicted. Too long a context is cut at its beginning.
        read = (*context, *continuation)[-(model.max_length + 1) :][:-1]
        continuations[read].append(number)
    sequences = list(continuations)
    # Log-probability, and number of tokens that are not the most likely ones.
    totals = torch.zeros(len(pairs), 2, dtype=torch.float64, device=model.device)
    advance = replicas.progress(len(pairs), "continuation")
    with torch.inference_mode():
        for batch in replicas.share([len(sequence) for sequence in sequences]):
            chosen = [sequences[number] for number in batch]
            numbers = [continuations[sequence] for sequence in chosen]
            _add_batch(totals, model, chosen, [[(n, pairs[n][1]) for n in each] for each in numbers])
            advance(sum(map(len, numbers)))
    if torch.distributed.get_world_size() > 1:
        torch.distributed.all_reduce(totals)
    return [(log_probability, misses == 0) for log_probability, misses in totals.tolist()]


def _add_batch(
    totals: torch.Tensor,
    model: Model,
    sequences: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[tuple[int, Sequence[int]]]],
) -> None:
    """Compute a batch and add it to the `totals` of its continuations, which come with their numbers."""
    width = max(map(len, sequences))
    tokens = [[*sequence, *[0] * (width - len(sequence))] for sequence in sequences]
    rows, positions, targets, owners = list[int](), list[int](), list[int](), list[int]()
    for row, (sequence, found) in enumerate(zip(sequences, continuations, strict=True)):
        for number, continuation in found:
            rows += [row] * len(continuation)
            positions += range(len(sequence) - len(continuation), len(sequence))
            targets += continuation
            owners += [number] * len(continuation)
    on_device = [
        torch.tensor(each, device=model.device) for each in (tokens, rows, positions, targets, owners)
    ]
    result = model.log_probabilities(*on_device[:4])
    if result is not None and model.reports:
        log_probabilities, is_greedy = result
        totals.index_add_(0, on_device[4], torch.stack((log_probabilities, ~is_greedy), 1).double())


def _generate(replicas: Replicas, prompts: Sequence[Prompt]) -> list[str]:
    texts: dict[int, str] = {}
    advance = replicas.progress(len(prompts), "prompt")
    by_options: dict[Options, list[int]] = defaultdict(list)
    for number, (_, options) in enumerate(prompts):
        by_options[options].append(number)
    for options, numbers in by_options.items():
        for batch in replicas.share([len(prompts[number][0]) for number in numbers]):
            chosen = {numbers[index]: prompts[numbers[index]][0] for index in batch}
            completions = generate_from_tokens(replicas.model, replicas.tokenizer, chosen, options)
            texts |= zip(chosen, (completion.text for completion in completions), strict=True)
            advance(len(batch))
    if torch.distributed.get_world_size() > 1:
        parts: list[dict[int, str]] = [{}] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(parts, texts if replicas.model.reports else {})
        texts = {number: text for part in parts for number, text in part.items()}
    return [texts[number] for number in range(len(prompts))]
