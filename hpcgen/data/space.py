"""Whether what the stages will write fits: bytes and files, against the file system's room and the quotas.

Only what is certain not to fit is refused: downloads of known size, and files that are uncompressed into larger ones.
How large JSON Lines become once they are uncompressed, and how much of them is text, differs from corpus to corpus:
that is estimated by two numbers, and what may not fit by the upper one is a warning.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcgen.config import tokenizer as tokenizers
from hpcgen.config.corpus import CorpusJob
from hpcgen.data.manifest import Manifest
from hpcgen.data.quota import Room, quotas
from hpcgen.data.unit import (
    DATA_STAGES,
    DataStage,
    Input,
    Unit,
    configuration,
    done_records,
    units,
    units_of_task,
)
from hpcgen.errors import HpcgenError
from hpcgen.text import counted, size_text

_EXPANSION = {".zst": (2.0, 8.0), ".gz": (1.8, 6.0)}
"""Bytes of JSON Lines for a compressed byte. SlimPajama (.zst) has 2.8, C4 (.gz) 2.6; source code (.zst) 5.2 to 6.5."""
_STORED = 0.99
"""Bytes that a compressed byte holds at least: what cannot be made smaller is stored, with little around it."""
_TOKEN_BYTES = {"uint16": (0.35, 0.95), "int32": (0.5, 1.9), "bytes": (1.6, 2.05)}
"""Bytes of .bin for a byte of JSON Lines: SlimPajama with GPT-2's vocabulary has 0.46, source code 0.83. Where most
of a line is metadata, it may be next to none.
An id is 2 bytes where the vocabulary has fewer than 65,500 and else 4; the byte tokenizer has an id for each byte."""


@dataclass(frozen=True)
class Need:
    """What units will write: in bytes, what is usual, between two bounds; and files, with their records."""

    least: int = 0
    most: int = 0
    files: int = 0
    certain: int = 0
    """Bytes that it will be whatever is in the files."""

    def __add__(self, other: Need) -> Need:
        return Need(
            self.least + other.least,
            self.most + other.most,
            self.files + other.files,
            self.certain + other.certain,
        )


def check_space(
    stages: DataStage | Sequence[DataStage],
    job: CorpusJob,
    manifest: Manifest,
    *,
    task_id: int = 0,
    num_tasks: int = 1,
) -> list[str]:
    """Warnings about what may not fit, of a stage or of several one after another; all of it, or one task's share.

    What is made already needs nothing more, unless an earlier one of `stages` makes its inputs again. A download
    of unknown size is counted as the mean of the others.

    Raises:
        HpcgenError: it cannot fit, or the manifest does not suit the configuration.
    """
    names = (stages,) if isinstance(stages, str) else tuple(sorted(stages, key=DATA_STAGES.index))
    left, remade = dict[DataStage, list[Unit]](), frozenset[str]()
    for stage in names:
        left[stage] = _missing(
            stage, units_of_task(units(stage, job, manifest), task_id, num_tasks), job, remade
        )
        remade |= {output for unit in left[stage] for output in unit.outputs}
    return check_room(left, job, manifest)


def check_room(left: Mapping[DataStage, Sequence[Unit]], job: CorpusJob, manifest: Manifest) -> list[str]:
    """The same of units that are known to be `left`, in the order of the stages. No record of theirs is read.

    Raises:
        HpcgenError: it cannot fit.
    """
    names = tuple(left)
    need = sum((_estimate(stage, missing, job, manifest) for stage, missing in left.items()), Need())
    if not need.files:
        return []
    unknown = sum(file.size is None for file in manifest.files)
    warnings = []
    if unknown:
        warnings.append(
            f"{counted(unknown, 'file')} of unknown size in the corpus: the space needed is a guess"
        )
    for room in _rooms(job.directory):
        warnings += _compared(need, room, names, job.directory)
    return warnings


def bytes_left(directory: Path) -> tuple[int, str]:
    """Bytes that may still be written below `directory`, and the name of the limit that is reached first."""
    return min((room.bytes, room.name) for room in _rooms(directory) if room.bytes is not None)


def _rooms(directory: Path) -> tuple[Room, ...]:
    """Every limit on what may still be written below `directory`: the file system's, then the quotas."""
    return (_file_system(directory), *quotas(_existing(directory), os.geteuid()))


def _estimate(stage: DataStage, missing: Sequence[Unit], job: CorpusJob, manifest: Manifest) -> Need:
    """What `missing`, a part of a stage's units, will write: its share of all by the bytes of its inputs."""
    if not missing:
        return Need()
    everything = units(stage, job, manifest)
    total = sum(unit.size for unit in everything)
    share = sum(unit.size for unit in missing) / total if total else len(missing) / len(everything)
    least, most = _outputs_of_all(stage, job, manifest)
    return Need(
        round(least * share),
        round(most * share),
        sum(len(unit.files) + 1 for unit in missing),  # and a record
        sum(_certain(item, unit) for unit in missing for item in unit.inputs),
    )


def _certain(item: Input, unit: Unit) -> int:
    """Bytes that `unit` writes at the least for what is in one of its inputs."""
    if unit.stage in ("tokenize", "prepare"):
        return 0  # its lines may hold next to no text
    if unit.stage == "extract" or (unit.stage == "concat" and item.name.startswith("extract/")):
        return int((item.size or 0) * _STORED)
    return item.size or 0


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
    asked = f"{', '.join(stages)}: will write about {bounds_text(need)} in {files} below {directory}"
    hint = ""
    if "extract" in stages or "concat" in stages:
        hint = ", or use prepare instead of extract, concat and tokenize"
    if room.bytes is not None and need.certain > room.bytes:
        raise HpcgenError(
            f"{asked}, {size_text(need.certain)} at the least, and {room.name} has room for {size_text(room.bytes)}",
            f"make room, or take a sample (data.corpus.sample_files){hint}",
        )
    if room.files is not None and need.files > room.files:
        raise HpcgenError(
            f"{asked}, and {room.name} has room for {counted(room.files, 'file')}",
            f"make room for more files{hint}",
        )
    if room.bytes is not None and need.most > room.bytes:
        doubt = "will hardly fit" if need.least > room.bytes else "may not fit"
        return [f"{asked}, and {room.name} has room for {size_text(room.bytes)}: it {doubt}"]
    return []
