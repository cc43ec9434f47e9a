"""Sequences that are continued together, one token per step.

All state of a step is in tensors on the device, so that a step is one function of the device alone. On a GPU, it is
recorded as a CUDA graph: launching hundreds of small kernels one by one takes longer than computing them.

Shapes: b rows, S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from trainer.inference.text_model import TextModel

MIN_READ = 256
"""Number of slots that a recorded step reads at first. A graph has fixed shapes, so it doubles as texts grow."""

Choose = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Returns the next token of each row [b], given its logits [b, vocabulary], its previous tokens [b, S] and its draw
[b]."""


class Batch:
    """Sequences that are continued together. All ranks must call its methods in the same order, in inference mode."""

    def __init__(
        self,
        model: TextModel,
        prompts: Sequence[Sequence[int]],
        draws: Sequence[Sequence[float]],
        choose: Choose,
        num_slots: int,
    ) -> None:
        """`draws` has numbers in [0, 1) for the new tokens of each row, if any. Rows have up to `num_slots` tokens."""
        self._model = model
        self._choose = choose
        self._num_slots = num_slots
        self._cache = model.new_cache(num_slots) if model.has_cache else None
        self._num_tokens = [len(prompt) for prompt in prompts]
        # Free slots have a token of their row, so that `choose` sees no foreign tokens.
        ids = [[*prompt, *[prompt[0]] * (num_slots - len(prompt))] for prompt in prompts]
        self._ids = torch.tensor(ids, device=model.device)
        self._draws = torch.zeros(self._ids.shape, dtype=torch.float64)
        for row, prompt, numbers in zip(self._draws, prompts, draws, strict=True):
            new = row[len(prompt) :]
            new[: len(numbers)] = torch.tensor(numbers[: len(new)], dtype=torch.float64)
        self._draws = self._draws.to(model.device)
        self._lengths = torch.tensor(self._num_tokens, device=model.device)
        self._tokens = self._ids[:, 0].clone()
        self._is_new = True
        self._graph: torch.cuda.CUDAGraph | None = None
        self._shape = (0, 0)
        """Number of rows, and of slots to read, of the last step."""

    def next_tokens(self) -> list[int]:
        """Continue each row by one token. Returns these tokens, which are equal on all ranks."""
        longest = min(max(self._num_tokens), self._num_slots)
        if self._is_new or self._cache is None:
            self._compute_all(longest)
            self._is_new = False
        elif self._model.can_record:
            self._replay(longest)
        else:
            self._compute_last(longest)
        self._num_tokens = [length + 1 for length in self._num_tokens]
        tokens: list[int] = self._tokens.tolist()
        return tokens

    def keep(self, rows: Sequence[int]) -> None:
        """Remove the rows that are not in `rows`."""
        index = torch.tensor(rows, device=self._model.device)
        self._num_tokens = [self._num_tokens[row] for row in rows]
        self._ids, self._lengths, self._tokens, self._draws = (
            state[index] for state in (self._ids, self._lengths, self._tokens, self._draws)
        )
        if self._cache is not None:
            self._cache.keep(index)

    def _compute_all(self, longest: int) -> None:
        """A step that computes all previous tokens again."""
        if self._cache is not None:
            self._cache.begin_prompts()
        positions = torch.arange(longest, device=self._model.device)[None]
        last = self._lengths - 1
        self._append(self._model.next_logits(self._ids[:, :longest], positions, last, self._cache))

    def _compute_last(self, num_read: int) -> None:
        """A step that computes the last token of each row."""
        assert self._cache is not None
        positions = self._lengths[:, None] - 1
        self._cache.begin_step(positions, num_read)
        self._append(self._model.next_logits(self._tokens[:, None], positions, self._lengths, self._cache))

    def _replay(self, longest: int) -> None:
        """`_compute_last` as a CUDA graph."""
        num_read = MIN_READ
        while num_read < longest:
            num_read *= 2
        shape = (len(self._num_tokens), min(num_read, self._num_slots))
        if shape != self._shape:
            self._graph, self._shape = None, shape
            self._compute_last(shape[1])  # loads the kernels for these shapes, which recording must not do
            return
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            # Another thread, such as NCCL's, must not end the recording.
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._compute_last(shape[1])
        self._graph.replay()

    def _append(self, logits: torch.Tensor | None) -> None:
        """Choose the next token of each row and append it, in place."""
        slots = self._lengths[:, None]
        if logits is not None:
            self._tokens.copy_(self._choose(logits, self._ids, self._draws.gather(1, slots)[:, 0]))
        self._model.from_last_stage(self._tokens)
        self._ids.scatter_(1, slots, self._tokens[:, None])
        # Rows that are finished are computed until `keep` removes them. They stay in the last slot.
        self._lengths.add_(1).clamp_(max=self._num_slots - 1)
