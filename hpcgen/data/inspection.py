"""Inspection of a .bin/.idx pair: the lengths of its documents, and their text."""

from __future__ import annotations

import functools
import io
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray

from hpcgen.config.tokenizer import TokenizerConfig, eod_id, problems, tokens
from hpcgen.data.loss_masks import open_mask
from hpcgen.data.pair import Pair, open_pair
from hpcgen.errors import FilePlace, HpcgenError
from hpcgen.files import private_file, publish, require_directory
from hpcgen.text import counted
from trainer.contract.files import loss_mask

PERCENTILES = (1, 5, 25, 50, 75, 95, 99)


@dataclass(frozen=True)
class Bin:
    """Documents of `shortest` to `longest` tokens."""

    shortest: int
    longest: int
    documents: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """Statistics of a pair. Lengths are in tokens, including end-of-document tokens."""

    prefix: str
    dtype: str
    documents: int
    sequences: int
    tokens: int
    empty_documents: int
    """Number of documents without tokens."""
    mean_length: float
    shortest: int
    """Shortest length. Like all lengths here, it ignores empty documents."""
    shortest_document: int
    longest: int
    longest_document: int
    percentiles: dict[int, int]
    learned: int | None
    """Number of tokens that are learned; None if the documents are not chats."""
    answers: int | None
    """Number of answers of the assistant in all chats."""
    histogram: tuple[Bin, ...]
    """Bins from the shortest to the longest length; each is twice as wide as the previous one."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """One document of a pair."""

    number: int
    ids: list[int]
    text: str | None
    """Decoded text with special tokens spelled out; None if the tokenizer is unknown."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Consecutive tokens of a chat that are all learned, or all not."""

    learned: bool
    ids: list[int]
    text: str | None
    """Decoded text with special tokens spelled out; None if the tokenizer is unknown."""


@dataclass(frozen=True, kw_only=True)
class InspectedChat:
    """One chat of a pair, in pieces."""

    number: int
    tokens: int
    learned: int
    """Number of tokens that are learned."""
    answers: int
    pieces: tuple[Piece, ...]


def inspect_pair(prefix: Path) -> tuple[Inspection, Pair]:
    """Reads the index of the pair at `prefix` and its loss mask, but not its ids.

    Raises:
        HpcgenError: a file is missing, or the index is damaged.
    """
    pair = open_pair(prefix)
    for fault in pair.faults():
        raise HpcgenError(fault, "run hpcgen data verify for details")
    lengths = pair.document_lengths()
    filled = lengths[lengths > 0]
    ordered = np.sort(filled)
    mask = open_mask(prefix, int(lengths.sum()))
    inspection = Inspection(
        prefix=str(prefix),
        dtype=pair.dtype.name,
        documents=len(lengths),
        sequences=len(pair.lengths),
        tokens=int(lengths.sum()),
        empty_documents=len(lengths) - len(filled),
        mean_length=float(filled.mean()) if len(filled) else 0.0,
        shortest=int(ordered[0]) if len(ordered) else 0,
        shortest_document=int(np.flatnonzero(lengths == ordered[0])[0]) if len(ordered) else 0,
        longest=int(ordered[-1]) if len(ordered) else 0,
        longest_document=int(lengths.argmax()) if len(ordered) else 0,
        percentiles={percent: _percentile(ordered, percent) for percent in PERCENTILES},
        learned=None if mask is None else int(np.count_nonzero(mask)),
        answers=None if mask is None else _num_answers(mask, np.cumsum(filled)[:-1]),
        histogram=tuple(_histogram(ordered)),
    )
    return inspection, pair


def read_document(pair: Pair, number: int, tokenizer: TokenizerConfig | None) -> Document:
    """Reads document `number` of a pair and decodes it if there is a tokenizer. A negative number counts from the end.

    Raises:
        HpcgenError: there is no such document, or it was encoded with another tokenizer.
    """
    number = _from_start(number, pair)
    ids = pair.document(number).tolist()
    text = decode(ids, tokenizer) if tokenizer is not None else None
    return Document(number=number, ids=ids, text=text)


def read_inspected_chat(pair: Pair, number: int, tokenizer: TokenizerConfig | None) -> InspectedChat:
    """Reads chat `number` of a pair with its loss mask.

    Raises:
        HpcgenError: the pair has no loss mask or no such chat, or it was encoded with another tokenizer.
    """
    lengths = pair.document_lengths()
    mask = open_mask(pair.prefix, int(lengths.sum()))
    if mask is None:
        reason = (
            f"{pair.prefix}: the documents are not chats; {loss_mask.mask_path(pair.prefix)} does not exist"
        )
        raise HpcgenError(reason, "use --document")
    number = _from_start(number, pair)
    begin = int(lengths[:number].sum())
    ids = pair.document(number)
    of_chat = mask[begin : begin + len(ids)]
    decoded = decoder(tokenizer) if tokenizer is not None else lambda ids: None
    borders = [0, *(np.flatnonzero(np.diff(of_chat)) + 1).tolist(), len(ids)]
    pieces = tuple(
        Piece(learned=bool(of_chat[first]), ids=(own := ids[first:end].tolist()), text=decoded(own))
        for first, end in itertools.pairwise(borders)
        if first < end
    )
    return InspectedChat(
        number=number,
        tokens=len(ids),
        learned=int(np.count_nonzero(of_chat)),
        answers=sum(piece.learned for piece in pieces),
        pieces=pieces,
    )


def _from_start(number: int, pair: Pair) -> int:
    """The number of a document, counted from the start."""
    count = pair.num_documents
    if not -count <= number < count:
        hint = f"use 0 to {count - 1}, or -{count} to -1 from the end" if count else "the pair is empty"
        raise HpcgenError(f"{pair.prefix}: there is no document {number}", hint)
    return number % count


