"""The units of each stage: which files are made in one step, and from which inputs.

Layout of the corpus's directory:
    manifest.jsonl            frozen list of files
    download/NAME             as in the source
    extract/NAME              as plain JSON Lines, without .zst or .gz; plain .jsonl files are not copied
    concat/train-00000-of-00072.jsonl
    tokens/train-00000-of-00072.bin, .idx
The record of a unit (hpcgen.data.record) is next to its first output and shows whether the unit is done. Outputs for
another num_output_files have other names. They are kept because they may be in use, as are outputs of files that a
new manifest drops. No stage reads them, and they may be removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from hpcgen.config.corpus import CorpusJob, num_outputs, output_names
from hpcgen.data.assignment import Share, assign
from hpcgen.data.concurrent_map import concurrent_map
from hpcgen.data.listed_files import PARQUET, extracted_name
from hpcgen.data.manifest import Manifest, ManifestFile
from hpcgen.data.record import SIDE_FILE, FileIdentity, read_record
from hpcgen.errors import HpcgenError

DataStage = Literal["download", "extract", "concat", "tokenize", "prepare"]
DATA_STAGES: tuple[DataStage, ...] = get_args(DataStage)
EXTRACTED = (".zst", ".gz", PARQUET)
"""Suffixes of the files that the stage extract converts to plain JSON Lines."""


@dataclass(frozen=True, kw_only=True)
class Input:
    """A file that a unit reads."""

    name: str
    """Name in the manifest, or path relative to the corpus's directory."""
    path: Path
    size: int | None = None
    """Size in bytes, for progress and balance."""
    made_by: Path | None = None
    """Output of an earlier stage whose record describes the file; None for files of the source."""
    maker: Unit | None = None
    """The unit that makes the file."""
    sha256: str | None = None
    modified_ns: int | None = None

    def identity(self) -> FileIdentity:
        """Identity of the content that the file must have.

        Raises:
            HpcgenError: the stage that makes the file has not made it yet.
        """
        known = self.planned_identity() or self._recorded_identity()
        if known is None:
            raise HpcgenError(f"{self.path} does not exist yet or is incomplete", self._hint())
        return known

    def require(self) -> None:
        """Checks that the file exists.

        Raises:
            HpcgenError: the file does not exist.
        """
        if not self.path.is_file():
            raise HpcgenError(f"{self.path} does not exist", self._hint())

    def bytes_to_read(self) -> int:
        """Size of the file; for an output of an earlier stage, from its record. 0 if unknown."""
        made = self._recorded_identity() if self.made_by else None
        return (made.size if made else self.size) or 0

    def recorded_documents(self) -> int | None:
        """Number of documents, if the record of the file's unit has it and the file is the unit's only output."""
        record = read_record(self.made_by) if self.made_by else None
        if record is None or len(record.outputs) != 1 or not record.counts.documents_in:
            return None
        return record.counts.documents_out

    def planned_identity(self) -> FileIdentity | None:
        """Identity according to the manifest; None if only the record of an earlier stage describes the file."""
        if self.made_by is None or self.sha256:
            return FileIdentity(self.name, self.size, self.sha256, self.modified_ns)
        return None

    def _recorded_identity(self) -> FileIdentity | None:
        record = read_record(self.made_by) if self.made_by else None
        return self.find_in(record.outputs) if record else None

    def find_in(self, outputs: Sequence[FileIdentity]) -> FileIdentity | None:
        """Returns the entry of this file in `outputs`, or None."""
        return next((made.without_time() for made in outputs if made.name == self.name), None)

    def is_changed(self) -> bool:
        """Returns whether a file of the source exists and differs from the one that was planned."""
        if self.made_by is not None:
            return False
        try:
            status = self.path.stat()
        except OSError:
            return False
        if self.size is not None and status.st_size != self.size:
            return True
        return self.sha256 is None and self.modified_ns not in (None, status.st_mtime_ns)

    def _hint(self) -> str:
        if self.made_by is None:
            return "it existed when the corpus was planned; restore it, or plan again"
        return f"run the stage {self.name.partition('/')[0]} first"


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Part of a stage that is made in one step and recorded as done."""

    stage: DataStage
    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]
    """Paths relative to the corpus's directory; for pairs, their prefixes. Line n of the input goes to output
    n mod len(outputs)."""
    url: str | None = None
    """URL of a download."""

    @property
    def name(self) -> str:
        """Name of the first output; the record is next to it."""
        return self.outputs[0]

    @property
    def size(self) -> int:
        """Total of the known input sizes in the manifest."""
        return sum(item.size or 0 for item in self.inputs)

    @property
    def files(self) -> tuple[str, ...]:
        """Files that the unit makes, relative to the corpus's directory."""
        if self.stage not in ("tokenize", "prepare"):
            return self.outputs
        return tuple(prefix + suffix for prefix in self.outputs for suffix in (".bin", ".idx"))

    @property
    def side_files(self) -> tuple[str, ...]:
        """Files that the unit makes only if they have content."""
        return tuple(prefix + SIDE_FILE for prefix in self.outputs) if self.files != self.outputs else ()


