"""The extract stage: makes plain JSON Lines of one compressed file or Parquet file of the corpus."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcgen.config.corpus import CorpusConfig, CorpusJob
from hpcgen.data.hashed_files import CheckedFile, OutputFile
from hpcgen.data.progress import Step
from hpcgen.data.record import Counts, Record, publish_unit
from hpcgen.data.stages.base import Bounds, Context, DataStage
from hpcgen.data.stages.download import DOWNLOAD, source_input
from hpcgen.data.suffixes import PARQUET, extracted_name
from hpcgen.data.unit import Input, Unit, made_input
from hpcgen.errors import HpcgenError
from hpcgen.files import private_file

if TYPE_CHECKING:
    from hpcgen.data.listed_files import ManifestFile
    from hpcgen.data.manifest import Manifest

_EXPANSION = {".zst": (2.0, 8.0), ".gz": (1.8, 6.0), PARQUET: (1.2, 8.0)}
"""Bytes of JSON Lines per byte of a file, for each type that the stage converts. Measured: SlimPajama (.zst) 2.8, C4
(.gz) 2.6, source code (.zst) 5.2 to 6.5."""
_STORED = 0.99
"""Minimum uncompressed bytes per compressed byte: incompressible data is stored with little overhead."""


class Extract(DataStage):
    """The stage extract, whose units are compressed files and Parquet files of the corpus."""

    name = "extract"
    before = DOWNLOAD
    folder = "extract"
    reads_source = True

    def units(self, job: CorpusJob, manifest: Manifest) -> Iterator[Unit]:
        """A unit for each compressed file and each Parquet file."""
        return (self.unit(job.directory, file) for file in manifest.files if is_packed(file.name))

    def unit(self, directory: Path, file: ManifestFile) -> Unit:
        """The unit that extracts a file. `directory` is the corpus's directory."""
        output = f"{self.folder}/{extracted_name(file.name)}"
        return Unit(stage=self.name, inputs=(source_input(directory, file),), outputs=(output,))

    def make(self, unit: Unit, job: CorpusJob, context: Context) -> Record:
        """Decompresses a .zst or .gz file, or converts a Parquet file with all columns.

        Each line is a document; the last one needs no "\\n".

        Raises:
            HpcgenError: the file is damaged, truncated or empty, or has changed since it was planned or downloaded.
            OSError: the output cannot be written. Nothing is published in either case.
        """
        started = time.monotonic()
        (item,) = unit.inputs
        place = job.directory / unit.name
        with private_file(place, swept=True) as file, CheckedFile(item) as source:
            output = OutputFile(file, unit.name)
            read = 0
            for chunk in _lines(item.path, source, job.corpus):
                documents = output.write(chunk)
                context.advance(Step(bytes=source.tell() - read, documents=documents))
                read = source.tell()
            if not output.size:
                raise HpcgenError("the file is empty", "download it again, or exclude it", where=item.path)
            documents = output.num_lines
            record = Record(
                stage=self.name,
                configuration=context.configuration,
                inputs=(source.finish(),),
                outputs=(output.identity(),),
                counts=Counts(documents_in=documents, documents_out=documents, text_bytes=output.size),
                seconds=time.monotonic() - started,
            )
            return publish_unit([(file, place)], record, place)

    def settings(self, job: CorpusJob) -> Mapping[str, Any]:
        """Records if rows of Parquet files are chats, whose keys without a value are left out."""
        return {} if job.corpus.chat is None else {"chat": True}

    def modules(self, units: Sequence[Unit]) -> Iterator[str]:
        """The module for decompression, and the one for Parquet files."""
        yield "hpcgen.data.compression"
        yield from super().modules(units)

    def growth(self, file: ManifestFile) -> Bounds:
        """Plain files are not copied."""
        return expansion(file.name) if is_packed(file.name) else (0.0, 0.0)

    def certain_bytes(self, item: Input) -> int:
        """Compressed files do not shrink. A Parquet file can be larger than its lines, so it guarantees nothing."""
        return 0 if item.name.endswith(PARQUET) else int((item.size or 0) * _STORED)


EXTRACT = Extract()


def is_packed(name: str) -> bool:
    """Returns whether the stage converts a file with this name."""
    return name.endswith(tuple(_EXPANSION))


def expansion(name: str) -> Bounds:
    """Bounds of the bytes of JSON Lines for each byte of a file with this name."""
    return next((bounds for suffix, bounds in _EXPANSION.items() if name.endswith(suffix)), (1.0, 1.0))


def extracted_input(directory: Path, file: ManifestFile) -> Input:
    """A file of the corpus as plain JSON Lines. `directory` is the corpus's directory."""
    if not is_packed(file.name):
        return source_input(directory, file)
    maker = EXTRACT.unit(directory, file)
    return made_input(directory, maker, maker.name, size=file.size)


def _lines(path: Path, source: CheckedFile, corpus: CorpusConfig) -> Iterator[bytes]:
    """Yields the content of a file as JSON Lines."""
    if path.suffix != PARQUET:
        from hpcgen.data.compression import content  # needs the extra `data`

        return content(path, source)
    from hpcgen.data.parquet import chat_lines, json_lines  # needs the extra `parquet`

    if corpus.chat is not None:
        return chat_lines(path, source)
    return json_lines(path, source, corpus.json_key)
