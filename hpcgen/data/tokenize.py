"""JSON Lines in, Megatron's .bin/.idx pairs out: read, uncompress, parse, encode, hash, write, publish, in one pass."""

from __future__ import annotations

import base64
import functools
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from hpcgen.config.corpus import CorpusConfig, CorpusJob
from hpcgen.config.tokenizer import TokenizerConfig
from hpcgen.data.compression import content
from hpcgen.data.hashed_files import CheckedFile, HashedFile
from hpcgen.data.indexed_dataset import IndexedDatasetWriter, bin_path, idx_path, token_dtype
from hpcgen.data.jsonl import Block, Reject, read_blocks, text_reader
from hpcgen.data.record import SIDE_FILE, Counts, FileIdentity, Record, publish_unit, record_path
from hpcgen.data.task import Context, Step
from hpcgen.data.tokenizer import Tokenizer, limit_threads, load_tokenizer
from hpcgen.data.unit import Unit, configuration
from hpcgen.errors import HpcgenError
from hpcgen.files import private_file
from hpcgen.text import counted

_SPOOL_BYTES = 64 * 1024 * 1024
"""Lengths of documents that are held in memory, of all outputs of a unit together."""
_LONG_DOCUMENT = 256
"""Tokens from which on documents are copied one by one: numpy's insert costs as much for each token."""
_HOPELESS_BAD = 10_000
_HOPELESS_TIMES = 10
"""A unit ends early when so many documents are bad, and so many times the share that may be; else at its end."""


def tokenize_unit(unit: Unit, job: CorpusJob, context: Context) -> Record:
    """Makes the .bin/.idx pairs of a unit of the stages tokenize and prepare.

    With k outputs, line n of the one input goes to output n mod k. Each document becomes one sequence that ends
    with the end-of-document token; one without tokens becomes a document without a sequence, as in Megatron-LM,
    or is left out with `drop_empty`.

    Raises:
        HpcgenError: an input is damaged or changed; a line has no readable text, and bad documents are not
            skipped, or too many are; ids differ from those of the library tokenizers; an output would be empty.
        OSError: an output cannot be written. Nothing is published either way.
    """
    tokenizer = _loaded_tokenizer(job.tokenizer, context.threads)
    if configuration(unit.stage, job) != context.configuration:
        raise HpcgenError("the tokenizer's files have changed since the task began", "run the stage again")
    return make_pairs(unit, job.corpus, tokenizer, context)


@functools.lru_cache(maxsize=1)
def _loaded_tokenizer(config: TokenizerConfig, threads: int) -> Tokenizer:
    """Loaded once in a worker: what gigatoken remembers of a corpus makes the units after the first faster."""
    limit_threads(threads)
    return load_tokenizer(config, threads=threads)


def make_pairs(unit: Unit, corpus: CorpusConfig, tokenizer: Tokenizer, context: Context) -> Record:
    """`tokenize_unit` with a tokenizer that is loaded already. What killed runs left is not swept."""
    started = time.monotonic()
    directory = Path(corpus.directory)
    counts = _RunningCounts(corpus)
    inputs: list[FileIdentity] = []
    with ExitStack() as stack:
        dtype = token_dtype(tokenizer.vocab_size)
        outputs = [_Output(stack, directory, name, dtype, len(unit.outputs)) for name in unit.outputs]
        encode = _encoder(tokenizer, corpus, len(outputs))
        for part in _in_order(stack, encode, _blocks(unit, inputs, context), context.threads):
            counts.add(part)
            _write(part, outputs)
            context.advance(Step(documents=len(part.lengths), tokens=len(part.tokens)))
        counts.finish()
        for output in outputs:
            output.finish(counts.total.documents_in, len(outputs))
        record = Record(
            stage=unit.stage,
            configuration=context.configuration,
            inputs=tuple(inputs),
            outputs=tuple(file.identity() for output in outputs for file in output.files),
            counts=counts.total,
            seconds=time.monotonic() - started,
        )
        _publish(outputs, record, directory / unit.name)
    return record


def _write(part: _Encoded, outputs: Sequence[_Output]) -> None:
    for reject, number in part.rejects:
        outputs[number].add_reject(reject)
    begin = token = 0
    for output, end in zip(outputs, part.ends, strict=True):
        lengths = part.lengths[begin:end]
        size = int(lengths.sum())
        output.writer.add_documents(part.tokens[token : token + size], lengths)
        begin, token = end, token + size


@dataclass(frozen=True)
class _Encoded:
    """The documents of one block, in the order of the outputs that they go to."""

    tokens: NDArray[Any]
    """[sum(lengths)] end to end, end-of-document tokens included."""
    lengths: NDArray[np.int64]
    """[documents]"""
    ends: list[int]
    """[outputs] the documents before ends[0] go to output 0, those from there to ends[1] to output 1, and so on."""
    rejects: list[tuple[Reject, int]]
    """Bad lines, each with its output."""
    counts: Counts


