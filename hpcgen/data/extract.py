"""The extract stage: makes plain JSON Lines of one compressed file or Parquet file of the corpus."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from hpcgen.config.corpus import CorpusJob
from hpcgen.data.compression import content
from hpcgen.data.hashed_files import CheckedFile, OutputFile
from hpcgen.data.listed_files import PARQUET
from hpcgen.data.progress import Step
from hpcgen.data.record import Counts, Record, publish_unit
from hpcgen.data.task import Context
from hpcgen.data.unit import Unit
from hpcgen.errors import HpcgenError
from hpcgen.files import private_file


def extract(unit: Unit, job: CorpusJob, context: Context) -> Record:
    """Decompresses the unit's .zst or .gz file, or converts its Parquet file with all columns.

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
        for chunk in _lines(item.path, source, job.corpus.json_key):
            documents = output.write(chunk)
            context.advance(Step(bytes=source.tell() - read, documents=documents))
            read = source.tell()
        if not output.size:
            raise HpcgenError(f"{item.path}: the file is empty", "download it again, or exclude it")
        documents = output.num_lines
        record = Record(
            stage=unit.stage,
            configuration=context.configuration,
            inputs=(source.finish(),),
            outputs=(output.identity(),),
            counts=Counts(documents_in=documents, documents_out=documents, text_bytes=output.size),
            seconds=time.monotonic() - started,
        )
        return publish_unit([(file, place)], record, place)


def _lines(path: Path, source: CheckedFile, json_key: str) -> Iterator[bytes]:
    """Yields the content of a file as JSON Lines."""
    if path.suffix != PARQUET:
        return content(path, source)
    from hpcgen.data.parquet import json_lines  # needs the extra `parquet`

    return json_lines(path, source, json_key)
