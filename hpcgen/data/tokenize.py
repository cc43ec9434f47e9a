"""JSON Lines or Parquet to Megatron's .bin/.idx pairs: read, parse, encode, hash, write and publish in one pass."""

from __future__ import annotations

import functools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hpcgen.config.corpus import CorpusConfig
from hpcgen.config.tokenizer import TokenizerConfig
from hpcgen.data.chats import learned_tokens, merged_reject
from hpcgen.data.documents import document_reader, documents, refuse_rejects
from hpcgen.data.hashed_files import CheckedFile
from hpcgen.data.indexed_dataset import token_dtype
from hpcgen.data.jsonl import Block, Reject, Texts
from hpcgen.data.pair_output import PairOutput, publish
from hpcgen.data.progress import Step
from hpcgen.data.record import (
    Counts,
    FileIdentity,
    Record,
    TokenizerIdentity,
)
from hpcgen.data.stages.base import Context
from hpcgen.data.tokenizer import Tokenizer, load_tokenizer
from hpcgen.data.unit import Unit
from hpcgen.errors import FilePlace, HpcgenError
from hpcgen.text import counted

if TYPE_CHECKING:
    from hpcgen.data.documents import Documents

_LONG_DOCUMENT = 256
"""Mean tokens per document above which documents are copied one by one: numpy.insert's cost is per token."""
_MAX_THREADS = 6
"""Maximum number of blocks of a unit to parse and encode at once.

More would wait for the thread that reads, hashes and writes, and each holds the GIL for 0.1 s to load its tokenizer.
"""
_LONGEST_VERIFIED = 1024 * 1024
"""Maximum characters of a document in the sample that is verified: the library tokenizers needs up to 190 bytes for
each byte of a text."""
_CHATS_OF_ONE_MASK = 100
"""Chats of a block from which on a loss mask of all 0 or all 1 is a mistake of the template."""
_EARLY_STOP_REJECTS = 10_000
_EARLY_STOP_FACTOR = 10
"""A unit stops early after this many bad documents if their share exceeds this multiple of max_bad_fraction."""


@functools.lru_cache(maxsize=1)
def loaded_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Loads the tokenizer once per worker: gigatoken's word cache makes all units after the first faster."""
    return load_tokenizer(config)


@functools.lru_cache(maxsize=1)
def _identity(config: TokenizerConfig) -> TokenizerIdentity:
    return TokenizerIdentity.of(config)


def make_pairs(unit: Unit, corpus: CorpusConfig, tokenizer: Tokenizer, context: Context) -> Record:
    """Makes the pairs of a unit (see hpcgen.data.stages.pairs). Does not sweep files of killed runs."""
    started = time.monotonic()
    directory = Path(corpus.directory)
    counts = _RunningCounts(corpus)
    inputs: list[FileIdentity] = []
    with ExitStack() as stack:
        dtype = token_dtype(tokenizer.vocab_size)
        outputs = [
            PairOutput(stack, directory, name, dtype, len(unit.outputs), has_mask=unit.has_masks)
            for name in unit.outputs
        ]
        encode = _encoder(tokenizer, corpus, len(outputs))
        blocks = _blocks(unit, inputs, corpus, context)
        for part in _in_order(stack, encode, blocks, context.num_cores):
            counts.add(part)
            _write(part, outputs)
            context.advance(Step(documents=len(part.lengths), tokens=len(part.tokens)))
        counts.finish()
        for output in outputs:
            output.finish(counts.total, len(outputs))
        record = Record(
            stage=unit.stage,
            configuration=context.configuration,
            inputs=tuple(inputs),
            outputs=tuple(file.identity() for output in outputs for file in output.files),
            counts=counts.total,
            reject_kinds=dict(counts.reject_kinds),
            seconds=time.monotonic() - started,
            tokenizer=_identity(tokenizer.config),
        )
        publish(outputs, record, directory / unit.name)
    return record


