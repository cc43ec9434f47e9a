"""Finds the units that are done: made from the current inputs with the current settings, their outputs unchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpcgen.config.corpus import CorpusJob
from hpcgen.data.concurrent_map import concurrent_map
from hpcgen.data.record import FileIdentity, Record, read_record
from hpcgen.data.stages import DATA_STAGES
from hpcgen.data.unit import Input, Unit
from hpcgen.errors import HpcgenError


@dataclass(frozen=True)
class _MakerState:
    """Recorded outputs of a unit of an earlier stage."""

    outputs: tuple[FileIdentity, ...]
    is_current: bool


class UnitChecker:
    """Checks which units are done, back to the source. Caches the state of units whose outputs several units read.

    A unit is current if its record has the current settings and inputs, and the units that made these inputs are
    current as well. Inputs and units (with their records) may be removed to free space; this does not make later units
    outdated.
    """

    def __init__(self, job: CorpusJob, known: Mapping[str, str] | None = None) -> None:
        self._job = job
        self._settings = dict(known or {})
        """Cache of `DataStage.configuration`, by name of the stage."""
        self._earlier: dict[str, str | None] = {}
        self._makers: dict[str, _MakerState | None] = {}

    def done_record(self, unit: Unit) -> Record | None:
        """Returns the record of `unit` if the unit is done: it is current, and its recorded outputs are unchanged."""
        record = read_record(self._job.directory / unit.name)
        if record is None or not self.is_current(unit, record):
            return None
        return record if record.has_valid_outputs(self._job.directory, unit.files) else None

    def done_records(self, selected: Sequence[Unit]) -> list[Record | None]:
        """Returns the result of `done_record` for each unit."""
        return concurrent_map(selected, self.done_record)

    def is_current(self, unit: Unit, record: Record) -> bool:
        """Returns whether making the unit now would produce what `record` describes."""
        if record.stage != unit.stage or not self.has_settings(record):
            return False
        if len(record.inputs) != len(unit.inputs):
            return False
        if any(item.is_changed() for item in unit.inputs):
            return False
        return all(map(self._input_matches, unit.inputs, record.inputs))

    def has_settings(self, record: Record) -> bool:
        """Returns whether `record` has the job's settings for its stage, which must exist."""
        name, stage = record.stage, DATA_STAGES[record.stage]
        if name not in self._settings:
            self._settings[name] = stage.configuration(self._job)
        if record.configuration == self._settings[name]:
            return True
        if name not in self._earlier:
            self._earlier[name] = stage.earlier_configuration(self._job)
        return record.configuration == self._earlier[name]

    def require_inputs(self, unit: Unit) -> None:
        """Checks that the inputs of `unit` exist and are current.

        Raises:
            HpcgenError: an input is missing or outdated.
        """
        for item in unit.inputs:
            item.require()
            if item.maker is not None and not self._is_current_or_gone(item.maker):
                stage = self._first_outdated(item.maker).stage
                raise HpcgenError(
                    f"{item.path} is outdated: the manifest or the settings have changed since it was made",
                    f"run the stage {stage} again, and the stages after it",
                )

    def _input_matches(self, item: Input, read: FileIdentity) -> bool:
        """Returns whether the recorded content `read` can be the current content of an input."""
        made = self._maker_state(item.maker) if item.maker is not None else None
        if made is not None and not made.is_current:
            return False
        known = item.planned_identity() or (made and item.find_in(made.outputs)) or FileIdentity(item.name)
        return known.same_content(read)

    def _is_current_or_gone(self, maker: Unit) -> bool:
        made = self._maker_state(maker)
        return made is None or made.is_current

    def _first_outdated(self, unit: Unit) -> Unit:
        """Returns the outdated unit nearest to the source: `unit` itself, or a unit that it is made from."""
        makers = (item.maker for item in unit.inputs if item.maker is not None)
        earlier = next((maker for maker in makers if not self._is_current_or_gone(maker)), None)
        return unit if earlier is None else self._first_outdated(earlier)

    def _maker_state(self, maker: Unit) -> _MakerState | None:
        if maker.name not in self._makers:
            record = read_record(self._job.directory / maker.name)
            self._makers[maker.name] = (
                _MakerState(record.outputs, self.is_current(maker, record)) if record is not None else None
            )
        return self._makers[maker.name]


def done_record(unit: Unit, job: CorpusJob, settings_hash: str) -> Record | None:
    """Returns the record of `unit` if it is done: made from these inputs with these settings, outputs unchanged."""
    return UnitChecker(job, {unit.stage: settings_hash}).done_record(unit)


def done_records(selected: Sequence[Unit], job: CorpusJob, settings_hash: str) -> list[Record | None]:
    """Returns `done_record` for each unit. A hundred thousand units take seconds, even on network file systems."""
    return UnitChecker(job, {unit.stage: settings_hash for unit in selected[:1]}).done_records(selected)
