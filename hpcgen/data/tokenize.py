"""JSON Lines in, Megatron's .bin/.idx pairs out: read, uncompress, parse, encode, hash, write, publish, in one pass."""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from hpcgen.config.corpus import CorpusConfig, CorpusJob
from hpcgen.config.tokenizer import TokenizerConfig
from hpcgen.data.checked_file import CheckedFile
from hpcgen.data.compression import SUFFIXES, content
from hpcgen.data.indexed_dataset import IndexedDatasetWriter, bin_path, idx_path, token_dtype
from hpcgen.data.jsonl import Block, Reject, read_blocks, text_reader
from hpcgen.data.record import Counts, FileIdentity, Record, publish_unit, record_path
from hpcgen.data.task import Context, Progress, Step
from hpcgen.data.tokenizer import Tokenizer, limit_threads, load_tokenizer
from hpcgen.data.unit import Input, Unit, configuration
from hpcgen.data.workers import cores
from hpcgen.errors import HpcgenError
from hpcgen.files import private_file, sweep

_SPOOL_BYTES = 64 * 1024 * 1024
"""Lengths of documents that are held in memory, of all outputs of a unit together."""
_LONG_DOCUMENT = 256
"""Tokens from which on documents are copied one by one: numpy's insert costs as much for each token."""
_EARLY_LOOK = 1000
"""Documents after which too large a share of bad ones ends a unit before its end."""


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
            text_bytes=len(block.data),
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
        return f"{len(ours)} ids, and {len(theirs)}"
    at = int(different[0])
    return f"at token {at} of {len(theirs)}, {ours[at]} and {theirs[at]}"


class _RunningCounts:
    """Adds up, and stops a unit in which too many documents are bad."""

    def __init__(self, corpus: CorpusConfig) -> None:
        self._most_bad = corpus.max_bad_fraction
        self._first: Reject | None = None
        self.total = Counts()

    def add(self, part: _Encoded) -> None:
        """Counts a block."""
        self.total += part.counts
        if part.rejects and self._first is None:
            self._first = min((reject for reject, _ in part.rejects), key=lambda reject: reject.line)
        if self.total.documents_in >= _EARLY_LOOK:
            self._check()

    def finish(self) -> None:
        """To be called when there are no more blocks."""
        self._check()

    def _check(self) -> None:
        total = self.total
        if total.rejected > self._most_bad * total.documents_in:
            raise HpcgenError(
                f"{total.rejected:,} of {total.documents_in:,} documents are bad, more than a share of "
                f"{self._most_bad:g}; the first one: {self._first}",
                "mend the files, or raise max_bad_fraction",
            )


class _HashedFile:
    """A private file that is hashed as it is written."""

    def __init__(self, file: BinaryIO, target: Path, directory: Path) -> None:
        self.file = file
        self.target = target
        self._name = target.relative_to(directory).as_posix()
        self._hash = hashlib.sha256()
        self._size = 0

    def write(self, data: Any) -> None:
        """Appends the bytes of `data`."""
        self._hash.update(data)
        self.file.write(data)
        self._size += len(data) if isinstance(data, bytes) else data.nbytes

    def identity(self) -> FileIdentity:
        """What was written."""
        return FileIdentity(self._name, self._size, self._hash.hexdigest())


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
        self._rejects: _HashedFile | None = None
        self.writer = stack.enter_context(
            IndexedDatasetWriter(
                self._bin,
                dtype,
                spool_directory=self._prefix.parent,
                spool_bytes=_SPOOL_BYTES // num_outputs,
            )
        )

    @property
    def files(self) -> list[_HashedFile]:
        """All of them, the index last: for those who read no records, it marks a whole pair."""
        return [*([self._rejects] if self._rejects else []), self._bin, self._idx]

    @property
    def rejects_path(self) -> Path:
        """Where bad lines go."""
        return self._prefix.with_name(self._prefix.name + ".rejects.jsonl")

    def add_reject(self, reject: Reject) -> None:
        """Notes a bad line: which, why, and what it is."""
        if self._rejects is None:
            self._rejects = self._open(self.rejects_path)
        line: dict[str, Any] = {"file": str(reject.path), "line": reject.line + 1, "reason": reject.reason}
        try:
            line["content"] = str(reject.data, "utf-8")
        except UnicodeDecodeError:
            line["content_base64"] = base64.b64encode(reject.data).decode()
        self._rejects.write(json.dumps(line).encode() + b"\n")

    def finish(self, documents_in: int, num_outputs: int) -> None:
        """Writes the index.

        Raises:
            HpcgenError: there is nothing in the pair: Megatron-Core cannot read it then.
        """
        if not self.writer.num_tokens:
            reason = (
                f"none of its documents holds a token ({documents_in:,} lines for {num_outputs:,} outputs)"
            )
            raise HpcgenError(f"{self._prefix}: {reason}", "use a smaller num_output_files")
        self.writer.write_index(self._idx)

    def _open(self, target: Path, swept: bool = False) -> _HashedFile:
        file = self._stack.enter_context(private_file(target, swept=swept))
        return _HashedFile(file, target, self._directory)


def _publish(outputs: Sequence[_Output], record: Record, place: Path) -> None:
    """Puts everything in its place; rejects of an older run go."""
    files = [file for output in outputs for file in output.files]
    stale = {output.rejects_path for output in outputs}.difference(file.target for file in files)
    for path in stale:
        path.unlink(missing_ok=True)
    publish_unit([(file.file, file.target) for file in files], record, place)


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


