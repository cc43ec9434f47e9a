"""Which tasks of a stage's array have something left to make, from the records alone."""

from __future__ import annotations

from dataclasses import dataclass

from hpcgen.config.corpus import CorpusJob
from hpcgen.data.each import of_each
from hpcgen.data.manifest import Manifest
from hpcgen.data.unit import DataStage, Looker, Unit, units


@dataclass(frozen=True)
class Pending:
    """What a stage has left to make."""

    num_units: int
    """Of the whole stage."""
    indices: tuple[int, ...]
    """Of the units that are not done, in the order of `units`."""
    outputs: frozenset[str]
    """Their outputs, below the corpus's directory."""

    def tasks(self, num_tasks: int) -> tuple[int, ...]:
        """The tasks of an array of `num_tasks` that make them (see hpcgen.data.unit.units_of_task)."""
        return tuple(sorted({index % num_tasks for index in self.indices}))


def pending(
    stage: DataStage, job: CorpusJob, manifest: Manifest, remade: frozenset[str] = frozenset()
) -> Pending:
    """The units of a stage that are not done, or that read one of `remade`: outputs that will be made (again) first.

    Raises:
        HpcgenError: the manifest or the tokenizer is not what the configuration says.
    """
    all_units = units(stage, job, manifest)
    looker = Looker(job)

    def is_pending(unit: Unit) -> bool:
        if any(item.name in remade for item in unit.inputs):
            return True
        return looker.done_record(unit) is None

    answers = of_each(all_units, is_pending)
    indices = tuple(index for index, answer in enumerate(answers) if answer)
    outputs = frozenset(output for index in indices for output in all_units[index].outputs)
    return Pending(len(all_units), indices, outputs)
