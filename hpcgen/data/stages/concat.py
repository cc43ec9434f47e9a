"""The concat stage: joins several files of lines into one, or splits one into k.

It reads and writes every byte once, in large blocks. The hashes in the records need all bytes anyway, so a copy by the
kernel (copy_file_range) would save nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from hpcgen.config.corpus import CorpusJob
from hpcgen.data.assignment import shares
from hpcgen.data.hashed_files import CheckedFile, OutputFile
from hpcgen.data.progress import Step
from hpcgen.data.record import Counts, FileIdentity, Record, publish_unit, record_path
from hpcgen.data.stages.base import Bounds, Context, DataStage
from hpcgen.data.stages.extract import EXTRACT, expansion, extracted_input
from hpcgen.data.unit import Input, Unit
from hpcgen.errors import HpcgenError
from hpcgen.files import private_file
from hpcgen.text import counted

if TYPE_CHECKING:
    from hpcgen.data.listed_files import ManifestFile
    from hpcgen.data.manifest import Manifest

_BLOCK_BYTES = 4 * 1024 * 1024


class Concat(DataStage):
    """The stage concat, whose units are groups of extracted files."""

    name = "concat"
    before = EXTRACT
    folder = "concat"
    reads_source = True
    makes_output_files = True

    def units(self, job: CorpusJob, manifest: Manifest) -> Iterator[Unit]:
        """A unit for each share of the corpus (see hpcgen.data.assignment.shares)."""
        for files, names in shares(job, manifest):
            inputs = tuple(extracted_input(job.directory, file) for file in files)
            outputs = tuple(f"{self.folder}/{name}.jsonl" for name in names)
            yield Unit(stage=self.name, inputs=inputs, outputs=outputs)

    def make(self, unit: Unit, job: CorpusJob, context: Context) -> Record:
        """Copies the lines of the unit's inputs in order.

        With k outputs, line n of the only input goes to output n mod k. If the last line of an input has no "\\n", it
        gets one, so that lines of two files never join.

        Raises:
            HpcgenError: an input is empty or has changed since it was planned or made, or an output would get no line.
            OSError: an output cannot be written. Nothing is published in either case.
        """
        started = time.monotonic()
        places = [job.directory / name for name in unit.outputs]
        with ExitStack() as stack:
            files = [stack.enter_context(private_file(place, swept=True)) for place in places]
            outputs = [OutputFile(file, name) for file, name in zip(files, unit.outputs, strict=True)]
            copied = [_copy(item, outputs, context) for item in unit.inputs]
            documents = sum(output.num_lines for output in outputs)
            if not all(output.size for output in outputs):
                raise HpcgenError(
                    f"{counted(documents, 'line')} cannot fill {counted(len(outputs), 'file')}",
                    f"set num_output_files to at most {documents}",
                    where=unit.inputs[0].path,
                )
            record = Record(
                stage=self.name,
                configuration=context.configuration,
                inputs=tuple(identity for identity, _ in copied),
                outputs=tuple(output.identity() for output in outputs),
                counts=Counts(
                    documents_in=sum(lines for _, lines in copied),
                    documents_out=documents,
                    text_bytes=sum(output.size for output in outputs),
                ),
                seconds=time.monotonic() - started,
            )
            others = [record_path(place) for place in places[1:]]
            return publish_unit(list(zip(files, places, strict=True)), record, places[0], stale=others)

    def growth(self, file: ManifestFile) -> Bounds:
        """A copy of every file as JSON Lines."""
        return expansion(file.name)

    def certain_bytes(self, item: Input) -> int:
        """The size of a plain file, or the minimum size of an extracted one."""
        if item.maker is None or item.maker.stage != EXTRACT.name:
            return item.size or 0
        return sum(map(EXTRACT.certain_bytes, item.maker.inputs))


CONCAT = Concat()


def _copy(item: Input, outputs: Sequence[OutputFile], context: Context) -> tuple[FileIdentity, int]:
    """Appends an input to the outputs. Returns its identity and its line count, preferring a recorded count."""
    lines, ends_line = 0, True
    with CheckedFile(item) as source:
        write = outputs[0].write if len(outputs) == 1 else _Dealer(outputs).write
        while block := source.read(_BLOCK_BYTES):
            documents = write(block)
            lines += documents
            context.advance(Step(bytes=len(block), documents=documents))
            ends_line = block.endswith(b"\n")
        if not source.tell():
            raise HpcgenError("the file is empty", "download it again, or exclude it", where=item.path)
        if not ends_line:
            lines += write(b"\n")
            context.advance(Step(documents=1))
        recorded = item.recorded_documents()
        return source.finish(), lines if recorded is None else recorded


class _Dealer:
    """Distributes lines to outputs in turn (round robin)."""

    def __init__(self, outputs: Sequence[OutputFile]) -> None:
        self._outputs = outputs
        self._next = 0
        """Index of the output for the next line, or for the rest of a line that has begun."""

    def write(self, data: bytes) -> int:
        """Writes the lines that end in `data` and returns their number."""
        end = data.rfind(b"\n") + 1
        lines = data[:end].split(b"\n")[:-1]
        num_outputs = len(self._outputs)
        for turn in range(min(num_outputs, len(lines))):
            mine = lines[turn::num_outputs]
            self._outputs[(self._next + turn) % num_outputs].write(b"\n".join(mine) + b"\n")
        self._next = (self._next + len(lines)) % num_outputs
        if end < len(data):
            self._outputs[self._next].write(data[end:])
        return len(lines)
