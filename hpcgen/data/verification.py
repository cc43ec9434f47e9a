"""Verification of .bin/.idx pairs: their structure, their records, and what Megatron-Core's own reader returns."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import trainer
from hpcgen.config.tokenizer import TokenizerConfig
from hpcgen.data.id_scan import IdScan
from hpcgen.data.indexed_dataset import read_counts
from hpcgen.data.loss_masks import MaskScan
from hpcgen.data.manifest import Manifest
from hpcgen.data.pair import open_pair
from hpcgen.data.pair_records import pair_names
from hpcgen.data.record import FileIdentity, Record
from hpcgen.data.reencoding import Reencoder
from hpcgen.data.workers import cores
from hpcgen.errors import HpcgenError, Problem, problem_of
from trainer.contract.files import loss_mask
from trainer.contract.files.index_header import SUFFIXES, bin_path, idx_path
from trainer.contract.files.regular_file import open_regular

_CHUNK_BYTES = 8 * 1024 * 1024
_CANNOT_IMPORT = 3
"""Exit status of trainer.data.dataset_check without megatron-core."""
_AGAIN = "run the stage again"

OnProgress = Callable[[int, int], None]
"""Called with the bytes read so far and the total."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Expected properties of a pair; None if unknown."""

    record: Record | None = None
    """Record of the task that made the pair."""
    needs_record: bool = False
    """True if a missing record is an error."""
    stale: str = ""
    """Reason why the corpus's stages would no longer make this pair; empty if they would."""
    vocab_size: int | None = None
    """Size of the vocabulary. All ids must be smaller."""
    eod_id: int | None = None
    """Last id of each sequence, checked only in a pair with a record."""
    encoded_by: TokenizerConfig | None = None
    """Tokenizer for encoding documents again, set if the record does not cover the vocabulary's content."""


@dataclass(kw_only=True)
class PairReport:
    """Result for one pair."""

    prefix: str
    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    bytes: int = 0
    dtype: str = ""
    learned: int | None = None
    """Tokens that are learned, according to the loss mask; None if the documents are not chats."""
    largest_id: int | None = None
    hashes_checked: bool = False
    """True if the files' hashes were compared with a record."""
    rows_checked: bool = False
    """True if the rows of an export's shard were compared with the pair that it was made from."""
    megatron_checked: bool = False
    documents_encoded: int = 0
    """Number of documents encoded again because the record does not cover the vocabulary's content."""
    findings: list[Problem] = field(default_factory=list)
    """Empty if the pair is valid."""


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """Result for all pairs."""

    pairs: list[PairReport]
    megatron_core: str | None
    """Version of megatron-core that read the pairs; None if it did not read them."""
    not_checked: str = ""
    """Reason why megatron-core did not read them."""
    unmeasured: list[str] = field(default_factory=list)
    """Downloaded files of the corpus without a size or SHA-256 in the manifest. Only the server's own statement shows
    that they are complete."""

    @property
    def num_wrong(self) -> int:
        """Number of pairs with findings."""
        return sum(bool(pair.findings) for pair in self.pairs)


def verify(
    expected: Mapping[Path, Expected],
    *,
    workers: int | None = None,
    megatron: bool = True,
    on_progress: OnProgress | None = None,
    manifest: Manifest | None = None,
) -> VerifyReport:
    """Reads every byte of the pairs at the prefixes in `expected`, `workers` pairs at a time. Default: one per core.

    `manifest` is the manifest of their corpus, if there is one. With `megatron`, Megatron-Core's own reader must
    return the same content, if it is installed.
    """
    meter = Meter(sum(_size(path) for prefix in expected for path in _files(prefix)), on_progress)

    configs = {known.encoded_by for known in expected.values() if known.encoded_by is not None}
    reencoders = {config: Reencoder(config) for config in configs}

    def one(item: tuple[Path, Expected]) -> PairReport:
        prefix, known = item
        report = _verify_pair(prefix, known, meter.add)
        if known.encoded_by is not None and not report.findings:
            report.documents_encoded, finding = reencoders[known.encoded_by].compare(open_pair(prefix))
            report.findings += [finding] if finding else []
        return report

    with ThreadPoolExecutor(workers or cores()) as pool:  # hashing and numpy release the GIL
        pairs = list(pool.map(one, expected.items()))
    for pair, (prefix, known) in zip(pairs, expected.items(), strict=True):
        if known.record is not None and prefix.name == pair_names(known.record)[0]:
            pair.findings += _unit_findings(prefix.parent, known.record)
    unmeasured = _unmeasured(manifest) if manifest is not None else []
    version, reason = None, "not requested"
    if megatron:
        version, reason = _read_by_megatron([pair for pair in pairs if pair.documents])
    return VerifyReport(pairs=pairs, megatron_core=version, not_checked=reason, unmeasured=unmeasured)


