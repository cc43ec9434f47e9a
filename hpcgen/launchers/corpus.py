"""What is found out about a corpus before its stages are submitted: what is left to make, and whether it can be."""

from __future__ import annotations

from pathlib import Path

from hpcgen.planning.paths import corpus_job, manifest_of
from hpcgen.planning.plan import Plan


def missing_tasks(plan: Plan) -> dict[str, tuple[int, ...]]:
    """The tasks of each planned array that have an output to make, in the order of the stages.

    An output is to be made when its record is not there or is of another content, or when an earlier planned
    stage makes one of its inputs. Where this machine does not see the corpus, every task counts.

    Raises:
        HpcgenError: the manifest is damaged, or not what the configuration says.
    """
    arrays = {
        name: stage.allocation.array.num_tasks
        for name, stage in plan.stages.items()
        if stage.allocation.array
    }
    if not arrays or not _is_seen(plan):
        return {name: tuple(range(num_tasks)) for name, num_tasks in arrays.items()}
    from hpcgen.data.manifest import manifest_path, read_manifest
    from hpcgen.data.pending import pending
    from hpcgen.data.unit import DATA_STAGES

    job = corpus_job(plan.config)
    manifest = read_manifest(manifest_path(job.directory))
    missing: dict[str, tuple[int, ...]] = {}
    remade: frozenset[str] = frozenset()
    for stage in DATA_STAGES:
        if stage in arrays:
            found = pending(stage, job, manifest, remade)
            remade |= found.outputs
            missing[stage] = found.tasks(arrays[stage])
    return missing


def check_corpus(plan: Plan, missing: dict[str, tuple[int, ...]]) -> list[str]:
    """Warnings about the space that the stages with `missing` tasks need.

    Raises:
        HpcgenError: it is not there, or what is to be downloaded is gone or refused: one message now, in place of
            one from every task.
    """
    if not any(missing.values()) or not _is_seen(plan):
        return []
    from hpcgen.data.manifest import manifest_path, read_manifest
    from hpcgen.data.sources import check_source
    from hpcgen.data.space import check_space
    from hpcgen.data.unit import DATA_STAGES

    job = corpus_job(plan.config)
    manifest = read_manifest(manifest_path(job.directory))
    if missing.get("download"):
        check_source(job, manifest)
    return check_space([stage for stage in DATA_STAGES if missing.get(stage)], job, manifest)


def _is_seen(plan: Plan) -> bool:
    """Whether the manifest can be read from here; planning has said what else it may be."""
    corpus = plan.config.data.corpus
    return corpus is not None and Path(manifest_of(corpus)).exists()
