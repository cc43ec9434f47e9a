"""Shards of an export: the token IDs of one .bin/.idx pair as rows of a Parquet or Arrow file."""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from hpcgen.data.hashed_files import HashedFile
from hpcgen.data.pair import Pair, open_pair
from hpcgen.data.progress import Step
from hpcgen.data.record import Counts, FileIdentity, Record, configuration_hash, publish_unit
from hpcgen.errors import HpcgenError
from hpcgen.files import private_file
from hpcgen.text import counted
from trainer.contract.files import loss_mask
from trainer.contract.files.hashing import file_sha256
from trainer.contract.files.index_header import bin_path, idx_path
from trainer.contract.files.regular_file import open_regular

Format = Literal["parquet", "arrow"]
STAGE = "export"
"""Stage in the records of shards."""
COLUMN = "input_ids"
"""Column of the token IDs, named as the models of transformers name their input."""
MASK_COLUMN = "assistant_masks"
"""Column of the loss mask of chats, named as TRL names it: 1 if the token is learned, else 0."""
_WITHOUT_MASK = 2
"""Number of files of a pair without a loss mask."""
_GROUP_TOKENS = 4 * 1024 * 1024
"""Maximum tokens of a row group or record batch, except for a longer document."""
_LONGEST_ROW = 32 * 1024 * 1024
"""Maximum tokens of a row, which is in memory several times while it is compressed."""
_CHUNK = 1024 * 1024
"""Documents or bytes to process at once."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file of an export, and the pair that it is made from."""

    directory: Path
    """Directory of the export."""
    name: str
    """Name of the shard, such as train-00000-of-00072."""
    split: str
    prefix: Path
    """Absolute prefix of the pair."""
    format: Format
    sequence_length: int | None
    """Number of tokens in each row. None for one document per row."""
    num_tokens: int
    """Number of tokens in the pair."""
    sources: tuple[FileIdentity, ...]
    """The .bin, .idx and, with chats, .mask file that the pair must have, with the SHA-256 from the pair's record if it
    has one."""

    @property
    def columns(self) -> list[str]:
        """Columns of the shard."""
        return [COLUMN, MASK_COLUMN] if len(self.sources) > _WITHOUT_MASK else [COLUMN]

    @property
    def file(self) -> str:
        """Path of the shard relative to the export's directory, as `datasets` expects it for the format."""
        return f"{'data' if self.format == 'parquet' else self.split}/{self.name}.{self.format}"

    @property
    def place(self) -> Path:
        """Path whose record describes the shard."""
        return self.directory / self.name

    @property
    def configuration(self) -> str:
        """Hash of the settings for the record."""
        return configuration_hash({"format": self.format, "sequence_length": self.sequence_length})


def source_identities(prefix: Path, record: Record | None) -> tuple[FileIdentity, ...]:
    """Identities of the files of a pair at an absolute prefix, with the hashes of the pair's record.

    Raises:
        OSError: a file is missing.
    """
    known = {Path(output.name).name: output.sha256 for output in record.outputs} if record else {}

    def identity(path: Path) -> FileIdentity:
        status = path.stat()
        return FileIdentity(str(path), status.st_size, known.get(path.name), status.st_mtime_ns)

    mask = [Path(loss_mask.mask_path(prefix))] if loss_mask.has_mask(prefix) else []
    return tuple(map(identity, (bin_path(prefix), idx_path(prefix), *mask)))


def is_done(shard: Shard, record: Record | None) -> bool:
    """Returns whether `record`, read from the shard's place, describes the finished shard."""
    return (
        record is not None
        and (record.stage, record.configuration) == (STAGE, shard.configuration)
        and has_sources(shard, record)
        and record.has_valid_outputs(shard.directory, (shard.file,))
    )


def has_sources(shard: Shard, record: Record) -> bool:
    """Returns whether the shard of `record` was made from the pair that is there now."""
    same = map(FileIdentity.same_content, shard.sources, record.inputs)
    return len(record.inputs) == len(shard.sources) and all(same)


