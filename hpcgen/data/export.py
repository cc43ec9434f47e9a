"""Exports of .bin/.idx pairs for programs that read Hugging Face datasets.

Layout of an export's directory:
    export.json                              settings and pairs of the export
    NAME.record.json                         record of each shard
    data/train-00000-of-00072.parquet        shards of an export in Parquet, for datasets.load_dataset
    train/train-00000-of-00072.arrow         shards of an export in Arrow, for datasets.load_from_disk
    dataset_dict.json, train/state.json, train/dataset_info.json    for load_from_disk, written last
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from hpcgen.data.indexed_dataset import read_counts
from hpcgen.data.progress import Progress, Step
from hpcgen.data.record import Record, read_record, record_path
from hpcgen.data.shard import Format, Shard, is_done, source_identities, write_shard
from hpcgen.data.workers import Failed, Finished, Update, cores, run_all
from hpcgen.errors import HpcgenError
from hpcgen.files import private_file, publish, sweep
from hpcgen.text import counted, few
from trainer.contract.files import loss_mask
from trainer.contract.files.regular_file import read_bytes

MANIFEST = "export.json"
DATASET = "dataset_dict.json"


class Manifest(msgspec.Struct, frozen=True):
    """Content of export.json."""

    format: Format
    sequence_length: int | None
    shards: dict[str, str]
    """Absolute prefix of each shard's pair, by name of the shard."""


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """Result of `export_pairs`."""

    directory: str
    format: Format
    sequence_length: int | None
    done_before: int
    """Number of shards that were already complete."""
    records: tuple[Record, ...]
    """Records of all complete shards."""
    source_tokens: int
    """Tokens in the pairs of the complete shards."""
    errors: tuple[str, ...]
    seconds: float

    @property
    def rows(self) -> int:
        """Rows of all complete shards."""
        return sum(record.counts.sequences for record in self.records)

    @property
    def tokens(self) -> int:
        """Tokens of all complete shards."""
        return sum(record.counts.tokens for record in self.records)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "directory": self.directory,
            "format": self.format,
            "sequence_length": self.sequence_length,
            "shards": len(self.records) + len(self.errors),
            "done_before": self.done_before,
            "made": len(self.records) - self.done_before,
            "errors": list(self.errors),
            "documents": sum(record.counts.documents_out for record in self.records),
            "documents_without_tokens": sum(record.counts.empty for record in self.records),
            "rows": self.rows,
            "tokens": self.tokens,
            "tokens_left_out": self.source_tokens - self.tokens,
            "bytes": sum(output.size or 0 for record in self.records for output in record.outputs),
            "seconds": round(self.seconds, 3),
        }

    def __str__(self) -> str:
        found = self.to_dict()
        failed = f", {len(self.errors):,} failed" if self.errors else ""
        rows = f"of {self.sequence_length:,} tokens" if self.sequence_length else "of one document each"
        left_out = found["tokens_left_out"]
        lines = [
            f"{self.directory}: {found['made']:,} made, {self.done_before:,} already done{failed}",
            f"rows       {self.rows:,} {rows}",
            f"tokens     {self.tokens:,}",
        ]
        if left_out:
            lines.append(f"left out   {counted(left_out, 'token')} after the last complete row of each pair")
        if empty := found["documents_without_tokens"]:
            lines.append(f"left out   {counted(empty, 'document')} without tokens")
        return "\n".join(lines)


def plan_export(
    records: Mapping[Path, Record | None], directory: Path, format: Format, sequence_length: int | None
) -> list[Shard]:
    """Returns the shards of an export of the pairs at the prefixes in `records`, each with the record of the pair.

    Pairs named SPLIT-00003-of-00072 become shards of the split SPLIT. Any other name is a split of its own.

    Raises:
        HpcgenError: a pair is missing or damaged, or pairs of several directories would form one split.
    """
    records_at = {prefix.absolute(): record for prefix, record in records.items()}
    splits = defaultdict[str, list[Path]](list)
    for prefix in records_at:
        name = re.sub(r"-\d{5}-of-\d{5}$", "", prefix.name)
        splits[re.sub(r"\W", "_", name)].append(prefix)
    shards = []
    chats = [prefix for prefix in records_at if loss_mask.has_mask(prefix)]
    if chats and sequence_length is not None:
        raise HpcgenError(
            f"{few([str(path) for path in chats])}: rows of {sequence_length:,} tokens would cut chats",
            "omit --sequence-length: each chat is then a row",
        )
    for split, prefixes in splits.items():
        if len({prefix.parent for prefix in prefixes}) > 1:
            raise HpcgenError(
                f"the pairs of split {split} are in several directories: {few([str(path) for path in prefixes])}",
                "export each directory to an output of its own",
            )
        for index, prefix in enumerate(prefixes):
            shards.append(
                Shard(
                    directory=directory.absolute(),
                    name=f"{split}-{index:05d}-of-{len(prefixes):05d}",
                    split=split,
                    prefix=prefix,
                    format=format,
                    sequence_length=sequence_length,
                    num_tokens=read_counts(prefix).tokens,
                    sources=source_identities(prefix, records_at[prefix]),
                )
            )
    return shards


def read_manifest(directory: Path) -> Manifest:
    """Reads export.json.

    Raises:
        HpcgenError: the directory is not an export.
    """
    path = directory / MANIFEST
    try:
        return msgspec.json.decode(read_bytes(path), type=Manifest)
    except (OSError, msgspec.MsgspecError) as error:
        reason = f"cannot read {path.name}: {getattr(error, 'strerror', None) or error}"
        raise HpcgenError(
            f"{directory} is not an export of hpcgen: {reason}",
            "name a directory that hpcgen data export wrote",
        ) from error


