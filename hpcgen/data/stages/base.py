"""Base class of the data stages. A stage knows its units, how to make one, and how large its outputs will be."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hpcgen.config.corpus import CorpusJob
from hpcgen.config.stages import STAGE_ROWS
from hpcgen.data.progress import Step
from hpcgen.data.record import Record, configuration_hash
from hpcgen.data.suffixes import PARQUET
from hpcgen.data.unit import Input, Unit

if TYPE_CHECKING:
    from hpcgen.data.listed_files import ManifestFile
    from hpcgen.data.manifest import Manifest

Bounds = tuple[float, float]
"""Lower and upper bound."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """Arguments of `DataStage.make`, apart from the unit and the job."""

    configuration: str
    """Configuration hash for the record."""
    num_cores: Callable[[], int] = lambda: 1
    """Returns the number of cores that this unit may use now. It grows when other workers have no units left."""
    advance: Callable[[Step], None] = lambda step: None
    """Reports progress. Call it regularly, from the thread that runs the unit."""


class DataStage(ABC):
    """A step on a route from the files of a corpus to its pairs. An object has no state.

    `make` imports what needs the extra `data`. Everything else also works without it.
    """

    name: ClassVar[str]
    """Name of the stage, of its job and of its command. Its row in hpcgen/config/stages.py has the summary."""
    before: ClassVar[DataStage | None] = None
    """The stage whose outputs this one reads; None if it reads the source."""
    folder: ClassVar[str]
    """Directory of the outputs, relative to the corpus's directory."""
    downloads: ClassVar[bool] = False
    """Tasks read the hub or another store, which may need a token."""
    reads_source: ClassVar[bool] = False
    """Tasks read files of the source in place, if these are in a directory."""
    makes_output_files: ClassVar[bool] = False
    """The stage writes `num_output_files` outputs, which are few and large, so it cannot use more tasks than outputs.
    Other stages write an output per source file."""

    @abstractmethod
    def units(self, job: CorpusJob, manifest: Manifest) -> Iterator[Unit]:
        """Yields all units, in the order of the manifest.

        Raises:
            HpcgenError: the manifest has no file for a split of the configuration.
        """

    @abstractmethod
    def make(self, unit: Unit, job: CorpusJob, context: Context) -> Record:
        """Makes a unit, and publishes its outputs and its record.

        Raises:
            HpcgenError: an input cannot be used. Nothing is published.
            OSError: an output cannot be written. Nothing is published.
        """

    @abstractmethod
    def growth(self, file: ManifestFile) -> Bounds:
        """Bounds of the bytes that the stage writes for each byte of a file of the corpus."""

    @abstractmethod
    def certain_bytes(self, item: Input) -> int:
        """Minimum bytes that the stage writes for an input of a unit, regardless of the input's content."""

    def settings(self, job: CorpusJob) -> Mapping[str, Any]:
        """The settings that determine the bytes of the outputs."""
        return {}

    def configuration(self, job: CorpusJob) -> str:
        """Hash of `settings`, for the records."""
        return configuration_hash(self.settings(job))

    def earlier_configuration(self, job: CorpusJob) -> str | None:
        """Hash that earlier versions wrote for the same settings, if its records remain valid; otherwise None."""
        return None

    def modules(self, units: Sequence[Unit]) -> Iterator[str]:
        """Modules that `make` imports for `units`. A task imports them first, to find a missing package early."""
        if any(item.url is None and item.path.suffix == PARQUET for unit in units for item in unit.inputs):
            yield "hpcgen.data.parquet"

    def num_workers(self, job: CorpusJob) -> int | None:
        """Default number of units that a task makes at once; None means one per core."""
        return None

    def output_bounds(self, files: Iterable[tuple[ManifestFile, float]], job: CorpusJob) -> Bounds:
        """Bounds of the stage's total output in bytes, for the corpus's files and their sizes."""
        least = most = 0.0
        for file, size in files:
            low, high = self.growth(file)
            least, most = least + size * low, most + size * high
        return least, most

    @property
    def makes_pairs(self) -> bool:
        """True if the outputs are the corpus's pairs."""
        return STAGE_ROWS[self.name].makes_pairs

    @property
    def joins_documents(self) -> bool:
        """True for the stage of a route that assigns documents to output files."""
        return self.reads_source and self.makes_output_files

    @property
    def route(self) -> tuple[DataStage, ...]:
        """The stages from the source to this one."""
        return (*(self.before.route if self.before else ()), self)