def write_shard(shard: Shard, report: Callable[[Step], None]) -> Record:
    """Writes and publishes a shard with its record.

    Raises:
        HpcgenError: the pair is invalid, differs from its record, or has fewer tokens than one row.
        OSError: a file cannot be read or written. Nothing is published in either case.
    """
    started = time.monotonic()
    pair = open_pair(shard.prefix)
    for fault in pair.faults():
        raise HpcgenError(fault, "tokenize again")
    target = shard.directory / shard.file
    with ExitStack() as stack:
        file = stack.enter_context(private_file(target, swept=True))
        output = HashedFile(file, shard.file)
        _require_mask(shard)
        names = [Path(source.name) for source in (shard.sources[0], *shard.sources[_WITHOUT_MASK:])]
        columns = dict(zip(shard.columns, (pair.dtype, np.dtype(np.uint8)), strict=False))
        sources = [
            _Source(stack.enter_context(open_regular(path)), dtype, report)
            for path, dtype in zip(names, columns.values(), strict=True)
        ]
        rows = tokens = 0
        with _writer(shard.format, output, columns) as writer:
            for ends in row_groups(pair, shard.sequence_length):
                _require_size(shard.prefix, int(ends[1] - ends[0]))
                size = int(ends[-1] - ends[0])
                values = {name: source.read(size) for name, source in zip(columns, sources, strict=True)}
                writer.write_batch(_batch(values, ends - ends[0]))
                rows, tokens = rows + len(ends) - 1, tokens + size
                report(Step(documents=len(ends) - 1, tokens=size))
        if not rows:
            short = (
                f"fewer than sequence_length = {shard.sequence_length}" if shard.sequence_length else "none"
            )
            raise HpcgenError(
                f"{shard.prefix}: the pair has {counted(num_tokens(pair), 'token')}, {short}",
                "leave it out" + (", or use a smaller --sequence-length" if shard.sequence_length else ""),
            )
        documents = _num_with_tokens(pair)
        record = Record(
            stage=STAGE,
            configuration=shard.configuration,
            inputs=(
                sources[0].finish(shard.sources[0]),
                _checked(shard.sources[1], file_sha256(Path(shard.sources[1].name))[0]),
                *map(_Source.finish, sources[1:], shard.sources[_WITHOUT_MASK:]),
            ),
            outputs=(output.identity(),),
            counts=Counts(
                documents_in=pair.num_documents,
                documents_out=documents,
                skipped=pair.num_documents - documents,
                empty=pair.num_documents - documents,
                sequences=rows,
                tokens=tokens,
            ),
            seconds=time.monotonic() - started,
        )
        return publish_unit([(file, target)], record, shard.place)


def row_groups(pair: Pair, sequence_length: int | None) -> Iterator[NDArray[np.int64]]:
    """Yields the boundaries of the rows of each row group, as offsets in tokens: [rows + 1].

    Rows of fixed length continue across documents, and the tokens after the last complete row are left out. Otherwise,
    each document that has tokens is a row.
    """
    if sequence_length is not None:
        rows, step = num_tokens(pair) // sequence_length, max(1, _GROUP_TOKENS // sequence_length)
        for first in range(0, rows, step):
            yield np.arange(first, min(first + step, rows) + 1, dtype=np.int64) * sequence_length
        return
    for ends in _document_ends(pair):
        ends = np.unique(ends)  # drops documents without tokens
        at = 0
        while at < len(ends) - 1:
            last = int(np.searchsorted(ends, ends[at] + _GROUP_TOKENS, side="right")) - 1
            last = max(last, at + 1)
            yield ends[at : last + 1]
            at = last


def _require_size(prefix: Path, num_ids: int) -> None:
    """Refuses a row that would not fit in a worker's memory."""
    if num_ids > _LONGEST_ROW:
        raise HpcgenError(
            f"{prefix}: a row would have {num_ids:,} tokens, more than the maximum of {_LONGEST_ROW:,}",
            "use --sequence-length with a smaller number",
        )