def units(stage: DataStage, job: CorpusJob, manifest: Manifest) -> list[Unit]:
    """All units of a stage, in the order of the manifest. `units_of_task` assigns them to tasks.

    Raises:
        HpcgenError: the manifest has no file for a split of the configuration.
    """
    return list(_UNITS[stage](job, manifest))


def units_of_task(all_units: list[Unit], task_id: int, num_tasks: int) -> list[Unit]:
    """Units of task `task_id` of `num_tasks`: every num_tasks-th, because neighbors often have similar sizes."""
    return all_units[task_id::num_tasks]


def bytes_to_read(selected: Sequence[Unit]) -> list[int]:
    """Returns the input size of each unit, from the records of earlier stages if there are any. 0 if unknown."""
    return concurrent_map(selected, lambda unit: sum(item.bytes_to_read() for item in unit.inputs))


def is_local(file: ManifestFile) -> bool:
    """Returns whether the file is on this file system and needs no download."""
    return file.path is not None


def source_input(directory: Path, file: ManifestFile) -> Input:
    """A file of the corpus after download, or in place if it is local."""
    if file.path is not None:
        return Input(
            name=file.name,
            path=Path(file.path),
            size=file.size,
            sha256=file.sha256,
            modified_ns=file.modified_ns,
        )
    maker = _download_unit(directory, file)
    path = directory / maker.name
    return Input(name=maker.name, path=path, size=file.size, made_by=path, maker=maker, sha256=file.sha256)


def _extracted(directory: Path, file: ManifestFile) -> Input:
    """A file of the corpus, as plain JSON Lines."""
    if not file.name.endswith(EXTRACTED):
        return source_input(directory, file)
    maker = _extract_unit(directory, file)
    path = directory / maker.name
    return Input(name=maker.name, path=path, size=file.size, made_by=path, maker=maker)


def _download_unit(directory: Path, file: ManifestFile) -> Unit:
    output = f"download/{file.name}"
    wanted = Input(name=file.name, path=directory / output, size=file.size, sha256=file.sha256)
    return Unit(stage="download", inputs=(wanted,), outputs=(output,), url=file.url)


def _extract_unit(directory: Path, file: ManifestFile) -> Unit:
    output = f"extract/{extracted_name(file.name)}"
    return Unit(stage="extract", inputs=(source_input(directory, file),), outputs=(output,))


def _download_units(job: CorpusJob, manifest: Manifest) -> Iterator[Unit]:
    for file in manifest.files:
        if not is_local(file):
            yield _download_unit(job.directory, file)


def _extract_units(job: CorpusJob, manifest: Manifest) -> Iterator[Unit]:
    for file in manifest.files:
        if file.name.endswith(EXTRACTED):
            yield _extract_unit(job.directory, file)


def _shares(job: CorpusJob, manifest: Manifest) -> Iterator[tuple[list[ManifestFile], Share, list[str]]]:
    """Yields for each share of each split: the split's files, the share, and the names of the split's outputs."""
    for split, count in num_outputs(job.corpus).items():
        files = manifest.of_split(split)
        if not files:
            raise HpcgenError(
                f"{job.directory}: the manifest has no file in the split {split}",
                "correct data.corpus.splits, or run hpcgen data plan again",
            )
        names = output_names(split, count)
        for share in assign([file.size for file in files], count):
            yield files, share, names


def _concat_units(job: CorpusJob, manifest: Manifest) -> Iterator[Unit]:
    for files, share, names in _shares(job, manifest):
        inputs = tuple(_extracted(job.directory, files[index]) for index in share.inputs)
        outputs = tuple(f"concat/{names[index]}.jsonl" for index in share.outputs)
        yield Unit(stage="concat", inputs=inputs, outputs=outputs)


def _prepare_units(job: CorpusJob, manifest: Manifest) -> Iterator[Unit]:
    for files, share, names in _shares(job, manifest):
        inputs = tuple(source_input(job.directory, files[index]) for index in share.inputs)
        outputs = tuple(f"tokens/{names[index]}" for index in share.outputs)
        yield Unit(stage="prepare", inputs=inputs, outputs=outputs)


def _tokenize_units(job: CorpusJob, manifest: Manifest) -> Iterator[Unit]:
    for unit in _concat_units(job, manifest):
        made_by = job.directory / unit.name
        for output in unit.outputs:
            path = job.directory / output
            size = unit.size // len(unit.outputs)
            item = Input(name=output, path=path, size=size, made_by=made_by, maker=unit)
            prefix = f"tokens/{path.name.removesuffix('.jsonl')}"
            yield Unit(stage="tokenize", inputs=(item,), outputs=(prefix,))


_UNITS: dict[DataStage, Callable[[CorpusJob, Manifest], Iterator[Unit]]] = {
    "download": _download_units,
    "extract": _extract_units,
    "concat": _concat_units,
    "tokenize": _tokenize_units,
    "prepare": _prepare_units,
}
