"""Whether what the stages will write fits: bytes and files, against the file system's room and the quotas.

How large things become is known only within bounds, so it is said with two numbers: what cannot fit even by the lower
one is refused, what may not fit by the upper one is a warning.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcgen.config import tokenizer as tokenizers
from hpcgen.config.corpus import CorpusJob
from hpcgen.data.manifest import Manifest
from hpcgen.data.quota import Room, quotas
from hpcgen.data.sources.listing import counted
from hpcgen.data.unit import DATA_STAGES, DataStage, Unit, configuration, done_records, units, units_of_task
from hpcgen.errors import HpcgenError

_EXPANSION = {".zst": (2.0, 4.5), ".gz": (1.8, 4.0)}
"""Bytes of JSON Lines for a compressed byte. SlimPajama (.zst) has 2.8, C4 (.gz) 2.6; source code more than prose."""
_TOKEN_BYTES = {"uint16": (0.35, 0.95), "int32": (0.5, 1.9), "bytes": (1.6, 2.05)}
"""Bytes of .bin for a byte of JSON Lines: SlimPajama with GPT-2's vocabulary has 0.46, source code 0.83.
An id is 2 bytes where the vocabulary has fewer than 65,500 and else 4; the byte tokenizer has an id for each byte."""


@dataclass(frozen=True)
class Need:
    """What units will write: between two bounds, in bytes; and files, with their records."""

    least: int = 0
    most: int = 0
    files: int = 0

    def __add__(self, other: Need) -> Need:
        return Need(self.least + other.least, self.most + other.most, self.files + other.files)


def check_space(
    stages: DataStage | Sequence[DataStage],
    job: CorpusJob,
    manifest: Manifest,
    *,
    task_id: int = 0,
    num_tasks: int = 1,
) -> list[str]:
    """Warnings about what may not fit, of stages that are to run one after another; all of it, or one task's share.

    What is made already needs nothing more, unless an earlier one of `stages` makes its inputs again. A download
    of unknown size is counted as the mean of the others.

    Raises:
        HpcgenError: it cannot fit, or the manifest does not suit the configuration.
    """
    names = (stages,) if isinstance(stages, str) else tuple(sorted(stages, key=DATA_STAGES.index))
    need, remade = Need(), frozenset[str]()
    for stage in names:
        everything = units(stage, job, manifest)
        missing = _missing(stage, units_of_task(everything, task_id, num_tasks), job, remade)
        remade |= {output for unit in missing for output in unit.outputs}
        need += _estimate(stage, missing, everything, job, manifest)
    if not need.files:
        return []
    unknown = sum(file.size is None for file in manifest.files)
    warnings = []
    if unknown:
        warnings.append(
            f"{counted(unknown, 'file')} of unknown size in the corpus: the space needed is a guess"
        )
    rooms = (_file_system(job.directory), *quotas(_existing(job.directory), os.geteuid()))
    for room in rooms:
        warnings += _compared(need, room, names, job.directory)
    return warnings


def _estimate(
    stage: DataStage, missing: Sequence[Unit], everything: Sequence[Unit], job: CorpusJob, manifest: Manifest
) -> Need:
    """What `missing`, a part of a stage's units, will write: its share of all by the bytes of its inputs."""
    if not missing:
        return Need()
    files = sum(len(unit.outputs) for unit in missing)
    per_output = 4 if stage in ("tokenize", "prepare") else 1  # .bin, .idx, rejects; a record for each unit
    total = sum(unit.size for unit in everything)
    share = sum(unit.size for unit in missing) / total if total else len(missing) / len(everything)
    least, most = _outputs_of_all(stage, job, manifest)
    return Need(round(least * share), round(most * share), files * per_output + len(missing))


def estimates(job: CorpusJob, manifest: Manifest) -> dict[DataStage, Need]:
    """What each stage writes in all, without looking at what is made already; `files` is left out.

    Raises:
        HpcgenError: a file of the tokenizer is missing.
    """
    bounds = {stage: _outputs_of_all(stage, job, manifest) for stage in DATA_STAGES}
    return {stage: Need(round(least), round(most)) for stage, (least, most) in bounds.items()}


