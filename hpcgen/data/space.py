"""Disk space check: compares the bytes and files that the stages will write with free space and quotas.

An error is raised only if the certain minimum does not fit: the known size of downloads, and the compressed size of
files to extract, which do not shrink. The expansion of compressed JSON Lines and their share of text differ between
corpora, so they are estimated by a lower and an upper bound. Outputs whose upper bound does not fit cause a warning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcgen.config.corpus import CorpusJob
from hpcgen.data.free_space import FreeSpace, limits
from hpcgen.data.manifest import Manifest
from hpcgen.data.stages import DATA_STAGES, ROUTES
from hpcgen.data.stages.base import Bounds, DataStage
from hpcgen.data.unit import Unit, units_of_task
from hpcgen.data.unit_checker import done_records
from hpcgen.errors import HpcgenError
from hpcgen.text import counted, size_text


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
    stages: str | Sequence[str],
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
    names = (stages,) if isinstance(stages, str) else stages
    left, remade = dict[str, list[Unit]](), frozenset[str]()
    for name, stage in DATA_STAGES.items():
        if name in names:
            mine = units_of_task(list(stage.units(job, manifest)), task_id, num_tasks)
            left[name] = _missing(stage, mine, job, remade)
            remade |= {output for unit in left[name] for output in unit.outputs}
    return check_units(left, job, manifest)


def check_units(left: Mapping[str, Sequence[Unit]], job: CorpusJob, manifest: Manifest) -> list[str]:
    """Checks the space for the units `left` to make in each stage, without reading their records. Returns warnings.

    Raises:
        HpcgenError: the outputs cannot fit.
    """
    stages = [DATA_STAGES[name] for name in left]
    need = sum((_estimate(stage, left[stage.name], job, manifest) for stage in stages), Need())
    if not need.files:
        return []
    unknown = sum(file.size is None for file in manifest.files)
    warnings = []
    if unknown:
        warnings.append(
            f"the corpus has {counted(unknown, 'file')} of unknown size, so the space needed is a rough estimate"
        )
    for free in limits(job.directory):
        warnings += _check_limit(need, free, stages, job.directory)
    return warnings


def _estimate(stage: DataStage, missing: Sequence[Unit], job: CorpusJob, manifest: Manifest) -> Need:
    """Estimates the space for the units `missing` of a stage, in proportion to their share of the input bytes."""
    if not missing:
        return Need()
    everything = list(stage.units(job, manifest))
    total = sum(unit.size for unit in everything)
    share = sum(unit.size for unit in missing) / total if total else len(missing) / len(everything)
    least, most = _outputs_of_all(stage, job, manifest)
    return Need(
        round(least * share),
        round(most * share),
        sum(len(unit.files) + 1 for unit in missing),  # plus one record
        sum(stage.certain_bytes(item) for unit in missing for item in unit.inputs),
    )


def estimates(job: CorpusJob, manifest: Manifest) -> dict[str, Need]:
    """Estimates the total output of each stage, without checking which units are done. Does not set `files`.

    Raises:
        HpcgenError: a file of the tokenizer is missing.
    """
    bounds = {name: _outputs_of_all(stage, job, manifest) for name, stage in DATA_STAGES.items()}
    return {name: Need(round(least), round(most)) for name, (least, most) in bounds.items()}


def bounds_text(need: Need) -> str:
    """Formats the bounds of `need`: 1.2 to 2.7 TB."""
    least, most = size_text(need.least), size_text(need.most)
    if least == most:
        return least
    number, unit = least.split()
    return f"{number if most.endswith(f' {unit}') else least} to {most}"


def _missing(stage: DataStage, mine: Sequence[Unit], job: CorpusJob, remade: frozenset[str]) -> list[Unit]:
    done = done_records(mine, job, stage.configuration(job))
    return [
        unit
        for unit, record in zip(mine, done, strict=True)
        if record is None or (remade and any(item.name in remade for item in unit.inputs))
    ]


def _outputs_of_all(stage: DataStage, job: CorpusJob, manifest: Manifest) -> Bounds:
    """Lower and upper bound of a stage's total output in bytes."""
    known = [file.size for file in manifest.files if file.size is not None]
    mean = sum(known) / len(known) if known else 0.0
    sizes = ((file, mean if file.size is None else float(file.size)) for file in manifest.files)
    return stage.output_bounds(sizes, job)


def _check_limit(need: Need, free: FreeSpace, stages: Sequence[DataStage], directory: Path) -> list[str]:
    """Compares `need` with one limit. Returns a warning if the output may not fit.

    Raises:
        HpcgenError: the output cannot fit.
    """
    files = counted(need.files, "file")
    names = ", ".join(stage.name for stage in stages)
    asked = f"{names}: will write about {bounds_text(need)} in {files} below {directory}"
    hint = ""
    if any(stage not in ROUTES[0] and not stage.makes_pairs for stage in stages):
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
