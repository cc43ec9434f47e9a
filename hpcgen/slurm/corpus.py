"""What is found out about a corpus before its stages are submitted: what is left to make, and whether it can be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hpcgen.config.corpus import blend
from hpcgen.errors import HpcgenError
from hpcgen.planning.paths import corpus_job, manifest_of
from hpcgen.planning.plan import Plan
from trainer.contract.config import Dataset

if TYPE_CHECKING:
    from hpcgen.data.manifest import Manifest
    from hpcgen.data.unit import DataStage, Unit


class MissingTasks(dict[str, tuple[int, ...]]):
    """The tasks of each planned array that have an output to make, in the order of the stages."""

    def __init__(
        self,
        tasks: Mapping[str, tuple[int, ...]],
        units: Mapping[DataStage, list[Unit]] | None = None,
        manifest: Manifest | None = None,
    ) -> None:
        super().__init__(tasks)
        self.units = units or {}
        """What these tasks will make; nothing where this machine does not see the corpus."""
        self.manifest = manifest


def missing_tasks(plan: Plan) -> MissingTasks:
    """The tasks of each planned array that have an output to make, in the order of the stages.

    An output is to be made when its record is not there or is of another content, or when an earlier planned
    stage makes one of its inputs. Where this machine does not see the corpus, every task counts.

    Raises:
        HpcgenError: the manifest is damaged, not what the configuration says, or of another selection of files.
    """
    arrays = {
        name: stage.allocation.array.num_tasks
        for name, stage in plan.stages.items()
        if stage.allocation.array
    }
    if not arrays or not _is_seen(plan):
        return MissingTasks({name: tuple(range(num_tasks)) for name, num_tasks in arrays.items()})
    from hpcgen.data.manifest import manifest_path, read_manifest, require_selection
    from hpcgen.data.pending import pending
    from hpcgen.data.unit import DATA_STAGES, units

    job = corpus_job(plan.config)
    require_selection(job)
    manifest = read_manifest(manifest_path(job.directory))
    tasks: dict[str, tuple[int, ...]] = {}
    left: dict[DataStage, list[Unit]] = {}
    remade: frozenset[str] = frozenset()
    for stage in DATA_STAGES:
        if stage in arrays:
            found = pending(stage, job, manifest, remade)
            remade |= found.outputs
            tasks[stage] = found.tasks(arrays[stage])
            all_units = units(stage, job, manifest)
            left[stage] = [all_units[index] for index in found.indices]
    return MissingTasks(tasks, left, manifest)


def check_corpus(plan: Plan, missing: MissingTasks) -> list[str]:
    """Warnings about the space that the `missing` tasks need.

    Raises:
        HpcgenError: there is no room, or what they will read is gone or refused: one message now, in place of one
            from every task.
    """
    if missing.manifest is None or not any(missing.values()):
        return []
    from hpcgen.data.sources import check_source
    from hpcgen.data.space import check_units

    job = corpus_job(plan.config)
    left = {stage: units for stage, units in missing.units.items() if units}
    check_source(left, job)
    return check_units(left, job, missing.manifest)


def _is_seen(plan: Plan) -> bool:
    """Whether the manifest can be read from here; planning has said what else it may be."""
    corpus = plan.config.data.corpus
    return corpus is not None and Path(manifest_of(corpus)).exists()


def require_pairs(plan: Plan) -> None:
    """Refuses stages whose pairs are not made yet, where no planned stage makes them, besides what `check_pairs` does.

    Raises:
        HpcgenError: as `check_pairs`; or pairs that the planned stages read are not there.
    """
    unmade = [
        f"{pair.prefix}{suffix}"
        for pair in _pairs_read(plan)
        for suffix in (".idx", ".bin")
        if not Path(f"{pair.prefix}{suffix}").exists()
    ]
    if unmade:
        more = f" (and {len(unmade) - 1} more files)" if len(unmade) > 1 else ""
        raise HpcgenError(
            f"{unmade[0]}{more} is not made yet, and stage {' and '.join(plan.stages)} would fail without it",
            f"hpcgen submit prepare {' '.join(plan.stages)} makes it first; "
            "or extract, concat and tokenize in place of prepare",
        )
    check_pairs(plan)


def check_pairs(plan: Plan) -> None:
    """Refuses pairs of other files or settings than the run's; pairs that are not there are passed over.

    Looks at the records of the pairs that the planned stages read, where no planned stage makes them anew and this
    machine sees the corpus. A pair without a record says nothing about itself and is taken as it is.

    Raises:
        HpcgenError: there are such pairs; or the manifest or the tokenizer is not what the configuration says.
    """
    pairs = _pairs_read(plan)
    if not pairs:
        return
    from hpcgen.data.manifest import manifest_path, read_manifest
    from hpcgen.data.verification import find_records, stale_pairs

    job = corpus_job(plan.config)
    records = find_records([Path(pair.prefix) for pair in pairs])
    stale = stale_pairs(job, read_manifest(manifest_path(job.directory)), records)
    if not stale:
        return
    prefix, reason = next(iter(stale.items()))
    more = f" (and {len(stale) - 1} more of {len(pairs)} pairs)" if len(stale) > 1 else ""
    raise HpcgenError(
        f"{prefix}{more}: {reason}",
        f"hpcgen submit prepare {' '.join(plan.stages)} makes it anew first; "
        "or extract, concat and tokenize in place of prepare",
    )


def _pairs_read(plan: Plan) -> list[Dataset]:
    """The pairs of the corpus that planned stages read and none makes; none where this machine sees no corpus."""
    corpus = plan.config.data.corpus
    if corpus is None or any(stage.kind.makes_pairs for stage in plan.stages.values()):
        return []
    read = {path for stage in plan.stages.values() for path in stage.inputs}
    pairs = [pair for pairs in blend(corpus).values() for pair in pairs if f"{pair.prefix}.idx" in read]
    return pairs if Path(manifest_of(corpus)).exists() else []