def bounds_text(need: Need) -> str:
    """Its bytes for people: 1.2 to 2.7 TB."""
    least, most = size_text(need.least), size_text(need.most)
    if least == most:
        return least
    number, unit = least.split()
    return f"{number if most.endswith(f' {unit}') else least} to {most}"


def size_text(size: float) -> str:
    """Bytes for people: 15.7 MB."""
    units_left = ["B", "kB", "MB", "GB", "TB", "PB"]
    while size >= 1000 and len(units_left) > 1:
        size, units_left = size / 1000, units_left[1:]
    return f"{size:.0f} B" if units_left[0] == "B" else f"{size:.1f} {units_left[0]}"


def _missing(stage: DataStage, mine: Sequence[Unit], job: CorpusJob, remade: frozenset[str]) -> list[Unit]:
    done = done_records(mine, job, configuration(stage, job))
    return [
        unit
        for unit, record in zip(mine, done, strict=True)
        if record is None or (remade and any(item.name in remade for item in unit.inputs))
    ]


def _outputs_of_all(stage: DataStage, job: CorpusJob, manifest: Manifest) -> tuple[float, float]:
    """Bounds of what the whole stage writes, in bytes."""
    known = [file.size for file in manifest.files if file.size is not None]
    mean = sum(known) / len(known) if known else 0.0
    least = most = 0.0
    for file in manifest.files:
        size = mean if file.size is None else float(file.size)
        suffix = next((suffix for suffix in _EXPANSION if file.name.endswith(suffix)), "")
        low, high = _EXPANSION.get(suffix, (1.0, 1.0))
        if stage == "download":
            low, high = (1.0, 1.0) if file.path is None else (0.0, 0.0)
        elif stage == "extract" and not suffix:
            low, high = 0.0, 0.0
        least, most = least + size * low, most + size * high
    if stage in ("tokenize", "prepare"):
        low, high = _TOKEN_BYTES[_kind_of_ids(job)]
        return least * low, most * high
    return least, most


def _kind_of_ids(job: CorpusJob) -> str:
    if job.tokenizer.kind == "bytes":
        return "bytes"
    return "uint16" if tokenizers.vocab_size(job.tokenizer) < 65500 else "int32"


def _file_system(directory: Path) -> Room:
    status = os.statvfs(_existing(directory))
    # a file system without a table of inodes (btrfs, some NFS servers) counts none
    return Room(
        f"the file system of {directory}",
        status.f_bavail * status.f_frsize,
        status.f_favail if status.f_files else None,
    )


def _existing(directory: Path) -> Path:
    return next(path for path in (directory, *directory.parents) if path.exists())


def _compared(need: Need, room: Room, stages: Sequence[DataStage], directory: Path) -> list[str]:
    """What to say of one kind of room: nothing when all fits surely.

    Raises:
        HpcgenError: it cannot fit.
    """
    files = counted(need.files, "file")
    asked = f"{', '.join(stages)}: will write {bounds_text(need)} in {files} below {directory}"
    hint = ""
    if "extract" in stages or "concat" in stages:
        hint = ", or use prepare instead of extract, concat and tokenize"
    if room.bytes is not None and need.least > room.bytes:
        raise HpcgenError(
            f"{asked}, and {room.name} has room for {size_text(room.bytes)}",
            f"make room, or take a sample (data.corpus.sample_files){hint}",
        )
    if room.files is not None and need.files > room.files:
        raise HpcgenError(
            f"{asked}, and {room.name} has room for {counted(room.files, 'file')}",
            f"make room for more files{hint}",
        )
    if room.bytes is not None and need.most > room.bytes:
        return [f"{asked}, and {room.name} has room for {size_text(room.bytes)}: it may not fit"]
    return []
