"""Loss and perplexity of a model on a tokenized text.

The documents of the text are one stream of tokens, as in training. The stream is cut into consecutive windows of the
model's seq_length, and the model predicts each token from the tokens before it in its window, end-of-document tokens
included. So every token except the first of the stream is predicted once. These are the disjoint chunks in "Perplexity
of fixed-length models" of transformers' documentation, and the samples of the training data without shuffling. The last
window, which may be shorter, counts too.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch

from trainer.contract.errors import TrainerError
from trainer.contract.evaluation import EvaluationData, TextResult
from trainer.data.blend import open_corpus
from trainer.evaluate.progress import Progress
from trainer.inference.model import Model


@dataclass(frozen=True)
class Text:
    """A tokenized text, cut into windows."""

    tokens: numpy.ndarray
    """The stream of tokens, mapped from the .bin file."""
    seq_length: int
    num_windows: int

    def window(self, number: int) -> numpy.ndarray:
        """The inputs of a window, and the token after them."""
        first = number * self.seq_length
        return self.tokens[first : first + self.seq_length + 1]


def open_text(data: EvaluationData, where: str, seq_length: int, vocab_size: int, limit: int | None) -> Text:
    """Map a .bin/.idx pair. `limit` is the maximum number of windows.

    Raises:
        ConfigError: a file is missing or damaged, or its tokens do not fit the model.
    """
    corpus = open_corpus(where, data.prefix, vocab_size)
    # Core's index describes a .bin without gaps, so its sequences are one stream.
    tokens = numpy.memmap(Path(f"{data.prefix}.bin"), dtype=corpus.index.dtype, mode="r")
    num_windows = math.ceil((len(tokens) - 1) / seq_length)
    return Text(tokens, seq_length, min(num_windows, limit or num_windows))


def measure(
    model: Model, data: EvaluationData, text: Text, batch_size: int, progress: Progress
) -> TextResult:
    """Compute the loss of a text. Every rank must call this; the replicas divide the windows among them.

    Raises:
        TrainerError: the text has a token that the model does not have.
    """
    started = time.monotonic()
    replica, num_replicas = model.replica
    # Sum of log-probabilities and number of tokens; fp64 keeps the number exact.
    totals = torch.zeros(2, dtype=torch.float64, device=model.device)
    firsts = range(replica * batch_size, text.num_windows, num_replicas * batch_size)
    with torch.inference_mode():
        for first in firsts:
            windows = [text.window(n) for n in range(first, min(first + batch_size, text.num_windows))]
            _require_known(windows, data, model.vocab_size)
            totals += _batch_totals(model, windows)
            progress.advance(num_replicas * len(windows))
    if torch.distributed.get_world_size() > 1:
        torch.distributed.all_reduce(totals)
    log_probability, tokens = totals.tolist()
    loss = -log_probability / tokens
    return TextResult(
        name=data.name,
        prefix=data.prefix,
        loss=loss if math.isfinite(loss) else None,
        perplexity=math.exp(loss) if loss < 700 else None,  # exp(710) is not finite
        tokens=int(tokens),
        sequences=text.num_windows,
        seq_length=text.seq_length,
        seconds=time.monotonic() - started,
    )


def _batch_totals(model: Model, windows: list[numpy.ndarray]) -> torch.Tensor:
    """Sum of log-probabilities and number of tokens of some windows; zero on ranks that do not report."""
    # Windows are as long as the first one, except that the last of the text may be shorter.
    length = len(windows[0]) - 1
    rows = numpy.zeros((len(windows), length), dtype=numpy.int64)
    for row, window in zip(rows, windows, strict=True):
        row[: len(window) - 1] = window[:-1]
    row_of = numpy.concatenate([numpy.full(len(each) - 1, n) for n, each in enumerate(windows)])
    position_of = numpy.concatenate([numpy.arange(len(each) - 1) for each in windows])
    targets = numpy.concatenate([each[1:] for each in windows]).astype(numpy.int64)
    on_device = (torch.from_numpy(each).to(model.device) for each in (rows, row_of, position_of, targets))
    found = model.log_probabilities(*on_device)
    totals = torch.zeros(2, dtype=torch.float64, device=model.device)
    if found is not None and model.reports:
        totals[0], totals[1] = found[0].double().sum(), len(targets)
    return totals


def _require_known(windows: list[numpy.ndarray], data: EvaluationData, vocab_size: int) -> None:
    if (largest := max(int(window.max()) for window in windows)) >= vocab_size:
        raise TrainerError(
            f"{data.prefix}.bin contains the token ID {largest}, but the model has {vocab_size} tokens. Name a text "
            "that was tokenized with the model's tokenizer"
        )
