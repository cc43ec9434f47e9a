"""Whether the pairs that training reads are those that the corpus's stages would make now."""

from __future__ import annotations

from pathlib import Path

from hpcgen.config.corpus import blend
from hpcgen.errors import HpcgenError
from hpcgen.planning.paths import corpus_job, manifest_of
from hpcgen.planning.plan import Plan


def check_pairs(plan: Plan) -> None:
    """Refuses pairs of other files or settings than the run's; planning has spoken of those that are not there.

    Looks at the records of the pairs that the planned stages read, where no planned stage makes them anew and this
    machine sees the corpus. A pair without a record says nothing about itself and is taken as it is.

    Raises:
        HpcgenError: there are such pairs; or the manifest or the tokenizer is not what the configuration says.
    """
    corpus = plan.config.data.corpus
    if corpus is None or {"tokenize", "prepare"} & plan.stages.keys():
        return
    read = {path for stage in plan.stages.values() for path in stage.inputs}
    pairs = [pair for pairs in blend(corpus).values() for pair in pairs if f"{pair.prefix}.idx" in read]
    if not pairs or not Path(manifest_of(corpus)).exists():
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