def _write(part: _Encoded, outputs: Sequence[PairOutput]) -> None:
    for reject, number in part.rejects:
        outputs[number].add_reject(reject)
    begin = token = 0
    for output, end in zip(outputs, part.ends, strict=True):
        lengths = part.lengths[begin:end]
        size = int(lengths.sum())
        output.writer.add_documents(part.tokens[token : token + size], lengths)
        if output.mask is not None and part.mask is not None:
            output.mask.write(part.mask[token : token + size].data)
        begin, token = end, token + size


@dataclass(frozen=True)
class _Encoded:
    """Encoded documents of one block, sorted by output."""

    tokens: NDArray[Any]
    """[sum(lengths)] end to end, including end-of-document tokens."""
    mask: NDArray[np.uint8] | None
    """[sum(lengths)] loss mask; None if the documents are not chats."""
    lengths: NDArray[np.int64]
    """[documents]"""
    ends: list[int]
    """[outputs] documents before ends[0] go to output 0, documents ends[0] to ends[1] to output 1, and so on."""
    rejects: list[tuple[Reject, int]]
    """Bad lines, each with the index of its output."""
    counts: Counts


def _encoder(tokenizer: Tokenizer, corpus: CorpusConfig, num_outputs: int) -> Callable[[Documents], _Encoded]:
    """Returns a thread-safe function that parses and encodes a block."""
    read = document_reader(corpus, tokenizer.config)
    dtype = token_dtype(tokenizer.vocab_size)

    def encode(block: Documents) -> _Encoded:
        found = read(block)
        if num_outputs > 1:
            found = _select(found, np.argsort(found.lines % num_outputs, kind="stable"))
        tokens, lengths = tokenizer.encode(found.texts)
        verified = _verify(
            tokenizer, block, found.texts, found.lines, tokens, lengths, corpus.verify_fraction
        )
        mask = None
        if found.answers is not None:
            assert isinstance(block, Block)
            found, tokens, lengths, mask = _with_mask(tokenizer, block, found, tokens, lengths)
            refuse_rejects(found.rejects, corpus)
        ends = np.searchsorted(found.lines % num_outputs, np.arange(num_outputs), side="right")
        is_full = lengths > 0
        if mask is None:
            tokens = _ended(tokens, lengths[is_full], tokenizer.eod_id, dtype)
            lengths = lengths + is_full
        kept = is_full if corpus.drop_empty else np.ones(len(lengths), bool)
        kept_before = np.concatenate([[0], np.cumsum(kept)])
        counts = _counts(tokenizer, block, found, tokens, is_full, mask)
        return _Encoded(
            tokens=tokens.astype(dtype, copy=False),
            mask=mask,
            lengths=lengths[kept],
            ends=kept_before[ends].tolist(),
            rejects=[(reject, reject.line % num_outputs) for reject in found.rejects],
            counts=replace(
                counts,
                documents_out=int(kept_before[-1]),
                skipped=len(kept) - int(kept_before[-1]),
                verified=verified,
            ),
        )

    return encode


def _counts(
    tokenizer: Tokenizer,
    block: Documents,
    found: Texts,
    tokens: NDArray[Any],
    is_full: NDArray[np.bool_],
    mask: NDArray[np.uint8] | None,
) -> Counts:
    """Counts of a block's documents and `tokens`. `is_full` [documents] tells which have tokens."""
    num_full = int(np.count_nonzero(is_full))
    has_unknown = tokenizer.unknown_id not in (None, tokenizer.eod_id)
    return Counts(
        documents_in=block.num_lines,
        rejected=len(found.rejects),
        empty=len(is_full) - num_full,
        sequences=num_full,
        tokens=len(tokens),
        unknown=int(np.count_nonzero(tokens == tokenizer.unknown_id)) if has_unknown else 0,
        lost=tokenizer.lost(found.texts) if tokenizer.lost else 0,
        eod_in_text=int(np.count_nonzero(tokens == tokenizer.eod_id)) - num_full if mask is None else 0,
        learned=int(np.count_nonzero(mask)) if mask is not None else 0,
        text_bytes=block.num_bytes,
    )