@dataclass(frozen=True)
class TokenizeReport:
    """What `tokenize_files` read and wrote."""

    output_prefix: str
    documents_read: int
    documents: int
    """Documents in the pair: documents_read, less the empty ones when those are dropped, and the rejected ones."""
    rejected_documents: int
    """Lines without a readable text, which stand in OUTPUT_PREFIX.rejects.jsonl."""
    empty_documents: int
    """Documents read that gave no token."""
    sequences: int
    """Documents in the pair that hold tokens."""
    tokens: int
    """Token ids in the pair, the end-of-document tokens included."""
    eod_in_text: int
    """End-of-document ids that came from the text itself, which spelled the token out."""
    verified_documents: int
    """Documents whose ids were compared with those of the library tokenizers."""
    input_bytes: int
    """Bytes of JSON Lines, uncompressed."""
    output_bytes: int
    """Bytes of the pair."""
    dtype: str
    vocab_size: int
    eod_id: int
    backend: str
    """The library that encoded: gigatoken, tokenizers or bytes."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        skipped = self.documents_read - self.documents - self.rejected_documents
        lines = [
            f"{self.output_prefix}.bin, .idx  ({self.output_bytes:,} bytes, {self.dtype})",
            f"documents  {self.documents_read:,} in = {self.documents:,} out + {skipped:,} skipped + "
            f"{self.rejected_documents:,} rejected; {self.empty_documents:,} empty",
            f"tokens     {self.tokens:,} in {self.sequences:,} sequences, each ended by {self.eod_id}",
            f"input      {self.input_bytes:,} bytes of JSON Lines, encoded with {self.backend}",
        ]
        if self.verified_documents:
            lines.append(f"verified   {self.verified_documents:,} documents: the ids of tokenizers")
        if self.rejected_documents:
            lines.append(f"rejects    {self.output_prefix}.rejects.jsonl")
        if self.eod_in_text:
            lines.append(
                f"note       {self.eod_in_text:,} end-of-document tokens are spelled out in the text"
            )
        return "\n".join(lines)


def tokenize_files(
    inputs: Sequence[Path],
    output_prefix: Path,
    tokenizer: Tokenizer,
    *,
    json_key: str = "text",
    drop_empty: bool = False,
    bad_documents: Literal["fail", "skip"] = "fail",
    max_bad_fraction: float = 0.001,
    verify_fraction: float = 0.0001,
    overwrite: bool = False,
    workers: int | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> TokenizeReport:
    """Tokenizes every document of `inputs`, in order, into output_prefix.bin and output_prefix.idx.

    Says what `tokenize_unit` says of documents. The pair appears only when all of it is on the disk, .idx and
    the record last. `workers` blocks of 4 MiB are parsed and encoded at once (None means one per core); the
    output does not depend on it.

    Raises:
        HpcgenError: an input is missing, damaged or holds a line without text; no document has a token; the
            pair exists and `overwrite` is false; or the output cannot be written. Nothing is published then.
    """
    progress = Progress("tokenize", 0, 1, units=1, bytes=sum(_input_size(path) for path in inputs))
    if idx_path(output_prefix).exists() and not overwrite:
        raise HpcgenError(f"{idx_path(output_prefix)} exists", "choose another prefix, or pass --overwrite")
    corpus = CorpusConfig(
        directory=str(output_prefix.parent),
        json_key=json_key,
        drop_empty=drop_empty,
        bad_documents=bad_documents,
        max_bad_fraction=max_bad_fraction,
        verify_fraction=verify_fraction,
    )
    unit = Unit(
        stage="tokenize",
        inputs=tuple(Input(name=str(path), path=path) for path in inputs),
        outputs=(output_prefix.name,),
    )

    def advance(step: Step) -> None:
        progress.bytes_done += step.bytes
        progress.bytes_new += step.bytes
        progress.documents += step.documents
        progress.tokens += step.tokens
        on_progress(progress)

    context = Context(
        configuration=configuration("tokenize", CorpusJob(corpus=corpus, tokenizer=tokenizer.config)),
        threads=workers or cores(),
        advance=advance,
    )
    sweep([bin_path(output_prefix), idx_path(output_prefix), record_path(output_prefix)])
    try:
        record = make_pairs(unit, corpus, tokenizer, context)
    except OSError as error:
        raise HpcgenError(f"cannot write {output_prefix}.bin and .idx: {error}") from error
    return _report(record, output_prefix, tokenizer)


def _input_size(path: Path) -> int:
    """Bytes on disk of an input, once it is known to be there and to have a suffix that we know."""
    if not path.name.endswith(SUFFIXES):
        raise HpcgenError(f"{path}: the name must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    try:
        with path.open("rb") as file:
            return file.seek(0, os.SEEK_END)
    except OSError as error:
        raise HpcgenError(f"cannot read {path}: {error.strerror}") from error


def _report(record: Record, output_prefix: Path, tokenizer: Tokenizer) -> TokenizeReport:
    counts = record.counts
    return TokenizeReport(
        output_prefix=str(output_prefix),
        documents_read=counts.documents_in,
        documents=counts.documents_out,
        rejected_documents=counts.rejected,
        empty_documents=counts.empty,
        sequences=counts.sequences,
        tokens=counts.tokens,
        eod_in_text=counts.eod_in_text,
        verified_documents=counts.verified,
        input_bytes=counts.text_bytes,
        output_bytes=sum(file.size or 0 for file in record.outputs if not file.name.endswith(".jsonl")),
        dtype=token_dtype(tokenizer.vocab_size).name,
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
        backend=tokenizer.backend,
    )
