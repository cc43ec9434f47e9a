"""Which tasks of a stage's array have something left to make, from the records alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain

from hpcgen.config.corpus import CorpusJob
from hpcgen.data.manifest import Manifest
from hpcgen.data.unit import DataStage, Unit, configuration, done_record, units

_THREADS = 16
"""Records are small files, often on storage that answers late: waiting for many at once is what makes it quick."""
_AT_ONCE = 64
"""Units that a thread looks at in one go: a single one is often less work than handing it over."""


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
    of_configuration = configuration(stage, job)

    def is_pending(unit: Unit) -> bool:
        if any(item.name in remade for item in unit.inputs):
            return True
        return done_record(unit, job, of_configuration) is None

    def look_at(first: int) -> list[bool]:
        return [is_pending(unit) for unit in all_units[first : first + _AT_ONCE]]

    with ThreadPoolExecutor(_THREADS) as threads:
        looks = threads.map(look_at, range(0, len(all_units), _AT_ONCE))
        answers = list(chain.from_iterable(looks))
    indices = tuple(index for index, answer in enumerate(answers) if answer)
    outputs = frozenset(output for index in indices for output in all_units[index].outputs)
    return Pending(len(all_units), indices, outputs)