def _select(texts: Texts, indices: NDArray[np.int64]) -> Texts:
    """The texts at `indices`, in this order, and all rejects."""
    chosen = indices.tolist()
    answers = None if texts.answers is None else [texts.answers[index] for index in chosen]
    return Texts([texts.texts[index] for index in chosen], texts.lines[indices], texts.rejects, answers)


def _with_mask(
    tokenizer: Tokenizer, block: Block, chats: Texts, tokens: NDArray[Any], lengths: NDArray[np.int64]
) -> tuple[Texts, NDArray[Any], NDArray[np.int64], NDArray[np.uint8]]:
    """The loss mask of encoded chats. Rejects chats whose answers do not begin and end between two tokens."""
    mask, wrong = learned_tokens(tokenizer.encode, chats, tokens, lengths)
    if not wrong:
        return chats, tokens, lengths, mask
    keeps = np.ones(len(lengths), bool)
    keeps[list(wrong)] = False
    keeps_token = np.repeat(keeps, lengths)
    merged = [
        merged_reject(block, int(chats.lines[index]), chats.texts[index], border)
        for index, border in wrong.items()
    ]
    kept = replace(_select(chats, np.flatnonzero(keeps)), rejects=[*chats.rejects, *merged])
    return kept, tokens[keeps_token], lengths[keeps], mask[keeps_token]


