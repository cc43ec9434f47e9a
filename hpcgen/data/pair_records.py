"""The records of .bin/.idx pairs, and the pairs that they show to be stale."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hpcgen.config.corpus import CorpusJob
from hpcgen.data.concurrent_map import concurrent_map
from hpcgen.data.manifest import Manifest
from hpcgen.data.record import RECORD_FILE, Record, decode_record
from hpcgen.data.stages import PAIR_STAGES
from hpcgen.data.unit import Unit
from hpcgen.data.unit_checker import UnitChecker
from trainer.contract.files.index_header import BIN
from trainer.contract.files.regular_file import read_bytes


def find_records(prefixes: Sequence[Path]) -> dict[Path, Record]:
    """Finds the records of pairs. The record of a unit with several pairs is next to the first pair."""
    found: dict[Path, Record] = {}
    for directory in dict.fromkeys(prefix.parent for prefix in prefixes):
        made: dict[str, Record] = {}
        for record in _records(directory):
            made |= dict.fromkeys(pair_names(record), record)
        here = (prefix for prefix in prefixes if prefix.parent == directory)
        found |= {prefix: made[prefix.name] for prefix in here if prefix.name in made}
    return found


def stale_pairs(job: CorpusJob, manifest: Manifest | None, records: Mapping[Path, Record]) -> dict[Path, str]:
    """Finds the pairs that the stages would no longer make as recorded, with the reason.

    `manifest` is the manifest of the corpus, if there is one.
    """
    checker, wanted = UnitChecker(job), dict[tuple[str, Path], Unit]()
    names = {stage.name for stage in PAIR_STAGES}
    for stage in PAIR_STAGES:
        for unit in stage.units(job, manifest) if manifest is not None else ():
            wanted |= {(stage.name, job.directory / output): unit for output in unit.outputs}

    def reason(item: tuple[Path, Record]) -> str:
        prefix, record = item
        if record.stage not in names or not checker.has_settings(record):
            what = "tokenizer, json_key, chat, drop_empty or bad_documents"
            return f"stale: it was made with other settings than those of the run file ({what})"
        unit = wanted.get((record.stage, prefix.absolute()))
        if manifest is not None and (unit is None or not checker.is_current(unit, record)):
            return "stale: it was not made from the files that the manifest lists for it"
        return ""

    reasons = concurrent_map(list(records.items()), reason)
    return {prefix: why for prefix, why in zip(records, reasons, strict=True) if why}


def pairs_without_vocabulary_hash(job: CorpusJob, records: Mapping[Path, Record]) -> set[Path]:
    """Finds pairs of earlier versions, whose records do not cover the content of GPT-2's vocabulary."""
    earlier = {stage.name: stage.earlier_configuration(job) for stage in PAIR_STAGES}
    return {
        prefix
        for prefix, record in records.items()
        if (record.stage, record.configuration) in earlier.items()
    }


def _records(directory: Path) -> Iterator[Record]:
    for path in sorted(directory.glob(f"*{RECORD_FILE}")):
        try:
            record = decode_record(read_bytes(path))
        except OSError:
            continue
        if record is not None:  # otherwise, the pair is treated as one without a record
            yield record


def pair_names(record: Record) -> list[str]:
    """Names (without directory) of the pairs that a record describes."""
    names = (Path(output.name).name for output in record.outputs)
    return [name.removesuffix(BIN) for name in names if name.endswith(BIN)]
