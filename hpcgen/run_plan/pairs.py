"""The pairs of a run file, for the commands that inspect, verify and export pairs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpcgen.config import tokenizer as tokenizers
from hpcgen.config.corpus import CorpusJob, blend
from hpcgen.config.loader import load_run
from hpcgen.config.tokenizer import TokenizerConfig
from hpcgen.data.manifest import Manifest, manifest_path, read_manifest
from hpcgen.data.pair import as_prefixes
from hpcgen.data.pair_records import find_records, pairs_without_vocabulary_hash, stale_pairs
from hpcgen.data.record import Record
from hpcgen.data.verification import Expected
from hpcgen.errors import HpcgenError
from hpcgen.planning.paths import absolute_paths, corpus_job, trainer_data
from hpcgen.run_plan.corpus_job import read_job


@dataclass(frozen=True)
class RunPairs:
    """The pairs that a run trains on, with their tokenizer."""

    prefixes: tuple[Path, ...]
    tokenizer: TokenizerConfig
    job: CorpusJob | None
    """The job that produces the pairs; None if they come from elsewhere."""


def read_pairs(config: Path, overrides: tuple[str, ...]) -> RunPairs:
    """The pairs of a run file or of a job's corpus.json.

    Raises:
        ConfigErrors: the file is invalid.
    """
    if config.suffix == ".json":
        corpus_of_job = read_job(config, overrides)
        made = [dataset for part in blend(corpus_of_job.corpus).values() for dataset in part]
        return RunPairs(
            tuple(Path(dataset.prefix) for dataset in made), corpus_of_job.tokenizer, corpus_of_job
        )
    run = load_run(config, overrides)
    absolute = absolute_paths(run.config, run.directory)
    named = (dataset for blend in trainer_data(absolute).blends.values() for dataset in blend)
    prefixes = tuple(dict.fromkeys(Path(dataset.prefix) for dataset in named))
    job = corpus_job(absolute) if absolute.data.corpus is not None else None
    return RunPairs(prefixes, absolute.data.tokenizer, job)


def read_named(named: tuple[Path, ...], config: Path | None, overrides: tuple[str, ...]) -> RunPairs | None:
    """The pairs of the run file; None if there is no run file. If no pairs are named, run.yaml is the default."""
    if config is None and not named and Path("run.yaml").exists():
        config = Path("run.yaml")
    return read_pairs(config, overrides) if config is not None else None


def manifest_of_run(run: RunPairs | None) -> Manifest | None:
    """The manifest of the run's corpus, if there is one."""
    if run is None or run.job is None:
        return None
    path = manifest_path(run.job.directory)
    return read_manifest(path) if path.exists() else None


def expected_pairs(
    named: tuple[Path, ...], run: RunPairs | None, manifest: Manifest | None
) -> dict[Path, Expected]:
    """The expected properties of the named pairs, or of all pairs of the run."""
    prefixes = as_prefixes(named) or (list(run.prefixes) if run else [])
    if not prefixes:
        raise HpcgenError(
            "no pairs are named", "name prefixes, or with -c a run file that has a corpus or datasets"
        )
    records = find_records(prefixes)
    if run is None:
        return {prefix: Expected(record=records.get(prefix)) for prefix in prefixes}
    made = {prefix for prefix in prefixes if _is_made(run, prefix)}
    recorded = {prefix: record for prefix, record in records.items() if prefix in made}
    stale = stale_pairs(run.job, manifest, recorded) if run.job else {}
    unnamed = pairs_without_vocabulary_hash(run.job, recorded) if run.job else set()
    size, eod = tokenizers.vocab_size(run.tokenizer), tokenizers.eod_id(run.tokenizer)
    return {
        prefix: Expected(
            record=records.get(prefix),
            needs_record=prefix in made,
            stale=stale.get(prefix, ""),
            vocab_size=size,
            eod_id=eod,
            encoded_by=run.tokenizer if prefix in unnamed else None,
        )
        for prefix in prefixes
    }


def records_to_export(named: tuple[Path, ...], run: RunPairs | None) -> dict[Path, Record | None]:
    """The records of the pairs to export.

    Raises:
        HpcgenError: there are no pairs, or the run's own stages would make one of them again.
    """
    expected = expected_pairs(named, run, manifest_of_run(run))
    for prefix, known in expected.items():
        if known.needs_record and known.record is None:
            raise HpcgenError(
                f"{prefix}: the pair is incomplete or has no record", "run the stage prepare again"
            )
        if known.stale:
            raise HpcgenError(f"{prefix}: {known.stale}", "run the stage again")
    return {prefix: known.record for prefix, known in expected.items()}


def _is_made(run: RunPairs, prefix: Path) -> bool:
    """Returns True if the run's own stages produce the pair."""
    return run.job is not None and prefix.absolute().parent == run.job.directory / "tokens"
