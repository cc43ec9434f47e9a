"""Custom training data: map-style samples of a file of tokens, and a stream of texts that are tokenized on the way.

data: {dataset: custom_dataset.py:windows}
data: {dataset: custom_dataset.py:Texts}
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy

from trainer.contract.config import TrainerConfig

HERE = Path(__file__).parent
HELD_OUT = 100
"""Number of windows, or of texts, that are not trained on."""


class Windows:
    """Windows of a file of 16-bit tokens. Each has a token more than a sample, since labels are the next tokens."""

    def __init__(self, file: Path, length: int) -> None:
        self._tokens, self._length = numpy.memmap(file, numpy.uint16, "r"), length

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._length

    def __getitem__(self, index: int) -> dict[str, numpy.ndarray]:
        first = index * self._length
        return {"tokens": self._tokens[first : first + self._length + 1]}


class Part:
    """Some of the samples of a dataset."""

    def __init__(self, samples: Windows, indices: range) -> None:
        self._samples, self._indices = samples, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> dict[str, numpy.ndarray]:
        return self._samples[self._indices[index]]


def windows(split: str, config: TrainerConfig) -> Part | None:
    """Map-style samples. The trainer shuffles those for training in each epoch."""
    samples = Windows(HERE / "tokens.bin", config.model.seq_length)
    parts = {"train": range(HELD_OUT, len(samples)), "valid": range(HELD_OUT)}
    return Part(samples, parts[split]) if split in parts else None


class Texts:
    """A stream of the lines of texts.jsonl in another order each epoch. A sample is a text, as bytes.

    The state is the position of the next text, so that a resumed run need not read the stream from its beginning.
    """

    def __init__(self, split: str, config: TrainerConfig) -> None:
        lines = (HERE / "texts.jsonl").read_text(encoding="utf-8").splitlines()
        self._lines = lines[HELD_OUT:] if split == "train" else lines[:HELD_OUT]
        self._length, self._seed = config.model.seq_length, config.training.seed
        self._epoch = self._place = 0

    def state_dict(self) -> dict[str, int]:
        """The position after the last sample."""
        return {"epoch": self._epoch, "place": self._place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a position."""
        self._epoch, self._place = state["epoch"], state["place"]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:  # a stream does not end
            order = list(range(len(self._lines)))
            random.Random(f"{self._seed} {self._epoch}").shuffle(order)
            while self._place < len(order):
                text = json.loads(self._lines[order[self._place]])["text"]
                self._place += 1  # before the sample is given, since the state is that after it
                yield self._sample(text)
            self._epoch, self._place = self._epoch + 1, 0

    def _sample(self, text: str) -> dict[str, Any]:
        """The beginning of a text, and padding that is not learned."""
        content = text.encode()[: self._length + 1]
        tokens = numpy.zeros(self._length + 1, numpy.int64)
        tokens[: len(content)] = numpy.frombuffer(content, numpy.uint8)
        learned = numpy.arange(self._length) < len(content) - 1
        return {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": learned}
