"""Units and array tasks of a stage that are not done, determined from the records alone."""

from __future__ import annotations

from dataclasses import dataclass

from hpcgen.config.corpus import CorpusJob
from hpcgen.data.concurrent_map import concurrent_map
from hpcgen.data.manifest import Manifest
from hpcgen.data.stages import units
from hpcgen.data.unit import Unit
from hpcgen.data.unit_checker import UnitChecker


@dataclass(frozen=True)
class Pending:
    """Units of a stage that are not done."""

    indices: tuple[int, ...]
    """Their indices among all units of the stage."""
    units: tuple[Unit, ...]

    @property
    def outputs(self) -> frozenset[str]:
        """Their outputs, relative to the corpus's directory."""
        return frozenset(output for unit in self.units for output in unit.outputs)

    def tasks(self, num_tasks: int) -> tuple[int, ...]:
        """Tasks with pending units in an array of `num_tasks` (see hpcgen.data.unit.units_of_task)."""
        return tuple(sorted({index % num_tasks for index in self.indices}))


def pending(stage: str, job: CorpusJob, manifest: Manifest, remade: frozenset[str] = frozenset()) -> Pending:
    """Finds the units of a stage that are not done, or that read one of the outputs `remade` by earlier stages.

    Raises:
        HpcgenError: the manifest or the tokenizer does not match the configuration.
    """
    all_units = units(stage, job, manifest)
    checker = UnitChecker(job)

    def is_pending(unit: Unit) -> bool:
        if any(item.name in remade for item in unit.inputs):
            return True
        return checker.done_record(unit) is None

    answers = concurrent_map(all_units, is_pending)
    indices = tuple(index for index, answer in enumerate(answers) if answer)
    return Pending(indices, tuple(all_units[index] for index in indices))