def export_pairs(
    shards: Sequence[Shard],
    *,
    workers: int | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> ExportReport:
    """Writes the shards of `plan_export` that are not done, `workers` at a time (default: one per core).

    A failed shard does not stop the others. Starts worker processes.

    Raises:
        HpcgenError: the directory has other content, or cannot be written.
    """
    started = time.monotonic()
    directory = shards[0].directory
    _claim(directory, shards)
    found = {shard: read_record(shard.place) for shard in shards}
    done = {shard: record for shard, record in found.items() if record and is_done(shard, record)}
    pending = [shard for shard in shards if shard not in done]
    progress = Progress("export", 0, 1, units=len(shards), units_done=len(done))
    progress.bytes = sum(shard.sources[0].size or 0 for shard in pending)
    targets = [path for shard in pending for path in (directory / shard.file, record_path(shard.place))]
    if pending:
        sweep(targets)
        (directory / DATASET).unlink(missing_ok=True)  # it marks a complete export
    made, errors = _make(pending, workers or cores(), progress, on_progress)
    if errors:
        sweep(targets)  # a killed worker could not remove its own files
    elif shards[0].format == "arrow":
        for path, content in description(shards, done | made).items():
            _write(path, content)
    complete = done | made
    return ExportReport(
        directory=str(directory),
        format=shards[0].format,
        sequence_length=shards[0].sequence_length,
        done_before=len(done),
        records=tuple(complete.values()),
        source_tokens=sum(shard.num_tokens for shard in complete),
        errors=tuple(errors),
        seconds=time.monotonic() - started,
    )


def _make(
    pending: Sequence[Shard], workers: int, progress: Progress, on_progress: Callable[[Progress], None]
) -> tuple[dict[Shard, Record], list[str]]:
    """Writes shards in worker processes. Returns the records of the finished ones, and the errors of the others."""
    made, errors = dict[Shard, Record](), list[str]()
    with closing(run_all(_write_on_one_core, pending, min(workers, len(pending)))) as events:
        for event in events:
            if isinstance(event, Update):
                progress.add(event.message)
            elif isinstance(event, Finished):
                made[pending[event.index]] = event.result
                progress.units_done += 1
            elif isinstance(event, Failed):
                errors.append(f"{pending[event.index].name}: {event.reason}")
                progress.failed += 1
            on_progress(progress)
    return made, errors


def _write_on_one_core(shard: Shard, report: Callable[[Step], None], _: Callable[[], int]) -> Record:
    """Writes a shard in a worker process, on one core."""
    return write_shard(shard, report)


def _claim(directory: Path, shards: Sequence[Shard]) -> None:
    """Writes export.json, unless the directory has the same one already.

    Raises:
        HpcgenError: the directory has a different export or other files, or cannot be written.
    """
    manifest = Manifest(
        format=shards[0].format,
        sequence_length=shards[0].sequence_length,
        shards={shard.name: str(shard.prefix) for shard in shards},
    )
    hint = "choose another --output, or remove the directory"
    try:
        names = [path.name for path in directory.iterdir() if not path.name.startswith(".")]
    except FileNotFoundError:
        names = []
    except OSError as error:
        raise HpcgenError(
            f"cannot write to {directory}: {error.strerror}", "choose another --output"
        ) from error
    if MANIFEST in names:
        if differences := list(_differences(read_manifest(directory), manifest)):
            raise HpcgenError(f"{directory} has a different export: {', '.join(differences)}", hint)
        return
    if names:
        raise HpcgenError(f"{directory} has files that are not an export: {few(sorted(names))}", hint)
    _write(directory / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")


def _differences(before: Manifest, now: Manifest) -> Iterator[str]:
    """Yields the settings in which two exports differ, with both values."""
    for name in ("format", "sequence_length"):
        old, new = getattr(before, name), getattr(now, name)
        if old != new:
            yield f"{name} is {old}, not {new}"
    if before.shards != now.shards:
        yield f"its pairs are {few(list(before.shards.values()))}, not {few(list(now.shards.values()))}"


def description(shards: Sequence[Shard], records: Mapping[Shard, Record]) -> dict[Path, bytes]:
    """The files by which datasets.load_from_disk finds the shards, dataset_dict.json last."""
    directory = shards[0].directory
    files = dict[Path, bytes]()
    splits = defaultdict[str, list[Shard]](list)
    for shard in shards:
        splits[shard.split].append(shard)
    for split, members in splits.items():
        content = "".join(str(records[shard].outputs[0].sha256) for shard in members)
        state: dict[str, Any] = {
            "_data_files": [{"filename": Path(shard.file).name} for shard in members],
            "_fingerprint": hashlib.sha256(content.encode()).hexdigest()[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": split,
        }
        files[directory / split / "dataset_info.json"] = _json({})
        files[directory / split / "state.json"] = _json(state)
    files[directory / DATASET] = _json({"splits": list(splits)})
    return files


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=1).encode() + b"\n"


def _write(target: Path, content: bytes) -> None:
    """Publishes a small file.

    Raises:
        HpcgenError: the file cannot be written.
    """
    try:
        with private_file(target) as file:
            file.write(content)
            publish(file, target)
    except OSError as error:
        raise HpcgenError(f"cannot write {target}: {error.strerror}") from error
