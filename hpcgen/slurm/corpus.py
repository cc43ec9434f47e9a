"""Checks of a corpus before its stages are submitted: which outputs are missing, and whether they can be built."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hpcgen.config.corpus import blend
from hpcgen.errors import HpcgenError
from hpcgen.planning.paths import corpus_job, manifest_of
from hpcgen.run_plan.plan import Plan
from hpcgen.slurm.training_data import check_split, check_tokenizers, check_training_data
from hpcgen.text import counted
from trainer.contract.config import Dataset
from trainer.contract.files.index_header import SUFFIXES

if TYPE_CHECKING:
    from hpcgen.data.manifest import Manifest
    from hpcgen.data.unit import Unit


class MissingTasks(dict[str, tuple[int, ...]]):
    """Stage -> the tasks of its array with missing outputs, in the order of the stages."""

    def __init__(
        self,
        tasks: Mapping[str, tuple[int, ...]],
        units: Mapping[str, list[Unit]] | None = None,
        manifest: Manifest | None = None,
    ) -> None:
        super().__init__(tasks)
        self.units = units or {}
        """Outputs that these tasks will build; empty if the corpus is not visible on this machine."""
        self.manifest = manifest


def missing_tasks(plan: Plan) -> MissingTasks:
    """The tasks of each planned array with missing outputs, in the order of the stages.

    An output is missing if its record is missing or describes other content, or if an earlier planned stage builds
    one of its inputs. If the corpus is not visible on this machine, all tasks are returned.

    Raises:
        HpcgenError: the manifest is damaged, or does not match the configuration or the selection of files.
    """
    arrays = {
        name: stage.allocation.array.num_tasks
        for name, stage in plan.stages.items()
        if stage.allocation.array
    }
    if not arrays or not _is_seen(plan):
        return MissingTasks({name: tuple(range(num_tasks)) for name, num_tasks in arrays.items()})
    from hpcgen.data import manifest, pending, stages  # few runs prepare data with their training

    job = corpus_job(plan.config)
    manifest.require_selection(job)
    planned = manifest.planned(job)
    tasks: dict[str, tuple[int, ...]] = {}
    left: dict[str, list[Unit]] = {}
    remade: frozenset[str] = frozenset()
    for name in stages.DATA_STAGES:
        if name in arrays:
            found = pending.pending(name, job, planned, remade)
            remade |= found.outputs
            tasks[name] = found.tasks(arrays[name])
            left[name] = list(found.units)
    return MissingTasks(tasks, left, planned)


def check_corpus(plan: Plan, missing: MissingTasks) -> list[str]:
    """Warnings about the space that the `missing` tasks need.

    Raises:
        HpcgenError: there is not enough space, their inputs are missing or refused, or the first documents show a
            mistake. Reported here once instead of by every task.
    """
    if missing.manifest is None or not any(missing.values()):
        return []
    from hpcgen.data import first_documents, sources, space, stages  # need msgspec

    job = corpus_job(plan.config)
    left = {stage: units for stage, units in missing.units.items() if units}
    sources.check_source(left, job)
    if any(stages.DATA_STAGES[name].joins_documents for name in left):
        first_documents.check_first_documents(job, missing.manifest)
        is_read = plan.trainer is not None and plan.trainer.data.datasets == blend(job.corpus).get("datasets")
        if is_read and (documents := first_documents.documents_of_pairs(job, missing.manifest)) is not None:
            check_split(plan, documents)
    return space.check_units(left, job, missing.manifest)


def _is_seen(plan: Plan) -> bool:
    """True if the manifest is visible on this machine."""
    corpus = plan.config.data.corpus
    return corpus is not None and Path(manifest_of(corpus)).exists()


def require_pairs(plan: Plan) -> None:
    """Refuses stages whose pairs are missing, unless a planned stage builds them, and calls `check_pairs`.

    Pairs in a directory that this machine does not see are not checked.

    Raises:
        HpcgenError: pairs that the planned stages read are missing or stale.
    """
    missing = [
        path
        for pair in _pairs_read(plan)
        for path in (pair.prefix + suffix for suffix in SUFFIXES)
        if not Path(path).exists() and Path(*Path(path).parts[:2]).exists()
    ]
    if missing:
        more = f" (and {counted(len(missing) - 1, 'more file')})" if len(missing) > 1 else ""
        first = "" if _is_seen(plan) else "`hpcgen data plan` and then "
        raise HpcgenError(
            f"{missing[0]}{more} does not exist yet, and stage {' and '.join(plan.stages)} would fail without it",
            f"run {first}`hpcgen submit prepare {' '.join(plan.stages)}` to build it first, "
            "or use extract, concat and tokenize instead of prepare",
        )
    check_pairs(plan)


def check_pairs(plan: Plan) -> None:
    """Refuses pairs that training cannot use. Missing pairs are ignored.

    Raises:
        HpcgenError: pairs are stale, damaged, or do not suit the run's configuration.
    """
    _check_records(plan)
    check_tokenizers(plan)
    check_training_data(plan)


def _check_records(plan: Plan) -> None:
    """Refuses pairs that were built from other files or settings than the run's.

    Checks the records of the pairs that the planned stages read, unless a planned stage rebuilds them or the corpus
    is not visible on this machine. A pair without a record is accepted. Without the extra `data`, nothing is checked,
    as a warning of the plan says.

    Raises:
        HpcgenError: there are such pairs, or the manifest or the tokenizer does not match the configuration.
    """
    pairs = _pairs_read(plan)
    if not pairs or not _is_seen(plan):
        return
    try:
        from hpcgen.data import manifest, pair_records  # needs the extra `data`
    except ModuleNotFoundError:
        return
    job = corpus_job(plan.config)
    records = pair_records.find_records([Path(pair.prefix) for pair in pairs])
    planned = manifest.planned(job)
    stale = pair_records.stale_pairs(job, planned, records)
    if not stale:
        return
    prefix, reason = next(iter(stale.items()))
    more = f" (and {len(stale) - 1} more of {len(pairs)} pairs)" if len(stale) > 1 else ""
    raise HpcgenError(
        f"{prefix}{more}: {reason}",
        f"run `hpcgen submit prepare {' '.join(plan.stages)}` to rebuild it first, "
        "or use extract, concat and tokenize instead of prepare",
    )


def _pairs_read(plan: Plan) -> list[Dataset]:
    """The pairs that planned stages read but do not build."""
    corpus = plan.config.data.corpus
    if corpus is None or any(stage.kind.makes_pairs for stage in plan.stages.values()):
        return []
    read = plan.prefixes
    return [pair for pairs in blend(corpus).values() for pair in pairs if pair.prefix in read]
