"""The stage concat: many files of lines into one, or one into k.

Reads and writes every byte once, in large blocks: the hashes that go into the records need all of them, so
letting the kernel copy (copy_file_range) would save nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack

from hpcgen.config.corpus import CorpusJob
from hpcgen.data.hashed_files import CheckedFile, OutputFile
from hpcgen.data.record import Counts, FileIdentity, Record, publish_unit, record_path
from hpcgen.data.task import Context, Step
from hpcgen.data.unit import Input, Unit
from hpcgen.errors import HpcgenError
from hpcgen.files import private_file
from hpcgen.text import counted

_BLOCK_BYTES = 4 * 1024 * 1024


def concat(unit: Unit, job: CorpusJob, context: Context) -> Record:
    """Copies the lines of the unit's inputs, in order; with k outputs, line n of the one input to output n mod k.

    The last line of an input needs no "\\n": it gets one, so that lines of two files never join.

    Raises:
        HpcgenError: an input is empty, or another than was planned or made; or an output would get no line.
        OSError: an output cannot be written. Nothing is published either way.
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
                f"{unit.inputs[0].path}: {counted(documents, 'line')} cannot fill {counted(len(outputs), 'file')}",
                f"use a num_output_files of at most {documents}",
            )
        record = Record(
            stage=unit.stage,
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


def _copy(item: Input, outputs: Sequence[OutputFile], context: Context) -> tuple[FileIdentity, int]:
    """Appends an input to the outputs; what it held, and its lines, as the stage before counted them if it did."""
    lines, ends_line = 0, True
    with CheckedFile(item) as source:
        write = outputs[0].write if len(outputs) == 1 else _Dealer(outputs).write
        while block := source.read(_BLOCK_BYTES):
            documents = write(block)
            lines += documents
            context.advance(Step(bytes=len(block), documents=documents))
            ends_line = block.endswith(b"\n")
        if not source.tell():
            raise HpcgenError(f"{item.path}: there is nothing in it", "fetch it again, or leave it out")
        if not ends_line:
            lines += write(b"\n")
            context.advance(Step(documents=1))
        recorded = item.recorded_documents()
        return source.finish(), lines if recorded is None else recorded


class _Dealer:
    """Deals lines to outputs, one after the other in turn."""

    def __init__(self, outputs: Sequence[OutputFile]) -> None:
        self._outputs = outputs
        self._next = 0
        """The output that the line to come goes to."""
        self._begun: list[bytes] = []
        """Pieces of a line whose end has not come yet."""

    def write(self, data: bytes) -> int:
        """Deals the lines that end in `data`, and gives their number."""
        end = data.rfind(b"\n") + 1
        if not end:
            self._begun.append(data)
            return 0
        lines = b"".join((*self._begun, data[:end])).split(b"\n")[:-1]
        self._begun = [data[end:]] if end < len(data) else []
        num_outputs = len(self._outputs)
        for turn in range(min(num_outputs, len(lines))):
            mine = lines[turn::num_outputs]
            self._outputs[(self._next + turn) % num_outputs].write(b"\n".join(mine) + b"\n")
        self._next = (self._next + len(lines)) % num_outputs
        return len(lines)