def _ended(tokens: NDArray[Any], lengths: NDArray[np.int64], eod: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Appends the end-of-document id to each document of `tokens` [sum(lengths)]; no document is empty."""
    if len(tokens) < _LONG_DOCUMENT * len(lengths):
        return np.insert(tokens.astype(dtype), np.cumsum(lengths), eod)
    ended = np.empty(len(tokens) + len(lengths), dtype)
    begin = 0
    for number, end in enumerate(np.cumsum(lengths).tolist()):
        ended[begin + number : end + number] = tokens[begin:end]
        ended[end + number] = eod
        begin = end
    return ended


def _verify(
    tokenizer: Tokenizer,
    block: Documents,
    texts: Sequence[str],
    lines: NDArray[np.int64],
    tokens: NDArray[Any],
    lengths: NDArray[np.int64],
    fraction: float,
) -> int:
    """Compares the ids of a sample of documents with those of the library `tokenizers`. Returns the sample's size.

    The line number decides whether a document is in the sample. The first document of each file always is. Long
    documents never are.
    """
    if tokenizer.reference is None or not fraction:
        return 0
    # Fibonacci hashing: the products of consecutive numbers are evenly distributed in [0, 2^32).
    position = (lines.astype(np.uint64) * np.uint64(2654435769)) & np.uint64(0xFFFFFFFF)
    sample = [
        index
        for index in np.flatnonzero(position < fraction * 2**32).tolist()
        if len(texts[index]) <= _LONGEST_VERIFIED
    ]
    if not sample:
        return 0
    expected, expected_lengths = tokenizer.reference([texts[index] for index in sample])
    ends, expected_ends = np.cumsum(lengths), np.cumsum(expected_lengths)
    for number, index in enumerate(sample):
        actual = tokens[ends[index] - lengths[index] : ends[index]]
        wanted = expected[expected_ends[number] - expected_lengths[number] : expected_ends[number]]
        if not np.array_equal(actual, wanted):
            raise HpcgenError(
                f"{tokenizer.backend} and the library tokenizers return different "
                f"ids: {_first_difference(actual, wanted)}",
                "nothing of this file was published; please report this tokenizer and text as a bug",
                where=FilePlace(block.path, lines[index] + 1),
            )
    return len(sample)


def _first_difference(actual: NDArray[Any], wanted: NDArray[Any]) -> str:
    length = min(len(actual), len(wanted))
    different = np.flatnonzero(actual[:length] != wanted[:length])
    if not len(different):
        return f"{counted(len(actual), 'id')} and {len(wanted):,}"
    at = int(different[0])
    return f"at token {at} of {len(wanted)}: {actual[at]} and {wanted[at]}"


class _RunningCounts:
    """Adds up the counts of a unit and stops it if too many documents are bad.

    It stops early only if the limit is exceeded by far, because all bad documents may be at the start of the files.
    """

    def __init__(self, corpus: CorpusConfig) -> None:
        self._max_bad_fraction = corpus.max_bad_fraction
        self._has_masks = corpus.chat is not None
        self._first: Reject | None = None
        self.reject_kinds = Counter[str]()
        self.total = Counts()

    def add(self, part: _Encoded) -> None:
        """Adds the counts of a block."""
        self.total += part.counts
        self.reject_kinds.update(reject.kind for reject, _ in part.rejects)
        if part.rejects and self._first is None:
            self._first = min((reject for reject, _ in part.rejects), key=lambda reject: reject.line)
        if self.total.rejected >= _EARLY_STOP_REJECTS:
            self._check(_EARLY_STOP_FACTOR * self._max_bad_fraction)
        if part.counts.documents_out >= _CHATS_OF_ONE_MASK:
            self._check_masks(part.counts)

    def finish(self) -> None:
        """Checks the total. Call it after the last block."""
        self._check(self._max_bad_fraction)
        self._check_masks(self.total)

    def _check_masks(self, counts: Counts) -> None:
        """Refuses chats of which all tokens are learned, or none."""
        if not (self._has_masks and counts.tokens and counts.learned in (0, counts.tokens)):
            return
        which = "none" if not counts.learned else "all"
        raise HpcgenError(
            f"{which} of the {counted(counts.tokens, 'token')} of {counted(counts.documents_out, 'chat')} would be "
            "learned, so the chat template does not tell answers from the rest",
            "correct its {% generation %} blocks, or name another one (data.corpus.chat.chat_template_file)",
        )

    def _check(self, max_fraction: float) -> None:
        total = self.total
        if total.rejected > max_fraction * total.documents_in:
            raise HpcgenError(
                f"{total.rejected:,} of {total.documents_in:,} documents are bad, which exceeds max_bad_fraction = "
                f"{self._max_bad_fraction:g}; the first is {self._first}",
                "correct the files, or raise max_bad_fraction",
            )


def _blocks(
    unit: Unit, inputs: list[FileIdentity], corpus: CorpusConfig, context: Context
) -> Iterator[Documents]:
    """Yields the documents of all inputs in order and appends the identity of each input to `inputs`."""
    for item in unit.inputs:
        with CheckedFile(item) as source:
            read = 0
            for block in documents(item, source, corpus):
                context.advance(Step(bytes=source.tell() - read))
                read = source.tell()
                yield block
            inputs.append(source.finish())


_In = TypeVar("_In")
_Out = TypeVar("_Out")


def _in_order(
    stack: ExitStack, function: Callable[[_In], _Out], items: Iterable[_In], num_cores: Callable[[], int]
) -> Iterator[_Out]:
    """Yields the result of `function` for each item, in order. Uses threads while there are several cores."""
    pool = stack.enter_context(ThreadPoolExecutor(_MAX_THREADS))  # starts a thread when it needs one
    waiting: deque[Future[_Out]] = deque()
    stack.callback(lambda: [future.cancel() for future in waiting])
    for item in items:
        threads = min(num_cores(), _MAX_THREADS)
        if threads == 1 and not waiting:
            yield function(item)
            continue
        # Not more at once than cores: each needs a tokenizer, whose memory counts for a core.
        while len(waiting) >= threads:
            yield waiting.popleft().result()
        waiting.append(pool.submit(function, item))
    while waiting:
        yield waiting.popleft().result()
