"""Verification of exports: each shard against its record, and its rows against the pair that it was made from."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hpcgen.data.export import Manifest, description, read_manifest
from hpcgen.data.pair import open_pair
from hpcgen.data.pair_records import find_records
from hpcgen.data.record import Record, read_record
from hpcgen.data.shard import MASK_COLUMN, Shard, has_sources, row_groups, source_identities
from hpcgen.data.verification import Meter, OnProgress, PairReport, VerifyReport, difference, hash_file
from hpcgen.data.workers import cores
from hpcgen.errors import HpcgenError, Problem, problem_of
from trainer.contract.files import loss_mask
from trainer.contract.files.index_header import bin_path, is_complete
from trainer.contract.files.regular_file import read_bytes

_AGAIN = "run the export again"


def verify_export(
    directory: Path, *, workers: int | None = None, on_progress: OnProgress | None = None
) -> VerifyReport:
    """Reads every byte of an export, `workers` shards at a time. Default: one per core.

    Rows are compared with those of pairs that still exist.

    Raises:
        HpcgenError: the directory is not an export.
    """
    manifest = read_manifest(directory)
    shards = _shards(directory.absolute(), manifest)
    meter = Meter(sum(_size(shard) for shard in shards), on_progress)
    with ThreadPoolExecutor(workers or cores()) as pool:  # hashing, numpy and pyarrow release the GIL
        reports = list(pool.map(lambda shard: _verify_shard(shard, meter), shards))
    if manifest.format == "arrow":
        reports[0].findings += _description_findings(shards)
    else:
        reports[0].findings += _other_files(shards)
    return VerifyReport(pairs=reports, megatron_core=None)


def _shards(directory: Path, manifest: Manifest) -> list[Shard]:
    """The shards of an export. Those whose pair was removed have no sources."""
    prefixes = {name: Path(prefix) for name, prefix in manifest.shards.items()}
    records = find_records(list(prefixes.values()))
    return [
        Shard(
            directory=directory,
            name=name,
            split=name.rpartition("-of-")[0].rpartition("-")[0],
            prefix=prefix,
            format=manifest.format,
            sequence_length=manifest.sequence_length,
            num_tokens=0,
            sources=source_identities(prefix, records.get(prefix)) if is_complete(prefix) else (),
        )
        for name, prefix in prefixes.items()
    ]


def _description_findings(shards: Sequence[Shard]) -> Iterator[Problem]:
    """Compares the files that describe an Arrow dataset with the shards."""
    records = {shard: record for shard in shards if (record := read_record(shard.place))}
    if len(records) < len(shards):
        return  # the shards have findings
    for path, content in description(shards, records).items():
        if not path.exists():
            yield _about(path, "is missing")
        elif read_bytes(path) != content:
            yield _about(path, "does not describe these shards")


def _other_files(shards: Sequence[Shard]) -> Iterator[Problem]:
    """Finds Parquet files that datasets.load_dataset could read next to the shards."""
    own = {shard.directory / shard.file for shard in shards}
    for path in sorted(
        {file for folder in {path.parent for path in own} for file in folder.glob("*.parquet")} - own
    ):
        yield _about(path, "is not part of the export", "remove it")


def _about(path: Path, reason: str, hint: str = _AGAIN) -> Problem:
    return Problem("", reason, hint, subject=str(path))


def _verify_shard(shard: Shard, meter: Meter) -> PairReport:
    path = shard.directory / shard.file
    report = PairReport(prefix=str(path))
    try:
        record = read_record(shard.place)
        found = hash_file(path, lambda chunk: None, meter.add)
        report.bytes = found.size or 0
        if record is None:
            report.findings.append(
                problem_of(path, "it has no record, because the export was interrupted", _AGAIN)
            )
            return report
        report.hashes_checked = True
        report.findings += difference(path, record.outputs[0], found)
        if not report.findings:
            report.findings += _row_findings(shard, record, report)
    except FileNotFoundError:
        report.findings.append(_about(path, "is missing"))
    except (HpcgenError, OSError, pa.ArrowException) as error:
        report.findings.append(problem_of(path, str(error)))
    return report


def _row_findings(shard: Shard, record: Record, report: PairReport) -> Iterator[Problem]:
    """Counts rows and tokens in `report`, and yields the first difference from the record or from the pair."""
    path = shard.directory / shard.file
    is_current = has_sources(shard, record)
    if shard.sources and not is_current:
        yield problem_of(path, f"the pair {shard.prefix} has been made again since then", _AGAIN)
    pair = open_pair(shard.prefix) if is_current else None
    report.rows_checked = pair is not None
    wanted = row_groups(pair, shard.sequence_length) if pair else iter(())
    contents = [np.memmap(bin_path(shard.prefix), pair.dtype, "r")] if pair else []
    if pair and MASK_COLUMN in shard.columns:
        contents.append(np.memmap(loss_mask.mask_path(shard.prefix), np.uint8, "r"))
    for columns, ends in zip_longest(_groups(shard), wanted):
        if columns is not None:
            rows = columns[0]
            values = rows.flatten().to_numpy()
            report.dtype = values.dtype.name
        if pair and not (
            columns is not None
            and ends is not None
            and all(map(functools.partial(_has_values, ends), columns, contents))
        ):
            reason = f"row {report.sequences + 1:,} or a later one differs from the pair {shard.prefix}"
            yield problem_of(path, reason, _AGAIN)
            return
        report.sequences, report.tokens = report.sequences + len(rows), report.tokens + len(values)
    report.documents = record.counts.documents_out
    for what, number, recorded in (
        ("rows", report.sequences, record.counts.sequences),
        ("tokens", report.tokens, record.counts.tokens),
    ):
        if number != recorded:
            yield problem_of(path, f"{number:,} {what}, but the record has {recorded:,}", _AGAIN)


def _has_values(ends: Any, rows: Any, content: Any) -> bool:
    """Returns whether `rows` are the tokens between `ends` of `content`, the values of all tokens of a pair."""
    offsets = rows.offsets.to_numpy()
    return np.array_equal(offsets - offsets[0], ends - ends[0]) and np.array_equal(
        rows.flatten().to_numpy(), content[ends[0] : ends[-1]]
    )


def _groups(shard: Shard) -> Iterator[list[Any]]:
    """Yields the columns of each row group or record batch."""
    path = shard.directory / shard.file
    if shard.format == "parquet":
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            for group in range(file.metadata.num_row_groups):
                table = file.read_row_group(group, columns=shard.columns)
                yield [table.column(name).combine_chunks() for name in shard.columns]
        return
    with pa.OSFile(str(path)) as stream, pa.ipc.open_stream(stream) as batches:
        for batch in batches:
            yield [batch.column(name) for name in shard.columns]


def _size(shard: Shard) -> int:
    try:
        return (shard.directory / shard.file).stat().st_size
    except OSError:
        return 0  # reading the shard reports the error
