"""The units of each stage: what is made in one go, from which files, to which.

Where everything lies below the corpus's directory:
    manifest.jsonl            the frozen list of files
    download/NAME             as the source has it
    extract/NAME              without .zst or .gz; plain .jsonl files are not copied
    concat/train-00000-of-00072.jsonl
    tokens/train-00000-of-00072.bin, .idx
Beside the first output of each unit lies its record (hpcgen.data.record), which says whether it is done. Outputs of
another num_output_files have other names and stay, for they may be in use; so do those of files that a new manifest
leaves out. Nothing reads them, and they may be removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from hpcgen.config import tokenizer as tokenizers
from hpcgen.config.corpus import CorpusJob, num_outputs, output_names
from hpcgen.data.assignment import Share, assign
from hpcgen.data.each import of_each
from hpcgen.data.listed_files import extracted_name
from hpcgen.data.manifest import Manifest, ManifestFile
from hpcgen.data.record import SIDE_FILE, FileIdentity, Record, configuration_hash, read_record
from hpcgen.errors import HpcgenError

DataStage = Literal["download", "extract", "concat", "tokenize", "prepare"]
DATA_STAGES: tuple[DataStage, ...] = get_args(DataStage)
COMPRESSED = (".zst", ".gz")


@dataclass(frozen=True, kw_only=True)
class Input:
    """A file that a unit reads."""

    name: str
    """Its name in the manifest, or below the corpus's directory."""
    path: Path
    size: int | None = None
    """Bytes, for progress and balance."""
    made_by: Path | None = None
    """The output (of an earlier stage) whose record says what the file holds; None for the corpus's own files."""
    maker: Unit | None = None
    """The unit that makes it."""
    sha256: str | None = None
    modified_ns: int | None = None

    def identity(self) -> FileIdentity:
        """Which content the file has to have.

        Raises:
            HpcgenError: the stage that makes it has not made it.
        """
        known = self.planned() or self._recorded()
        if known is None:
            raise HpcgenError(f"{self.path} is not there yet, or not whole", self._hint())
        return known

    def require(self) -> None:
        """Looks whether the file is there.

        Raises:
            HpcgenError: it is not.
        """
        if not self.path.is_file():
            raise HpcgenError(f"{self.path} is not there", self._hint())

    def bytes_to_read(self) -> int:
        """Its size, as far as it is known: of what an earlier stage makes, from the record where there is one."""
        made = self._recorded() if self.made_by else None
        return (made.size if made else self.size) or 0

    def recorded_documents(self) -> int | None:
        """Its documents, where a stage that counts them made it, and nothing else beside it."""
        record = read_record(self.made_by) if self.made_by else None
        if record is None or len(record.outputs) != 1 or not record.counts.documents_in:
            return None
        return record.counts.documents_out

    def planned(self) -> FileIdentity | None:
        """Its content by the manifest; None where the record of the stage that makes it has to say."""
        if self.made_by is None or self.sha256:
            return FileIdentity(self.name, self.size, self.sha256, self.modified_ns)
        return None

    def _recorded(self) -> FileIdentity | None:
        record = read_record(self.made_by) if self.made_by else None
        return self.among(record.outputs) if record else None

    def among(self, outputs: Sequence[FileIdentity]) -> FileIdentity | None:
        """Its content, where it is one of these outputs."""
        return next((made.without_time() for made in outputs if made.name == self.name), None)

    def is_changed(self) -> bool:
        """Whether a file of the corpus's own is there and is another than the one that was planned."""
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
            return "it was there when the corpus was planned"
        return f"run the stage {self.name.partition('/')[0]} first"


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A piece of a stage that is made in one go and recorded as done."""

    stage: DataStage
    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]
    """Below the corpus's directory, of pairs without suffix. Line n of the input goes to output n mod len(outputs)."""
    url: str | None = None
    """Of a download."""

    @property
    def name(self) -> str:
        """Of its first output; the record lies beside that."""
        return self.outputs[0]

    @property
    def size(self) -> int:
        """Bytes of its inputs in the manifest, as far as they are known there."""
        return sum(item.size or 0 for item in self.inputs)

    @property
    def files(self) -> tuple[str, ...]:
        """The files that it makes, below the corpus's directory."""
        if self.stage not in ("tokenize", "prepare"):
            return self.outputs
        return tuple(prefix + suffix for prefix in self.outputs for suffix in (".bin", ".idx"))

    @property
    def side_files(self) -> tuple[str, ...]:
        """What it makes only when there is something to put into it."""
        return tuple(prefix + SIDE_FILE for prefix in self.outputs) if self.files != self.outputs else ()


