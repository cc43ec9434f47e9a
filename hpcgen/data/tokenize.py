"""JSON Lines in, Megatron's .bin/.idx pair out: read, parse, encode, write, publish."""

from __future__ import annotations

import dataclasses
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from hpcgen.data.indexed_dataset import IndexedDatasetWriter, bin_path, idx_path, token_dtype
from hpcgen.data.jsonl import Block, input_size, read_blocks, text_reader
from hpcgen.data.tokenizer import Tokenizer
from hpcgen.errors import HpcgenError
from hpcgen.files import private_file, publish, sync, sync_path

Progress = Callable[[int, int], None]
"""Called with the bytes of the input files done so far and their total."""


@dataclass(frozen=True)
class TokenizeReport:
    """What `tokenize_files` read and wrote."""

    output_prefix: str
    documents_read: int
    documents: int
    """Documents in the pair: documents_read, less the empty ones when those are dropped."""
    empty_documents: int
    """Documents read that gave no token."""
    sequences: int
    """Documents in the pair that hold tokens."""
    tokens: int
    """Token ids in the pair, the end-of-document tokens included."""
    eod_in_text: int
    """End-of-document ids that came from the text itself, which spelled the token out."""
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
        left_out = self.documents_read - self.documents
        empty = f"{self.empty_documents:,} empty" + (" and left out" if left_out else "")
        lines = [
            f"{self.output_prefix}.bin, .idx  ({self.output_bytes:,} bytes, {self.dtype})",
            f"documents  {self.documents_read:,} read, {self.documents:,} written, {empty}",
            f"tokens     {self.tokens:,} in {self.sequences:,} sequences, each ended by {self.eod_id}",
            f"input      {self.input_bytes:,} bytes of JSON Lines, encoded with {self.backend}",
        ]
        if self.eod_in_text:
            lines.append(
                f"note       {self.eod_in_text:,} end-of-document tokens are spelled out in the text"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class _Encoded:
    """The documents of one block: `tokens` [sum(lengths)] end to end, `lengths` [documents]."""

    block: Block
    tokens: NDArray[Any]
    lengths: NDArray[np.int64]
    eod_in_text: int


def tokenize_files(
    inputs: Sequence[Path],
    output_prefix: Path,
    tokenizer: Tokenizer,
    *,
    json_key: str = "text",
    drop_empty: bool = False,
    overwrite: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
) -> TokenizeReport:
    """Tokenizes every document of `inputs`, in order, into output_prefix.bin and output_prefix.idx.

    Each document becomes one sequence that ends with the end-of-document token; one without tokens becomes a
    document without a sequence, as in Megatron-LM, or is left out with `drop_empty`. The pair appears only
    when all of it is on the disk, .idx last. `workers` blocks of 4 MiB are parsed and encoded at once (None
    means one per core); the output does not depend on it.

    Raises:
        HpcgenError: an input is missing, damaged or holds a line without text; no document has a token; the
            pair exists and `overwrite` is false; or the output cannot be written. Nothing is published then.
    """
    sizes = [input_size(path) for path in inputs]
    if idx_path(output_prefix).exists() and not overwrite:
        raise HpcgenError(f"{idx_path(output_prefix)} exists", "choose another prefix, or pass --overwrite")
    encode = _encoder(tokenizer, json_key)
    blocks = _blocks(inputs, sizes, progress)
    with ThreadPoolExecutor(workers or _cores()) as pool:
        encoded = _in_order(pool, encode, blocks, in_flight=2 * (workers or _cores()))
        try:
            return _write(encoded, output_prefix, tokenizer, drop_empty)
        except OSError as error:
            raise HpcgenError(f"cannot write {output_prefix}.bin and .idx: {error}") from error


def _write(
    encoded: Iterable[_Encoded], output_prefix: Path, tokenizer: Tokenizer, drop_empty: bool
) -> TokenizeReport:
    dtype = token_dtype(tokenizer.vocab_size)
    read = empty = tokens = eod_in_text = input_bytes = 0
    bin_target, idx_target = bin_path(output_prefix), idx_path(output_prefix)
    with private_file(bin_target) as bin_file, private_file(idx_target) as idx_file:
        writer = IndexedDatasetWriter(bin_file, dtype)
        for part in encoded:
            lengths = part.lengths[part.lengths > 0] if drop_empty else part.lengths
            writer.add_documents(part.tokens, lengths)
            read += len(part.lengths)
            empty += int(np.count_nonzero(part.lengths == 0))
            tokens += len(part.tokens)
            eod_in_text += part.eod_in_text
            input_bytes += len(part.block.data)
        if not tokens:
            raise HpcgenError(f"none of the {read} documents holds a token; nothing was published")
        writer.write_index(idx_file)
        output_bytes = bin_file.tell() + idx_file.tell()
        _publish_pair(bin_file, bin_target, idx_file, idx_target)
    return TokenizeReport(
        output_prefix=str(output_prefix),
        documents_read=read,
        documents=read - empty if drop_empty else read,
        empty_documents=empty,
        sequences=read - empty,
        tokens=tokens,
        eod_in_text=eod_in_text,
        input_bytes=input_bytes,
        output_bytes=output_bytes,
        dtype=dtype.name,
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
        backend=tokenizer.backend,
    )


def _publish_pair(bin_file: BinaryIO, bin_target: Path, idx_file: BinaryIO, idx_target: Path) -> None:
    """Puts the pair in place. The index marks a whole pair: an old one goes first, the new one comes last."""
    sync(bin_file)
    sync(idx_file)
    idx_target.unlink(missing_ok=True)
    sync_path(idx_target.parent)
    publish(bin_file, bin_target)
    publish(idx_file, idx_target)


def _encoder(tokenizer: Tokenizer, json_key: str) -> Callable[[Block], _Encoded]:
    read_texts = text_reader(json_key)
    dtype = token_dtype(tokenizer.vocab_size)

    def encode(block: Block) -> _Encoded:
        tokens, lengths = tokenizer.encode(read_texts(block))
        eod_in_text = int(np.count_nonzero(tokens == tokenizer.eod_id))
        ends = np.cumsum(lengths)[lengths > 0]
        tokens = np.insert(tokens.astype(dtype), ends, tokenizer.eod_id)
        return _Encoded(block, tokens, lengths + (lengths > 0), eod_in_text)

    return encode


def _blocks(inputs: Sequence[Path], sizes: Sequence[int], progress: Progress | None) -> Iterator[Block]:
    done = 0
    for path, size in zip(inputs, sizes, strict=True):
        for block in read_blocks(path):
            yield block
            if progress:
                progress(done + block.bytes_read, sum(sizes))
        done += size


_In = TypeVar("_In")
_Out = TypeVar("_Out")


def _in_order(
    pool: ThreadPoolExecutor, function: Callable[[_In], _Out], items: Iterable[_In], in_flight: int
) -> Iterator[_Out]:
    """`function` of each item, in the order of the items, with at most `in_flight` of them held in memory."""
    waiting: deque[Future[_Out]] = deque()
    for item in items:
        waiting.append(pool.submit(function, item))
        if len(waiting) == in_flight:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _cores() -> int:
    """Cores that this process may use: a Slurm job sees its own, not the node's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