def _encoder(tokenizer: Tokenizer, corpus: CorpusConfig, num_outputs: int) -> Callable[[Block], _Encoded]:
    """A function that parses and encodes a block; threads may share it."""
    read_texts = text_reader(corpus.json_key)
    dtype = token_dtype(tokenizer.vocab_size)

    def encode(block: Block) -> _Encoded:
        found = read_texts(block)
        if found.rejects and corpus.bad_documents == "fail":
            raise HpcgenError(str(found.rejects[0]), "mend it, or set bad_documents: skip")
        texts, lines = found.texts, found.lines
        ends = [len(texts)]
        if num_outputs > 1:
            order = np.argsort(lines % num_outputs, kind="stable")
            texts, lines = [texts[index] for index in order.tolist()], lines[order]
            ends = np.searchsorted(lines % num_outputs, np.arange(num_outputs), side="right").tolist()
        tokens, lengths = tokenizer.encode(texts)
        verified = _verify(tokenizer, block, texts, lines, tokens, lengths, corpus.verify_fraction)
        is_full = lengths > 0
        num_full = int(np.count_nonzero(is_full))
        tokens = _ended(tokens, lengths[is_full], tokenizer.eod_id, dtype)
        num_eod = int(np.count_nonzero(tokens == tokenizer.eod_id))
        if corpus.drop_empty:
            full_before = np.concatenate([[0], np.cumsum(is_full)])
            ends = full_before[ends].tolist()
            lengths = lengths[is_full]
        lengths = lengths + (lengths > 0)
        counts = Counts(
            documents_in=block.num_lines,
            documents_out=len(lengths),
            skipped=len(texts) - len(lengths),
            rejected=len(found.rejects),
            empty=len(texts) - num_full,
            sequences=num_full,
            tokens=len(tokens),
            eod_in_text=num_eod - num_full,
            verified=verified,
            text_bytes=block.num_bytes,
        )
        rejects = [(reject, reject.line % num_outputs) for reject in found.rejects]
        return _Encoded(tokens, lengths, ends, rejects, counts)

    return encode


def _ended(tokens: NDArray[Any], lengths: NDArray[np.int64], eod: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """`tokens` [sum(lengths)] of documents that are not empty, with the end-of-document id after each."""
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
    block: Block,
    texts: Sequence[str],
    lines: NDArray[np.int64],
    tokens: NDArray[Any],
    lengths: NDArray[np.int64],
    fraction: float,
) -> int:
    """Compares the ids of a sample of documents with those of the library tokenizers, and gives their number.

    The number of its line decides whether a document is in the sample; the first one of each file is.
    """
    if tokenizer.reference is None or not fraction:
        return 0
    # Fibonacci hashing: the products of consecutive numbers lie evenly in [0, 2^32)
    position = (lines.astype(np.uint64) * np.uint64(2654435769)) & np.uint64(0xFFFFFFFF)
    sample = np.flatnonzero(position < fraction * 2**32)
    if not len(sample):
        return 0
    expected, expected_lengths = tokenizer.reference([texts[index] for index in sample.tolist()])
    ends, expected_ends = np.cumsum(lengths), np.cumsum(expected_lengths)
    for number, index in enumerate(sample.tolist()):
        ours = tokens[ends[index] - lengths[index] : ends[index]]
        theirs = expected[expected_ends[number] - expected_lengths[number] : expected_ends[number]]
        if not np.array_equal(ours, theirs):
            raise HpcgenError(
                f"{block.path}:{lines[index] + 1}: {tokenizer.backend} and tokenizers give different ids: "
                f"{_first_difference(ours, theirs)}",
                "nothing of this file was published",
            )
    return len(sample)


def _first_difference(ours: NDArray[Any], theirs: NDArray[Any]) -> str:
    length = min(len(ours), len(theirs))
    different = np.flatnonzero(ours[:length] != theirs[:length])
    if not len(different):
        return f"{counted(len(ours), 'id')}, and {len(theirs):,}"
    at = int(different[0])
    return f"at token {at} of {len(theirs)}, {ours[at]} and {theirs[at]}"


class _RunningCounts:
    """Adds up, and stops a unit in which too many documents are bad.

    Before its end only by a large margin: bad documents may all stand at the begin of good files.
    """

    def __init__(self, corpus: CorpusConfig) -> None:
        self._most_bad = corpus.max_bad_fraction
        self._first: Reject | None = None
        self.total = Counts()

    def add(self, part: _Encoded) -> None:
        """Counts a block."""
        self.total += part.counts
        if part.rejects and self._first is None:
            self._first = min((reject for reject, _ in part.rejects), key=lambda reject: reject.line)
        if self.total.rejected >= _HOPELESS_BAD:
            self._check(_HOPELESS_TIMES * self._most_bad)

    def finish(self) -> None:
        """To be called when there are no more blocks."""
        self._check(self._most_bad)

    def _check(self, most: float) -> None:
        total = self.total
        if total.rejected > most * total.documents_in:
            raise HpcgenError(
                f"{total.rejected:,} of {total.documents_in:,} documents are bad, more than a share of "
                f"{self._most_bad:g}; the first one: {self._first}",
                "mend the files, or raise max_bad_fraction",
            )