def units(stage: DataStage, job: CorpusJob, manifest: Manifest) -> list[Unit]:
    """All units of a stage, in the order of the manifest. Which task makes which: `units_of_task`.

    Raises:
        HpcgenError: the manifest has no file for a split that the configuration names.
    """
    return list(_UNITS[stage](job, manifest))


def units_of_task(all_units: list[Unit], task_id: int, num_tasks: int) -> list[Unit]:
    """The units of task `task_id` of `num_tasks`: every num_tasks-th, so that neighbours of one size spread."""
    return all_units[task_id::num_tasks]


def configuration(stage: DataStage, job: CorpusJob) -> str:
    """The hash of all settings that decide the bytes of a stage's outputs."""
    return configuration_hash(_SETTINGS[stage](job))


def unnamed_vocabulary(stage: DataStage, job: CorpusJob) -> str | None:
    """The hash that earlier versions recorded for GPT-2's own vocabulary: it did not cover the vocabulary's content.

    Its files came from another package then. Such records count, and `hpcgen data verify` encodes documents of their
    pairs again. None for every other stage and tokenizer, whose hashes are what they were.
    """
    tokenizer = job.tokenizer
    if stage not in ("tokenize", "prepare") or tokenizer.kind != "gpt2" or tokenizer.vocab_file is not None:
        return None
    settings = _tokenize_settings(job)
    return configuration_hash({**settings, "tokenizer": settings["tokenizer"] | {"files": []}})


@dataclass(frozen=True)
class _Made:
    """What an earlier stage has made."""

    outputs: tuple[FileIdentity, ...]
    is_current: bool


class Looker:
    """Looks which units are done, back to the source; at what several of them read once only.

    A unit is current when its record says that it was made with these settings, of what its inputs hold now, and
    the units that made these inputs are current as well. Where one of these has no record, it was removed to make
    room: that says nothing against what was made of it. So does an input that is gone.
    """

    def __init__(self, job: CorpusJob, known: Mapping[DataStage, str] | None = None) -> None:
        self._job = job
        self._settings = dict(known or {})
        """`configuration` of each stage, as far as it is known."""
        self._earlier: dict[DataStage, str | None] = {}
        self._made: dict[str, _Made | None] = {}

    def done_record(self, unit: Unit) -> Record | None:
        """The record of `unit` when it is done: it is current, and its outputs are there as it says."""
        record = read_record(self._job.directory / unit.name)
        if record is None or not self.is_current(unit, record):
            return None
        return record if record.is_whole(self._job.directory, unit.files) else None

    def done_records(self, some: Sequence[Unit]) -> list[Record | None]:
        """`done_record` of each of many units."""
        return of_each(some, self.done_record)

    def is_current(self, unit: Unit, record: Record) -> bool:
        """Whether the unit, made now, would be what `record` says."""
        if record.stage != unit.stage or not self.has_settings(record, unit.stage):
            return False
        if len(record.inputs) != len(unit.inputs):
            return False
        if unit.stage != "download" and any(item.is_changed() for item in unit.inputs):
            return False  # what a download reads lies elsewhere
        return all(map(self._is_of, unit.inputs, record.inputs))

    def has_settings(self, record: Record, stage: DataStage) -> bool:
        """Whether `record` tells of the settings that the job has for `stage`."""
        if stage not in self._settings:
            self._settings[stage] = configuration(stage, self._job)
        if record.configuration == self._settings[stage]:
            return True
        if stage not in self._earlier:
            self._earlier[stage] = unnamed_vocabulary(stage, self._job)
        return record.configuration == self._earlier[stage]

    def require_inputs(self, unit: Unit) -> None:
        """Looks whether what the unit reads is there, and current.

        Raises:
            HpcgenError: it is not.
        """
        for item in unit.inputs:
            item.require()
            if item.maker is not None and not self._is_current_or_gone(item.maker):
                stage = self._first_outdated(item.maker).stage
                raise HpcgenError(
                    f"{item.path} is not what the corpus's manifest and settings make now",
                    f"run the stage {stage} again, and those after it",
                )

    def _is_of(self, item: Input, read: FileIdentity) -> bool:
        """Whether what was `read` under an input's name may be what it holds now."""
        made = self._look_at(item.maker) if item.maker is not None else None
        if made is not None and not made.is_current:
            return False
        known = item.planned() or (made and item.among(made.outputs)) or FileIdentity(item.name)
        return known.same_content(read)

    def _is_current_or_gone(self, maker: Unit) -> bool:
        made = self._look_at(maker)
        return made is None or made.is_current

    def _first_outdated(self, unit: Unit) -> Unit:
        """The one nearest to the source of a unit that is not current and those that it is made of."""
        makers = (item.maker for item in unit.inputs if item.maker is not None)
        earlier = next((maker for maker in makers if not self._is_current_or_gone(maker)), None)
        return unit if earlier is None else self._first_outdated(earlier)

    def _look_at(self, maker: Unit) -> _Made | None:
        if maker.name not in self._made:
            record = read_record(self._job.directory / maker.name)
            self._made[maker.name] = (
                _Made(record.outputs, self.is_current(maker, record)) if record is not None else None
            )
        return self._made[maker.name]