def _unmeasured(manifest: Manifest) -> list[str]:
    return [
        file.name
        for file in manifest.files
        if file.path is None and file.size is None and file.sha256 is None
    ]


def _verify_pair(prefix: Path, expected: Expected, advance: Callable[[int], None]) -> PairReport:
    report = PairReport(prefix=str(prefix))
    try:
        pair = open_pair(prefix)
        counts = read_counts(prefix)
        report.documents, report.sequences, report.tokens = counts.documents, counts.sequences, counts.tokens
        report.dtype = counts.dtype
        report.bytes = sum(map(_size, _files(prefix)))
        report.findings += pair.faults()
        is_chats = loss_mask.has_mask(prefix)
        checks_ends = (
            expected.record is not None
            and not report.findings
            and not (is_chats or expected.record.has_masks)
        )
        eod_id = expected.eod_id if checks_ends else None
        scan = IdScan(pair, expected.vocab_size, eod_id)
        hashes = {
            bin_path(prefix).name: hash_file(bin_path(prefix), scan.add, advance),
            idx_path(prefix).name: hash_file(idx_path(prefix), lambda chunk: None, advance),
        }
        if is_chats:
            mask = MaskScan(prefix)
            hashes[mask.path.name] = hash_file(mask.path, mask.add, advance)
            report.learned = mask.num_learned
            report.findings += mask.findings(report.tokens)
    except HpcgenError as error:
        report.findings += error.mistakes
        return report
    except OSError as error:
        report.findings.append(Problem("", str(error)))
        return report
    report.largest_id = scan.largest
    report.findings += scan.findings
    if expected.stale:
        report.findings.append(problem_of(prefix, expected.stale, _AGAIN))
    if expected.record is None and expected.needs_record:
        reason = "it has no record, because its task was killed or because another tool made it"
        report.findings.append(problem_of(prefix, reason, _AGAIN))
    if expected.record is not None:
        report.hashes_checked = True
        report.findings += _hash_findings(prefix, expected.record, hashes)
    return report


def _hash_findings(prefix: Path, record: Record, hashes: Mapping[str, FileIdentity]) -> Iterator[Problem]:
    directory, mask = prefix.parent, Path(loss_mask.mask_path(prefix))
    if record.has_masks and mask.name not in hashes:
        yield problem_of(mask, "the loss mask of these chats is missing", _AGAIN)
    if mask.name in hashes and not record.has_masks:
        yield problem_of(mask, "a loss mask that the record does not know", f"remove it, or {_AGAIN}")
    for output in record.outputs:
        found = hashes.get(Path(output.name).name)
        if found is not None:
            yield from difference(directory / found.name, output, found)


def difference(path: Path, recorded: FileIdentity, found: FileIdentity) -> Iterator[Problem]:
    """Yields the difference between a file and its record, if there is one."""
    if found.size != recorded.size:
        yield problem_of(path, f"the size is {found.size:,} bytes, but its record has {recorded.size:,}")
    elif found.sha256 != recorded.sha256:
        yield problem_of(path, f"the SHA-256 is {found.sha256}, but its record has {recorded.sha256}")


