"""A unit of a data stage: the files that are made in one step, and the files that they are made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpcgen.data.concurrent_map import concurrent_map
from hpcgen.data.record import SIDE_FILE, FileIdentity, read_record
from hpcgen.errors import HpcgenError
from trainer.contract.files import loss_mask
from trainer.contract.files.index_header import BIN, IDX

if TYPE_CHECKING:
    from hpcgen.data.listed_files import ManifestFile


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
    url: str | None = None
    """URL of a file that a unit downloads. `path` is then where it goes."""
    sha256: str | None = None
    modified_ns: int | None = None
    version: str | None = None
    """Version of a file in a store (ETag, generation)."""

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
        """Checks that the file exists, if it is not on a server.

        Raises:
            HpcgenError: the file does not exist.
        """
        if self.url is None and not self.path.is_file():
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
            return FileIdentity(self.name, self.size, self.sha256, self.modified_ns, self.version)
        return None

    def _recorded_identity(self) -> FileIdentity | None:
        record = read_record(self.made_by) if self.made_by else None
        return self.find_in(record.outputs) if record else None

    def find_in(self, outputs: Sequence[FileIdentity]) -> FileIdentity | None:
        """Returns the entry of this file in `outputs`, or None."""
        return next((made.without_time() for made in outputs if made.name == self.name), None)

    def is_changed(self) -> bool:
        """Returns whether a file of a local source exists and differs from the one that was planned."""
        if self.made_by is not None or self.url is not None:
            return False
        try:
            status = self.path.stat()
        except OSError:
            return False
        if self.size is not None and status.st_size != self.size:
            return True
        return self.sha256 is None and self.modified_ns not in (None, status.st_mtime_ns)

    def _hint(self) -> str:
        if self.maker is None:
            return "it existed when the corpus was planned; restore it, or plan again"
        return f"run the stage {self.maker.stage} first"


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Part of a stage that is made in one step and recorded as done."""

    stage: str
    """Name of the stage."""
    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]
    """Paths relative to the corpus's directory; for pairs, their prefixes. Line n of the input goes to output
    n mod len(outputs)."""
    makes_pairs: bool = False
    """Each output is a pair, and may have a side file with rejected documents."""
    has_masks: bool = False
    """Each pair has a loss mask, because its documents are chats."""

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
        if not self.makes_pairs:
            return self.outputs
        suffixes = (BIN, loss_mask.SUFFIX, IDX) if self.has_masks else (BIN, IDX)
        return tuple(prefix + suffix for prefix in self.outputs for suffix in suffixes)

    @property
    def side_files(self) -> tuple[str, ...]:
        """Files that the unit makes only if they have content."""
        return tuple(prefix + SIDE_FILE for prefix in self.outputs) if self.makes_pairs else ()


def units_of_task(all_units: list[Unit], task_id: int, num_tasks: int) -> list[Unit]:
    """Units of task `task_id` of `num_tasks`: every num_tasks-th, because neighbors often have similar sizes."""
    return all_units[task_id::num_tasks]


def bytes_to_read(selected: Sequence[Unit]) -> list[int]:
    """Returns the input size of each unit, from the records of earlier stages if there are any. 0 if unknown."""
    return concurrent_map(selected, lambda unit: sum(item.bytes_to_read() for item in unit.inputs))


def is_local(file: ManifestFile) -> bool:
    """Returns whether the file is on this file system and needs no download."""
    return file.path is not None


def made_input(
    directory: Path, maker: Unit, output: str, *, size: int | None, sha256: str | None = None
) -> Input:
    """An output of the unit `maker`, as the input of a later unit. `directory` is the corpus's directory."""
    return Input(
        name=output,
        path=directory / output,
        size=size,
        made_by=directory / maker.name,
        maker=maker,
        sha256=sha256,
    )