def _num_answers(mask: NDArray[np.uint8], borders: NDArray[np.int64]) -> int:
    """Number of runs of learned tokens. An answer ends at each of `borders`, where the next chat begins."""
    begins = np.count_nonzero((mask[1:] == 1) & (mask[:-1] == 0)) + np.count_nonzero(mask[:1])
    joined = np.count_nonzero((mask[borders] == 1) & (mask[borders - 1] == 1)) if len(borders) else 0
    return int(begins + joined)


def decode(ids: Sequence[int], config: TokenizerConfig) -> str:
    """Decodes `ids` with special tokens spelled out. Bytes that are not UTF-8 become U+FFFD.

    Raises:
        HpcgenError: a file of the tokenizer is missing or invalid, or an id is not in its vocabulary.
    """
    return decoder(config)(ids)


def decoder(config: TokenizerConfig) -> Callable[[Sequence[int]], str]:
    """Returns the function `decode` for a tokenizer that is loaded once.

    Raises:
        HpcgenError: a file of the tokenizer is missing or invalid.
    """
    for problem in problems(config, "tokenizer"):
        raise HpcgenError(f"{problem.path} {problem.reason}", problem.hint)
    if config.kind == "bytes":
        return functools.partial(_decode_bytes, eod=eod_id(config))
    tokenizer, size = gpt2_decoder(config) if config.kind == "gpt2" else _huggingface(config)

    def decoded(ids: Sequence[int]) -> str:
        _require_known(ids, size)
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    return decoded


def draw_png(inspection: Inspection, path: Path) -> None:
    """Draws the histogram of lengths as a PNG file and replaces an existing one.

    Raises:
        HpcgenError: matplotlib is not installed, or the file cannot be written.
    """
    require_directory(path)
    try:
        import matplotlib
    except ImportError:
        raise HpcgenError(
            "--png needs matplotlib, which is not installed",
            "pip install matplotlib, or omit --png",
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (of_documents, of_tokens) = pyplot.subplots(
        2, 1, figsize=(8, 6), sharex=True, layout="constrained"
    )
    edges = [bin.shortest for bin in inspection.histogram]
    widths = [bin.longest + 1 - bin.shortest for bin in inspection.histogram]
    style = {"width": widths, "align": "edge", "edgecolor": "white"}
    of_documents.bar(edges, [bin.documents for bin in inspection.histogram], **style)
    of_tokens.bar(edges, [bin.tokens for bin in inspection.histogram], color="tab:orange", **style)
    for axes, label in ((of_documents, "documents"), (of_tokens, "tokens")):
        axes.set_ylabel(label)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.axvline(inspection.percentiles[50], color="black", linewidth=1, linestyle="--")
        axes.set_axisbelow(True)
        axes.grid(alpha=0.3)
    of_documents.set_title(
        f"{Path(inspection.prefix).name}: {counted(inspection.documents, 'document')}, "
        f"{counted(inspection.tokens, 'token')}"
    )
    of_tokens.set_xlabel(f"tokens per document (dashed line: median, {inspection.percentiles[50]:,})")
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120, format="png")
    pyplot.close(figure)
    try:
        with private_file(path) as file:
            file.write(picture.getvalue())
            publish(file, path)
    except OSError as error:
        raise HpcgenError(f"cannot write {path}: {error.strerror}") from error


def _percentile(ordered: NDArray[np.int64], percent: int) -> int:
    """Smallest length that `percent` % of the documents do not exceed."""
    if not len(ordered):
        return 0
    return int(ordered[max(0, -(-len(ordered) * percent // 100) - 1)])


def _histogram(ordered: NDArray[np.int64]) -> Iterator[Bin]:
    """Yields the bins 1, 2 to 3, 4 to 7 and so on, from the shortest to the longest document."""
    if not len(ordered):
        return
    sums = np.concatenate([[0], np.cumsum(ordered)])
    for power in range(int(ordered[0]).bit_length() - 1, int(ordered[-1]).bit_length()):
        shortest, longest = 2**power, 2 ** (power + 1) - 1
        first, end = np.searchsorted(ordered, [shortest, longest + 1])
        yield Bin(shortest, longest, int(end - first), int(sums[end] - sums[first]))


def _decode_bytes(ids: Sequence[int], eod: int) -> str:
    _require_known(ids, eod + 1)
    runs, run = [], bytearray()
    for number in ids:
        if number != eod:
            run.append(number)
            continue
        runs.append(run.decode(errors="replace"))
        run = bytearray()
    runs.append(run.decode(errors="replace"))
    return "<eod>".join(runs)


def gpt2_decoder(config: TokenizerConfig) -> tuple[tokenizers.Tokenizer, int]:
    """Returns a tokenizer that can only decode (it has no merges), and the size of its vocabulary."""
    vocabulary = tokens(config)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer, max(vocabulary.values()) + 1


def _huggingface(config: TokenizerConfig) -> tuple[tokenizers.Tokenizer, int]:
    vocabulary = tokens(config)
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(config.tokenizer_file))
    except Exception as error:  # the library raises bare Exception for every error in the file
        raise HpcgenError(
            f"the library tokenizers cannot load this file: {error}", where=FilePlace(config.tokenizer_file)
        ) from error
    return tokenizer, max(vocabulary.values()) + 1


def _require_known(ids: Sequence[int], size: int) -> None:
    wrong = next((number for number in ids if not 0 <= number < size), None)
    if wrong is not None:
        raise HpcgenError(
            f"id {wrong} is outside the tokenizer's range 0 to {size - 1}",
            "give the tokenizer that encoded the pair (--tokenizer, or -c run.yaml)",
        )