def _unit_findings(directory: Path, record: Record) -> Iterator[Problem]:
    """Checks what all pairs of a record share: the counts, and other files such as rejected lines."""
    if not record.counts.balanced:
        yield problem_of(directory / pair_names(record)[0], "its record does not account for every document")
    for output in record.outputs:
        path = directory / Path(output.name).name
        if path.name.endswith((*SUFFIXES, loss_mask.SUFFIX)):
            continue
        try:
            yield from difference(path, output, hash_file(path, lambda chunk: None, lambda size: None))
        except OSError as error:
            yield problem_of(path, str(error.strerror))
    try:
        found = [read_counts(directory / name) for name in pair_names(record)]
    except HpcgenError:
        return  # a finding of that pair already
    for what, recorded in (
        ("documents", record.counts.documents_out),
        ("sequences", record.counts.sequences),
        ("tokens", record.counts.tokens),
    ):
        total = sum(getattr(counts, what) for counts in found)
        if total != recorded:
            names = ", ".join(pair_names(record))
            yield problem_of(directory, f"{names}: {total:,} {what}, but the record has {recorded:,}")


def _read_by_megatron(pairs: Sequence[PairReport]) -> tuple[str | None, str]:
    """Adds to `pairs` the differences that Megatron-Core's reader finds.

    Returns the version of megatron-core, or None and the reason why it did not read them.
    """
    if not pairs:
        return None, "there is no complete pair to read"
    prefixes = {str(Path(pair.prefix).absolute()): pair for pair in pairs}
    done = subprocess.run(
        [sys.executable, "-m", "trainer.data.dataset_check", *prefixes],
        cwd=Path(str(trainer.__file__)).parents[
            1
        ],  # the working directory may have another folder named trainer
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == _CANNOT_IMPORT:
        return None, f"megatron-core cannot be imported ({done.stderr.strip().splitlines()[-1]})"
    # Libraries may print other lines while they are imported.
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = {line["prefix"]: line for line in lines if "prefix" in line}
    for prefix, pair in prefixes.items():
        if prefix in found:
            pair.megatron_checked = True
            pair.findings += _megatron_findings(pair, found[prefix])
        else:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            reason = f"megatron-core's reader ended with status {done.returncode}: {last}"
            pair.findings.append(problem_of(Path(pair.prefix), reason))
    return (str(lines[0]["megatron_core"]) if lines else None), ""


def _megatron_findings(pair: PairReport, found: Mapping[str, Any]) -> Iterator[Problem]:
    prefix = Path(pair.prefix)
    if "error" in found:
        yield problem_of(prefix, f"megatron-core cannot read it: {found['error']}")
        return
    for what in ("documents", "sequences", "tokens", "dtype"):
        if found[what] != getattr(pair, what):
            reason = f"megatron-core reads {what} = {found[what]}, hpcgen {getattr(pair, what)}"
            yield problem_of(prefix, reason)
    if pair.findings:
        return  # an invalid index or invalid ids make a comparison of documents meaningless
    own = open_pair(prefix)
    for read in found["read"]:
        ids = own.document(read["document"]).astype("<i8")
        if (len(ids), hashlib.sha256(ids.tobytes()).hexdigest()) != (read["tokens"], read["sha256"]):
            reason = f"megatron-core and hpcgen read different ids in document {read['document']:,}"
            yield problem_of(prefix, reason)
            return


def hash_file(path: Path, on_chunk: Callable[[bytes], None], advance: Callable[[int], None]) -> FileIdentity:
    """Computes the size and SHA-256 of a file, and calls `on_chunk` with every chunk."""
    digest, size = hashlib.sha256(), 0
    with open_regular(path) as file:
        for chunk in _chunks(file):
            digest.update(chunk)
            on_chunk(chunk)
            size += len(chunk)
            advance(len(chunk))
    return FileIdentity(path.name, size, digest.hexdigest())


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK_BYTES):
        yield chunk


def _files(prefix: Path) -> list[Path]:
    mask = [Path(loss_mask.mask_path(prefix))] if loss_mask.has_mask(prefix) else []
    return [bin_path(prefix), idx_path(prefix), *mask]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0  # reading the pair reports the error


class Meter:
    """Adds up the bytes read by all threads."""

    def __init__(self, total: int, on_progress: OnProgress | None) -> None:
        self._total, self._done = total, 0
        self._on_progress = on_progress
        self._lock = threading.Lock()

    def add(self, size: int) -> None:
        """Adds bytes that were read."""
        with self._lock:
            self._done += size
            if self._on_progress:
                self._on_progress(self._done, self._total)
