"""Loss and perplexity of a model on a tokenized text.

The text is cut into consecutive windows of the model's seq_length, and the model predicts each token of a window from
the tokens before it. These are the disjoint chunks in "Perplexity of fixed-length models" of transformers'
documentation. Windows overlap by one token, which is the last target of one and the first input of the next. The last
window of a text, which may be shorter, counts too.

Documents are treated as in the model's training. If they see each other, the text is one stream of tokens,
end-of-document tokens included, and its windows are the samples of the training data without shuffling. If they are
separate (data.reset_attention_mask), each document is cut by itself. Its first token is then never predicted, since
nothing that the model may read precedes it. A window is a row of a batch, padded at its end, so causal attention
separates documents without a mask.

A pair with a loss mask has chats. Each chat is cut by itself, and only the learned tokens of its answers are predicted,
whatever the model was trained on. A model that was trained on chats reads texts document by document too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset

from trainer.contract.config import BlendConfig
from trainer.contract.errors import TrainerError
from trainer.contract.evaluation import EvaluationData, TextResult
from trainer.contract.files.index_header import bin_path
from trainer.contract.files.loss_mask import LEARNED, has_mask
from trainer.data import documents
from trainer.data.chats import map_mask
from trainer.data.corpora import open_corpus
from trainer.data.kinds import CHATS
from trainer.evaluate.progress import Progress
from trainer.inference.model import Model

MAX_ROWS = 2**14
"""Maximum number of windows that are computed together. GPU kernels refuse 2**16."""

BLOCK = 2**24
"""Number of tokens in which the ends of documents are searched at once."""


@dataclass(frozen=True)
class Text:
    """A tokenized text, cut into windows."""

    tokens: numpy.ndarray
    """The stream of tokens, mapped from the .bin file."""
    seq_length: int
    firsts: numpy.ndarray
    """First token of each window."""
    ends: numpy.ndarray
    """End of each window. Its last token is only predicted."""
    separate_documents: bool
    """True if no window has tokens of several documents."""
    mask: numpy.ndarray | None = None
    """Chats: 1 for each token of an answer, 0 for the others. None if all tokens are predicted."""

    def window(self, number: int) -> numpy.ndarray:
        """The tokens of a window."""
        return self.tokens[self.firsts[number] : self.ends[number]]

    def is_target(self, number: int) -> numpy.ndarray:
        """True for the targets of a window that count in the loss [length of the window - 1]."""
        if self.mask is None:
            return numpy.ones(self.ends[number] - self.firsts[number] - 1, dtype=bool)
        return self.mask[self.firsts[number] + 1 : self.ends[number]] == LEARNED

    @property
    def lengths(self) -> numpy.ndarray:
        """Number of inputs of each window. It equals the number of targets."""
        return self.ends - self.firsts - 1

    def batches(self, batch_size: int) -> list[numpy.ndarray]:
        """Numbers of the windows of each batch, the longest first.

        Padding included, a batch has at most as many tokens as `batch_size` windows of seq_length.
        """
        lengths = self.lengths
        order = numpy.argsort(-lengths, kind="stable")
        found, first = [], 0
        while first < len(order):
            rows = min(batch_size * self.seq_length // int(lengths[order[first]]), MAX_ROWS)
            found.append(order[first : first + rows])
            first += rows
        return found


def open_pair(data: EvaluationData, where: str, vocab_size: int, training: BlendConfig) -> IndexedDataset:
    """Open the .bin/.idx pair of a text. `training` is the data of the model's training.

    Raises:
        ConfigError: a file is missing or damaged, its tokens do not fit the model, or its documents do not end with the
            model's end-of-document token although the model was trained to tell documents apart.
    """
    corpus = open_corpus(where, data.prefix, vocab_size)
    if has_mask(data.prefix):
        CHATS.check_pair(data.prefix, corpus, training)
    elif training.needs_eod:
        assert training.eod_id is not None
        documents.require_ends(
            f"{where}: {data.prefix}",
            corpus,
            training.eod_id,
            "The model was trained to tell documents apart by this token. Tokenize the text with it",
        )
    return corpus


def open_text(
    data: EvaluationData,
    where: str,
    seq_length: int,
    vocab_size: int,
    training: BlendConfig,
    limit: int | None,
) -> Text:
    """Map a text and cut it into windows. `limit` is the maximum number of windows.

    Raises:
        ConfigError: see `open_pair`.
    """
    corpus = open_pair(data, where, vocab_size, training)
    # Core's index describes a .bin without gaps, so its sequences are one stream.
    tokens = numpy.memmap(bin_path(data.prefix), dtype=corpus.index.dtype, mode="r")
    mask = map_mask(data.prefix) if has_mask(data.prefix) else None
    separate = mask is not None or training.separates_documents
    ends = numpy.array([len(tokens)])
    if mask is not None or training.sft:
        ends = corpus.sequence_lengths.cumsum(dtype=numpy.int64)[corpus.document_indices[1:] - 1]
    elif separate:
        assert training.eod_id is not None
        ends = _document_ends(tokens, training.eod_id)
    starts = numpy.concatenate([[0], ends[:-1]])
    num_windows = -(-(ends - starts - 1) // seq_length)  # none for a document of one token
    document = numpy.arange(len(ends)).repeat(num_windows)
    window = numpy.arange(len(document)) - (num_windows.cumsum() - num_windows)[document]
    firsts = starts[document] + window * seq_length
    lasts = numpy.minimum(firsts + seq_length + 1, ends[document])
    return Text(tokens, seq_length, firsts[:limit], lasts[:limit], separate, mask)


def _document_ends(tokens: numpy.ndarray, eod_id: int) -> numpy.ndarray:
    found = [
        numpy.flatnonzero(tokens[first : first + BLOCK] == eod_id) + first + 1
        for first in range(0, len(tokens), BLOCK)
    ]
    return numpy.union1d(numpy.concatenate(found), [len(tokens)])


def measure(
    model: Model, data: EvaluationData, text: Text, batch_size: int, progress: Progress
) -> TextResult:
    """Compute the loss of a text. Every rank must call this; the replicas divide the batches among them.

    Raises:
        TrainerError: the text has a token that the model does not have.
    """
    started = time.monotonic()
    replica, num_replicas = model.replica
    # Sum of log-probabilities and number of tokens; fp64 keeps the number exact.
    totals = torch.zeros(2, dtype=torch.float64, device=model.device)
    with torch.inference_mode():
        for numbers in text.batches(batch_size)[replica::num_replicas]:
            windows = [text.window(number) for number in numbers]
            _require_known(windows, data, model.vocab_size)
            is_target = [text.is_target(number) for number in numbers]
            totals += _batch_totals(model, windows, is_target)
            progress.advance(num_replicas * sum(len(window) - 1 for window in windows))
    if torch.distributed.get_world_size() > 1:
        torch.distributed.all_reduce(totals)
    log_probability, tokens = totals.tolist()
    loss = -log_probability / tokens if tokens else math.nan
    return TextResult(
        name=data.name,
        prefix=data.prefix,
        loss=loss if math.isfinite(loss) else None,
        perplexity=math.exp(loss) if loss < 700 else None,  # exp(710) is not finite
        tokens=int(tokens),
        sequences=len(text.firsts),
        seq_length=text.seq_length,
        separate_documents=text.separate_documents,
        answers_only=text.mask is not None,
        seconds=time.monotonic() - started,
    )


def _batch_totals(
    model: Model, windows: Sequence[numpy.ndarray], counts: Sequence[numpy.ndarray]
) -> torch.Tensor:
    """Sum of log-probabilities and number of tokens of some windows; zero on ranks that do not report.

    `counts` tells for each window which targets count.
    """
    training = model.config.data
    rows = torch.zeros(len(windows), max(map(len, windows)), dtype=torch.int64)
    is_target = torch.zeros(len(windows), rows.shape[1] - 1, dtype=torch.bool)
    for row, of_row, window, counting in zip(rows, is_target, windows, counts, strict=True):
        row[: len(window)] = torch.from_numpy(window.astype(numpy.int64))
        of_row[: len(counting)] = torch.from_numpy(counting)
    inputs, targets = rows[:, :-1], rows[:, 1:]
    if training.eod_mask_loss:
        is_target &= inputs != training.eod_id
    chosen = (inputs, *is_target.nonzero(as_tuple=True), targets[is_target])
    found = model.log_probabilities(*(each.to(model.device) for each in chosen))
    totals = torch.zeros(2, dtype=torch.float64, device=model.device)
    if found is not None and model.reports:
        totals[0], totals[1] = found[0].double().sum(), is_target.sum()
    return totals


def _require_known(windows: Sequence[numpy.ndarray], data: EvaluationData, vocab_size: int) -> None:
    if (largest := max(int(window.max()) for window in windows)) >= vocab_size:
        raise TrainerError(
            f"{data.prefix}.bin contains the token ID {largest}, but the model has {vocab_size} tokens. Name a text "
            "that was tokenized with the model's tokenizer"
        )