def done_record(unit: Unit, job: CorpusJob, of_configuration: str) -> Record | None:
    """The record of `unit` when it is done: made of these inputs with these settings, and its outputs are there."""
    return Looker(job, {unit.stage: of_configuration}).done_record(unit)


def done_records(some: Sequence[Unit], job: CorpusJob, of_configuration: str) -> list[Record | None]:
    """`done_record` of each of many units: of a hundred thousand in seconds, on network file systems as well."""
    return Looker(job, {unit.stage: of_configuration for unit in some[:1]}).done_records(some)


def bytes_to_read(some: Sequence[Unit]) -> list[int]:
    """Of each unit the bytes of its inputs, of what an earlier stage made as it recorded them; 0 where unknown."""
    return of_each(some, lambda unit: sum(item.bytes_to_read() for item in unit.inputs))


def is_local(file: ManifestFile) -> bool:
    """Whether the file lies in its place already, and needs no download."""
    return file.path is not None


def _source(directory: Path, file: ManifestFile) -> Input:
    """A file of the corpus as download leaves it, or where it lies."""
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
    """A file of the corpus, uncompressed."""
    if not file.name.endswith(COMPRESSED):
        return _source(directory, file)
    maker = _extract_unit(directory, file)
    path = directory / maker.name
    return Input(name=maker.name, path=path, size=file.size, made_by=path, maker=maker)


def _download_unit(directory: Path, file: ManifestFile) -> Unit:
    output = f"download/{file.name}"
    wanted = Input(name=file.name, path=directory / output, size=file.size, sha256=file.sha256)
    return Unit(stage="download", inputs=(wanted,), outputs=(output,), url=file.url)


def _extract_unit(directory: Path, file: ManifestFile) -> Unit:
    output = f"extract/{extracted_name(file.name)}"
    return Unit(stage="extract", inputs=(_source(directory, file),), outputs=(output,))


def _download_units(job: CorpusJob, manifest: Manifest) -> Iterator[Unit]:
    for file in manifest.files:
        if not is_local(file):
            yield _download_unit(job.directory, file)


def _extract_units(job: CorpusJob, manifest: Manifest) -> Iterator[Unit]:
    for file in manifest.files:
        if file.name.endswith(COMPRESSED):
            yield _extract_unit(job.directory, file)


def _shares(job: CorpusJob, manifest: Manifest) -> Iterator[tuple[list[ManifestFile], Share, list[str]]]:
    """Of each split and share: the split's files, the share, and the names of the split's outputs."""
    for split, count in num_outputs(job.corpus).items():
        files = manifest.of_split(split)
        if not files:
            raise HpcgenError(
                f"{job.directory}: the manifest has no file of {split}",
                "correct data.corpus.splits, or run hpcgen data plan again",
            )
        names = output_names(split, count)
        for share in assign([file.size for file in files], count):
            yield files, share, names


def _concat_units(job: CorpusJob, manifest: Manifest) -> Iterator[Unit]:
    directory = job.directory
    for files, share, names in _shares(job, manifest):
        inputs = tuple(_extracted(directory, files[index]) for index in share.inputs)
        outputs = tuple(f"concat/{names[index]}.jsonl" for index in share.outputs)
        yield Unit(stage="concat", inputs=inputs, outputs=outputs)


def _prepare_units(job: CorpusJob, manifest: Manifest) -> Iterator[Unit]:
    directory = job.directory
    for files, share, names in _shares(job, manifest):
        inputs = tuple(_source(directory, files[index]) for index in share.inputs)
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


def _no_settings(job: CorpusJob) -> Mapping[str, Any]:
    return {}


def _tokenize_settings(job: CorpusJob) -> Mapping[str, Any]:
    corpus, tokenizer = job.corpus, job.tokenizer
    return {
        "tokenizer": {
            "kind": tokenizer.kind,
            "eod": tokenizers.eod_id(tokenizer),
            "vocab_size": tokenizers.vocab_size(tokenizer),
            "files": tokenizers.content_sha256(tokenizer),
        },
        "json_key": corpus.json_key,
        "drop_empty": corpus.drop_empty,
        "bad_documents": corpus.bad_documents,
    }


_SETTINGS: dict[DataStage, Callable[[CorpusJob], Mapping[str, Any]]] = {
    "download": _no_settings,
    "extract": _no_settings,
    "concat": _no_settings,
    "tokenize": _tokenize_settings,
    "prepare": _tokenize_settings,
}
