"""Disk space check: compares the bytes and files that the stages will write with free space and quotas.

An error is raised only if the certain minimum does not fit: the known size of downloads, and the compressed size of
files to extract, which do not shrink. The expansion of compressed JSON Lines and their share of text differ between
corpora, so they are estimated by a lower and an upper bound. Outputs whose upper bound does not fit cause a warning.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcgen.config import tokenizer as tokenizers
from hpcgen.config.corpus import CorpusJob
from hpcgen.data.listed_files import PARQUET
from hpcgen.data.manifest import Manifest
from hpcgen.data.quota import FreeSpace, quotas
from hpcgen.data.settings import configuration
from hpcgen.data.unit import DATA_STAGES, DataStage, Input, Unit, units, units_of_task
from hpcgen.data.unit_checker import done_records
from hpcgen.errors import HpcgenError
from hpcgen.text import counted, size_text

_EXPANSION = {".zst": (2.0, 8.0), ".gz": (1.8, 6.0), ".parquet": (1.2, 8.0)}
"""Bytes of JSON Lines per byte of a compressed file or Parquet file. Measured: SlimPajama (.zst) 2.8, C4 (.gz) 2.6,
source code (.zst) 5.2 to 6.5."""
_STORED = 0.99
"""Minimum uncompressed bytes per compressed byte: incompressible data is stored with little overhead."""
_TOKEN_BYTES = {"uint16": (0.35, 0.95), "int32": (0.5, 1.9), "bytes": (1.6, 2.05)}
"""Bytes of .bin per byte of JSON Lines. Measured with GPT-2's vocabulary: SlimPajama 0.46, source code 0.83. If most of
a line is metadata, the ratio may be close to 0.
An id takes 2 bytes if the vocabulary has fewer than 65,500 entries, otherwise 4. The byte tokenizer has one id per
byte."""


@dataclass(frozen=True)
class Need:
    """Space that units will need: usual bounds in bytes, and the number of files including records."""

    least: int = 0
    most: int = 0
    files: int = 0
    certain: int = 0
    """Minimum bytes needed, regardless of the content of the files."""

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
    """Checks the space for one or more consecutive stages (all units or one task's share). Returns warnings.

    Units that are done need no space, unless an earlier one of `stages` makes their inputs again. A download of
    unknown size counts as the mean of the others.

    Raises:
        HpcgenError: the outputs cannot fit, or the manifest does not match the configuration.
    """
    names = (stages,) if isinstance(stages, str) else tuple(sorted(stages, key=DATA_STAGES.index))
    left, remade = dict[DataStage, list[Unit]](), frozenset[str]()
    for stage in names:
        left[stage] = _missing(
            stage, units_of_task(units(stage, job, manifest), task_id, num_tasks), job, remade
        )
        remade |= {output for unit in left[stage] for output in unit.outputs}
    return check_units(left, job, manifest)


def check_units(left: Mapping[DataStage, Sequence[Unit]], job: CorpusJob, manifest: Manifest) -> list[str]:
    """Checks the space for the units `left` to make in each stage, without reading their records. Returns warnings.

    Raises:
        HpcgenError: the outputs cannot fit.
    """
    names = tuple(left)
    need = sum((_estimate(stage, missing, job, manifest) for stage, missing in left.items()), Need())
    if not need.files:
        return []
    unknown = sum(file.size is None for file in manifest.files)
    warnings = []
    if unknown:
        warnings.append(
            f"the corpus has {counted(unknown, 'file')} of unknown size, so the space needed is a rough estimate"
        )
    for free in _limits(job.directory):
        warnings += _check_limit(need, free, names, job.directory)
    return warnings


def bytes_left(directory: Path) -> tuple[int, str]:
    """Bytes that can still be written below `directory`, and the name of the limit that is reached first."""
    return min((free.bytes, free.name) for free in _limits(directory) if free.bytes is not None)


def _limits(directory: Path) -> tuple[FreeSpace, ...]:
    """Every limit that applies below `directory`: the file system's, then the quotas."""
    return (_file_system(directory), *quotas(_existing(directory), os.geteuid()))


def _estimate(stage: DataStage, missing: Sequence[Unit], job: CorpusJob, manifest: Manifest) -> Need:
    """Estimates the space for the units `missing` of a stage, in proportion to their share of the input bytes."""
    if not missing:
        return Need()
    everything = units(stage, job, manifest)
    total = sum(unit.size for unit in everything)
    share = sum(unit.size for unit in missing) / total if total else len(missing) / len(everything)
    least, most = _outputs_of_all(stage, job, manifest)
    return Need(
        round(least * share),
        round(most * share),
        sum(len(unit.files) + 1 for unit in missing),  # plus one record
        sum(_certain(item, unit) for unit in missing for item in unit.inputs),
    )


def _certain(item: Input, unit: Unit) -> int:
    """Minimum bytes that `unit` writes for one of its inputs."""
    if unit.stage in ("tokenize", "prepare"):
        return 0  # the lines may be almost only metadata
    if item.name.endswith(PARQUET) and unit.stage == "extract":
        return 0  # an encoding of repeated values may be larger or smaller than the lines
    if unit.stage == "extract" or (unit.stage == "concat" and item.name.startswith("extract/")):
        return int((item.size or 0) * _STORED)
    return item.size or 0


def estimates(job: CorpusJob, manifest: Manifest) -> dict[DataStage, Need]:
    """Estimates the total output of each stage, without checking which units are done. Does not set `files`.

    Raises:
        HpcgenError: a file of the tokenizer is missing.
    """
    bounds = {stage: _outputs_of_all(stage, job, manifest) for stage in DATA_STAGES}
    return {stage: Need(round(least), round(most)) for stage, (least, most) in bounds.items()}


def bounds_text(need: Need) -> str:
    """Formats the bounds of `need`: 1.2 to 2.7 TB."""
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
    """Lower and upper bound of a stage's total output in bytes."""
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


def _file_system(directory: Path) -> FreeSpace:
    status = os.statvfs(_existing(directory))
    # File systems without an inode table (btrfs, some NFS servers) report 0 inodes.
    return FreeSpace(
        f"the file system of {directory}",
        status.f_bavail * status.f_frsize,
        status.f_favail if status.f_files else None,
    )


def _existing(directory: Path) -> Path:
    return next(path for path in (directory, *directory.parents) if path.exists())


def _check_limit(need: Need, free: FreeSpace, stages: Sequence[DataStage], directory: Path) -> list[str]:
    """Compares `need` with one limit. Returns a warning if the output may not fit.

    Raises:
        HpcgenError: the output cannot fit.
    """
    files = counted(need.files, "file")
    asked = f"{', '.join(stages)}: will write about {bounds_text(need)} in {files} below {directory}"
    hint = ""
    if "extract" in stages or "concat" in stages:
        hint = ", or use prepare instead of extract, concat and tokenize"
    if free.bytes is not None and need.certain > free.bytes:
        raise HpcgenError(
            f"{asked} (at least {size_text(need.certain)}), but {free.name} has only {size_text(free.bytes)} left",
            f"free some space, or use a sample (data.corpus.sample_files){hint}",
        )
    if free.files is not None and need.files > free.files:
        raise HpcgenError(
            f"{asked}, but {free.name} has only {counted(free.files, 'file')} left",
            f"remove some files{hint}",
        )
    if free.bytes is not None and need.most > free.bytes:
        doubt = "probably will not fit" if need.least > free.bytes else "may not fit"
        return [f"{asked}; {free.name} has {size_text(free.bytes)} left, so they {doubt}"]
    return []