class _PairFile(HashedFile):
    """A private file that knows where it goes."""

    def __init__(self, file: BinaryIO, target: Path, directory: Path) -> None:
        super().__init__(file, target.relative_to(directory).as_posix())
        self.target = target


class _Output:
    """One pair, and the side file of its rejects where there are any."""

    def __init__(
        self, stack: ExitStack, directory: Path, name: str, dtype: np.dtype[Any], num_outputs: int
    ) -> None:
        self._stack = stack
        self._directory = directory
        self._prefix = directory / name
        self._bin = self._open(bin_path(self._prefix), swept=True)
        self._idx = self._open(idx_path(self._prefix), swept=True)
        self._rejects: _PairFile | None = None
        self.writer = stack.enter_context(
            IndexedDatasetWriter(
                self._bin,
                dtype,
                spool_directory=self._prefix.parent,
                spool_bytes=_SPOOL_BYTES // num_outputs,
            )
        )

    @property
    def files(self) -> list[_PairFile]:
        """All of them, the index last: for those who read no records, it marks a whole pair."""
        return [*([self._rejects] if self._rejects else []), self._bin, self._idx]

    @property
    def rejects_path(self) -> Path:
        """Where bad lines go."""
        return self._prefix.with_name(self._prefix.name + SIDE_FILE)

    def add_reject(self, reject: Reject) -> None:
        """Notes a bad line: which, why, and what it is."""
        if self._rejects is None:
            self._rejects = self._open(self.rejects_path)
        line: dict[str, Any] = {"file": str(reject.path), "line": reject.line + 1, "reason": reject.reason}
        key = "content" if reject.is_whole else "begin"
        try:
            line[key] = str(reject.data, "utf-8")
        except UnicodeDecodeError:
            line[f"{key}_base64"] = base64.b64encode(reject.data).decode()
        self._rejects.write(json.dumps(line).encode() + b"\n")

    def finish(self, documents_in: int, num_outputs: int) -> None:
        """Writes the index.

        Raises:
            HpcgenError: there is nothing in the pair: Megatron-Core cannot read it then.
        """
        if not self.writer.num_tokens:
            shares = f"{counted(documents_in, 'line')} for {counted(num_outputs, 'output')}"
            reason = f"none of its documents holds a token ({shares})"
            raise HpcgenError(f"{self._prefix}: {reason}", "use a smaller num_output_files")
        self.writer.write_index(self._idx)

    def _open(self, target: Path, swept: bool = False) -> _PairFile:
        file = self._stack.enter_context(private_file(target, swept=swept))
        return _PairFile(file, target, self._directory)


def _publish(outputs: Sequence[_Output], record: Record, place: Path) -> None:
    """Puts everything in its place; rejects of an older run go, and records of runs that made each pair alone."""
    files = [file for output in outputs for file in output.files]
    targets = [file.target for file in files]
    pairs = [path.with_suffix("") for path in targets if path.suffix == ".bin"]
    rejects = [output.rejects_path for output in outputs if output.rejects_path not in targets]
    stale = [*rejects, *(record_path(pair) for pair in pairs if pair != place)]
    publish_unit([(file.file, file.target) for file in files], record, place, stale=stale)


def _blocks(unit: Unit, inputs: list[FileIdentity], context: Context) -> Iterator[Block]:
    """The lines of all inputs in order. What was read goes to `inputs`."""
    for item in unit.inputs:
        with CheckedFile(item) as source:
            read = 0
            for block in read_blocks(item.path, content(item.path, source)):
                context.advance(Step(bytes=source.tell() - read))
                read = source.tell()
                yield block
            inputs.append(source.finish())


_In = TypeVar("_In")
_Out = TypeVar("_Out")


def _in_order(
    stack: ExitStack, function: Callable[[_In], _Out], items: Iterable[_In], threads: int
) -> Iterator[_Out]:
    """`function` of each item, in the order of the items; with several threads, of some items at once."""
    if threads == 1:
        yield from map(function, items)
        return
    pool = stack.enter_context(ThreadPoolExecutor(threads))
    waiting: deque[Future[_Out]] = deque()
    stack.callback(lambda: [future.cancel() for future in waiting])
    for item in items:
        waiting.append(pool.submit(function, item))
        if len(waiting) == threads + 1:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
