"""Whether the pairs that training reads are those that the corpus's stages would make now."""

from __future__ import annotations

from pathlib import Path

from hpcgen.config.corpus import blend
from hpcgen.errors import HpcgenError
from hpcgen.planning.paths import corpus_job, manifest_of
from hpcgen.planning.plan import Plan
from trainer.contract.config import Dataset


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
    if corpus is None or {"tokenize", "prepare"} & plan.stages.keys():
        return []
    read = {path for stage in plan.stages.values() for path in stage.inputs}
    pairs = [pair for pairs in blend(corpus).values() for pair in pairs if f"{pair.prefix}.idx" in read]
    return pairs if Path(manifest_of(corpus)).exists() else []
