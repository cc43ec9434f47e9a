"""What is found out about a corpus before its stages are submitted: what is left to make, and whether it can be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hpcgen.planning.paths import corpus_job, manifest_of
from hpcgen.planning.plan import Plan

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
    from hpcgen.data.space import check_room

    job = corpus_job(plan.config)
    left = {stage: units for stage, units in missing.units.items() if units}
    check_source(left, job)
    return check_room(left, job, missing.manifest)


def _is_seen(plan: Plan) -> bool:
    """Whether the manifest can be read from here; planning has said what else it may be."""
    corpus = plan.config.data.corpus
    return corpus is not None and Path(manifest_of(corpus)).exists()