def num_tokens(pair: Pair) -> int:
    """Number of tokens in a valid pair."""
    return int(bin_path(pair.prefix).stat().st_size // pair.dtype.itemsize)


def _document_ends(pair: Pair) -> Iterator[NDArray[np.int64]]:
    """Yields, for each chunk of documents, where the first one begins and where each one ends, as offsets in tokens."""
    total = num_tokens(pair)
    for first in range(0, pair.num_documents, _CHUNK):
        sequences = pair.bounds[first : first + _CHUNK + 1]
        ends = np.full(len(sequences), total, np.int64)
        inside = sequences < len(pair.offsets)
        ends[inside] = pair.offsets[sequences[inside]] // pair.dtype.itemsize
        yield ends


def _num_with_tokens(pair: Pair) -> int:
    return sum(int(np.count_nonzero(np.diff(ends))) for ends in _document_ends(pair))


def _require_mask(shard: Shard) -> None:
    """Checks the size of the loss mask, if the shard has one."""
    if MASK_COLUMN in shard.columns:
        problem = loss_mask.size_problem(shard.prefix, shard.num_tokens)
        if problem is not None:
            raise HpcgenError(problem)


def _batch(values: Mapping[str, NDArray[Any]], offsets: NDArray[np.int64]) -> Any:
    bounds = pa.array(offsets.astype(np.int32))
    rows = [pa.ListArray.from_arrays(bounds, pa.array(of_column)) for of_column in values.values()]
    return pa.record_batch(rows, names=list(values))


def _writer(format: Format, output: HashedFile, columns: Mapping[str, np.dtype[Any]]) -> Any:
    """Returns a writer with a method `write_batch`, which is also a context manager."""
    sink = pa.PythonFile(_Sink(output), mode="w")
    schema = pa.schema([(name, pa.list_(pa.from_numpy_dtype(dtype))) for name, dtype in columns.items()])
    if format == "arrow":
        return pa.ipc.new_stream(sink, schema)
    # Dictionaries and statistics would double the time and enlarge the files.
    return pq.ParquetWriter(
        sink,
        schema,
        compression="zstd",
        use_dictionary=False,
        write_statistics=False,
        write_page_checksum=True,
    )


class _Sink(io.RawIOBase):
    """The file of a shard as pyarrow expects it."""

    def __init__(self, output: HashedFile) -> None:
        self._output = output

    def writable(self) -> bool:
        """Returns True."""
        return True

    def tell(self) -> int:
        """Number of bytes written."""
        return self._output.size

    def write(self, data: Any, /) -> int:
        """Appends `data`."""
        self._output.write(data)
        return memoryview(data).nbytes


class _Source:
    """A .bin or .mask file that is hashed while it is read."""

    def __init__(self, file: BinaryIO, dtype: np.dtype[Any], report: Callable[[Step], None]) -> None:
        self._file, self._dtype, self._report = file, dtype, report
        self._hash = hashlib.sha256()

    def read(self, num_ids: int) -> NDArray[Any]:
        """Reads the values of the next tokens."""
        data = self._file.read(num_ids * self._dtype.itemsize)
        self._hash.update(data)
        self._report(Step(bytes=len(data)))
        return np.frombuffer(data, self._dtype)

    def finish(self, wanted: FileIdentity) -> FileIdentity:
        """Reads the rest of the file and compares its content with its record."""
        while data := self._file.read(_CHUNK):
            self._hash.update(data)
            self._report(Step(bytes=len(data)))
        return _checked(wanted, self._hash.hexdigest())


def _checked(wanted: FileIdentity, sha256: str) -> FileIdentity:
    """Identity of a source file with the SHA-256 of its content.

    Raises:
        HpcgenError: the pair's record has another hash, or the file changed while it was read.
    """
    if wanted.sha256 not in (None, sha256):
        raise HpcgenError(
            f"{wanted.name}: the SHA-256 is {sha256}, but its record has {wanted.sha256}",
            "restore the file, or remove the pair and rerun the stage that made it",
        )
    status = Path(wanted.name).stat()
    if (status.st_size, status.st_mtime_ns) != (wanted.size, wanted.modified_ns):
        raise HpcgenError(f"{wanted.name} changed while it was read", "run the export again")
    return FileIdentity(wanted.name, wanted.size, sha256, wanted.modified_ns)
