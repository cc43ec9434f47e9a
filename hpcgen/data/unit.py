"""The units of each stage: what is made in one go, from which files, to which.

Where everything lies below the corpus's directory:
    manifest.jsonl            the frozen list of files
    download/NAME             as the source has it
    extract/NAME              without .zst or .gz; plain .jsonl files are not copied
    concat/train-00000-of-00072.jsonl
    tokens/train-00000-of-00072.bin, .idx
Beside every output lies its record (hpcgen.data.record).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from hpcgen.config import tokenizer as tokenizers
from hpcgen.config.corpus import CorpusJob, num_outputs, output_names
from hpcgen.data.assignment import Share, assign
from hpcgen.data.manifest import Manifest, ManifestFile
from hpcgen.data.record import FileIdentity, Record, configuration_hash, matches, read_record
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
    sha256: str | None = None
    modified_ns: int | None = None

    def identity(self) -> FileIdentity:
        """Which content the file has to have.

        Raises:
            HpcgenError: the stage that makes it has not made it.
        """
        if self.made_by is None or self.sha256:
            return FileIdentity(self.name, self.size, self.sha256, self.modified_ns)
        record = read_record(self.made_by)
        made = {output.name: output for output in record.outputs} if record else {}
        if self.name not in made:
            stage = self.name.partition("/")[0]
            raise HpcgenError(f"{self.path} is not there yet, or not whole", f"run the stage {stage} first")
        return made[self.name]


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
        """Bytes to read, as far as they are known."""
        return sum(item.size or 0 for item in self.inputs)


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


def done_record(unit: Unit, job: CorpusJob, of_configuration: str) -> Record | None:
    """The record of `unit` when it is done: made of these inputs with these settings, and its outputs are there."""
    record = read_record(job.directory / unit.name)
    if record is None:
        return None
    try:
        inputs = [item.identity() for item in unit.inputs]
    except HpcgenError:
        return None
    return record if matches(record, job.directory, unit.stage, of_configuration, inputs) else None


def is_local(file: ManifestFile) -> bool:
    """Whether the file lies in its place already, and needs no download."""
    return file.path is not None


def extracted_name(name: str) -> str:
    """NAME without .zst or .gz."""
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return name


def _source(job: CorpusJob, file: ManifestFile) -> Input:
    """A file of the corpus as download leaves it, or where it lies."""
    if file.path is not None:
        return Input(
            name=file.name,
            path=Path(file.path),
            size=file.size,
            sha256=file.sha256,
            modified_ns=file.modified_ns,
        )
    name = f"download/{file.name}"
    path = job.directory / name
    return Input(name=name, path=path, size=file.size, made_by=path, sha256=file.sha256)


def _extracted(job: CorpusJob, file: ManifestFile) -> Input:
    """A file of the corpus, uncompressed."""
    if not file.name.endswith(COMPRESSED):
        return _source(job, file)
    name = f"extract/{extracted_name(file.name)}"
    path = job.directory / name
    return Input(name=name, path=path, size=file.size, made_by=path)


def _download_units(job: CorpusJob, manifest: Manifest) -> Iterator[Unit]:
    for file in manifest.files:
        if not is_local(file):
            wanted = Input(name=file.name, path=Path(file.name), size=file.size, sha256=file.sha256)
            yield Unit(stage="download", inputs=(wanted,), outputs=(f"download/{file.name}",), url=file.url)


def _extract_units(job: CorpusJob, manifest: Manifest) -> Iterator[Unit]:
    for file in manifest.files:
        if file.name.endswith(COMPRESSED):
            output = f"extract/{extracted_name(file.name)}"
            yield Unit(stage="extract", inputs=(_source(job, file),), outputs=(output,))


def _shares(job: CorpusJob, manifest: Manifest) -> Iterator[tuple[list[ManifestFile], Share, list[str]]]:
    """Of each split and share: the split's files, the share, and the names of the split's outputs."""
    for split, count in num_outputs(job.corpus).items():
        files = manifest.of_split(split)
        if not files:
            raise HpcgenError(
                f"{job.directory}: the manifest has no file of {split}",
                "mend data.corpus.splits, or run hpcgen data plan again",
            )
        names = output_names(split, count)
        for share in assign([file.size for file in files], count):
            yield files, share, names


def _concat_units(job: CorpusJob, manifest: Manifest) -> Iterator[Unit]:
    for files, share, names in _shares(job, manifest):
        inputs = tuple(_extracted(job, files[index]) for index in share.inputs)
        outputs = tuple(f"concat/{names[index]}.jsonl" for index in share.outputs)
        yield Unit(stage="concat", inputs=inputs, outputs=outputs)


def _prepare_units(job: CorpusJob, manifest: Manifest) -> Iterator[Unit]:
    for files, share, names in _shares(job, manifest):
        inputs = tuple(_source(job, files[index]) for index in share.inputs)
        outputs = tuple(f"tokens/{names[index]}" for index in share.outputs)
        yield Unit(stage="prepare", inputs=inputs, outputs=outputs)


def _tokenize_units(job: CorpusJob, manifest: Manifest) -> Iterator[Unit]:
    for unit in _concat_units(job, manifest):
        made_by = job.directory / unit.name
        for output in unit.outputs:
            path = job.directory / output
            item = Input(name=output, path=path, size=unit.size // len(unit.outputs), made_by=made_by)
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
    files = (tokenizer.vocab_file, tokenizer.merges_file, tokenizer.tokenizer_file)
    return {
        "tokenizer": {
            "kind": tokenizer.kind,
            "eod": tokenizers.eod_id(tokenizer),
            "vocab_size": tokenizers.vocab_size(tokenizer),
            "files": [hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in files if path],
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
