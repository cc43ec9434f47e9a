"""The planned points of a sweep. Planning is pure: nothing is written or submitted."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcgen.config.loader import Run, RunFile, with_values
from hpcgen.config.overrides import override
from hpcgen.config.run import RunConfig
from hpcgen.errors import ConfigErrors, FileErrors, HpcgenError, Problem
from hpcgen.planning.paths import absolute_paths
from hpcgen.planning.trials import code_hashes
from hpcgen.run_plan.plan import Plan, main_stage, plan
from hpcgen.run_plan.training import plan_training
from hpcgen.stages.run import RUN
from hpcgen.stages.train import TRAIN
from hpcgen.sweeps.assignments import Assignments, point_names
from hpcgen.text import few
from trainer.contract.config import TrainerConfig
from trainer.contract.resuming.hyperparameters import FREE, sections
from trainer.contract.trials import trial_key

DIRECTORY = "sweep"
"""Directory of the points, in the run directory of the run file."""
KEY_DIGITS = 6
MAX_RUN_NAME = 64


@dataclass(frozen=True, kw_only=True)
class Point:
    """A point of a sweep: a run of its own."""

    name: str
    """Name for people, such as lr-3e-4."""
    assignments: Assignments
    """Values that distinguish the point, as assignments for --set."""
    key: str
    """A hash of what the results of the point depend on."""
    plan: Plan

    @property
    def directory(self) -> Path:
        """Run directory of the point, NAME-KEY."""
        return Path(self.plan.config.paths.run_dir)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """All points of a sweep, planned."""

    points: tuple[Point, ...]

    @property
    def directories(self) -> dict[str, Path]:
        """The directories of the points by their names, or with their keys where names are the same."""
        names = Counter(point.name for point in self.points)
        return {
            point.name if names[point.name] == 1 else point.directory.name: point.directory
            for point in self.points
        }


def plan_sweep(
    file: str | Path,
    shared: Sequence[str],
    points: Sequence[Assignments],
    on_point: Callable[[int], None] = lambda number: None,
) -> Sweep:
    """Plans all points. `shared` are assignments that all points have. `on_point` gets the number of each, from 1.

    Raises:
        FileErrors, ConfigErrors: points have mistakes. Lists all of them, with the points that have them.
        HpcgenError: the run file trains nothing.
    """
    planned, failed = list[Point](), dict[str, HpcgenError]()
    names = point_names(points)
    labels = [
        f"{name} ({' '.join(each)})" if names.count(name) > 1 else name
        for name, each in zip(names, points, strict=True)
    ]
    run_file = RunFile(file)
    for number, (name, label, assignments) in enumerate(zip(names, labels, points, strict=True), 1):
        on_point(number)
        try:
            planned.append(_point(run_file, shared, name, assignments))
        except HpcgenError as error:
            failed[label] = error
    _raise_all(failed, len(points))
    _require_different(planned)
    return Sweep(points=tuple(planned))


def _point(file: RunFile, shared: Sequence[str], name: str, assignments: Assignments) -> Point:
    run = file.load((*shared, *assignments))
    stage = main_stage(run)
    if stage not in (TRAIN.name, RUN.name):
        raise HpcgenError("describes no training, so there is nothing to sweep", where=file.path)
    directory = Path(run.directory, run.config.paths.run_dir, DIRECTORY)
    first = _at(run, name, directory / name)
    config = absolute_paths(first.config, first.directory)
    trains = stage == TRAIN.name and not first.omitted
    trainer = plan_training(first, config, must_fit=False).trainer if trains else None
    if trains and trainer is None:
        plan(first, [stage])  # raises the mistakes of the point
    key = _key(config, trainer, assignments)
    return Point(
        name=name,
        assignments=assignments,
        key=key,
        plan=plan(_at(run, name, directory / f"{name}-{key}"), [stage]),
    )


def _at(run: Run, name: str, directory: Path) -> Run:
    """The run with the name and the directory of a point."""
    values = {"name": f"{run.config.name}-{name}"[:MAX_RUN_NAME], "paths.run_dir": str(directory)}
    overrides = (*run.overrides, *(f"{path}={value}" for path, value in values.items()))  # for hpcgen resume
    return dataclasses.replace(with_values(run, values, "hpcgen sweep"), overrides=overrides)


def _key(config: RunConfig, trainer: TrainerConfig | None, assignments: Assignments) -> str:
    """A hash of what the results of a point depend on. Points of an edited run file do not mix with earlier ones.

    Keys that a resumed run may change freely, such as train_iters, count only if they distinguish points. The run then
    continues with the new value.
    """
    swept: dict[str, Any] = {}
    for assignment in assignments:
        path = assignment.partition("=")[0]
        swept[path] = override(RunConfig, assignment).get(path)
    if trainer is None:
        program = dataclasses.asdict(config.program) if config.program else None
        return trial_key(program, dict(config.environment), swept)[:KEY_DIGITS]
    kept = {
        section: {key: value for key, value in values.items() if f"{section}.{key}" not in FREE}
        for section, values in sections(trainer).items()
    }
    return trial_key(kept, swept, code_hashes(trainer))[:KEY_DIGITS]


def require_all(points: Sequence[Point], require: Callable[[Point], object]) -> None:
    """Calls `require` for all points.

    Raises:
        FileErrors, ConfigErrors: it raises an HpcgenError for some. Lists all mistakes, with the points that have them.
    """
    failed = dict[str, HpcgenError]()
    for point in points:
        try:
            require(point)
        except HpcgenError as error:
            failed[point.name] = error
    _raise_all(failed, len(points))


def _raise_all(failed: Mapping[str, HpcgenError], num_points: int) -> None:
    """Raises the mistakes of all points. Those that not all points have begin with the names of their points.

    Rules are checked only on points without mistakes in keys and values, so those come first.
    """
    if not failed:
        return
    in_files = {name: error for name, error in failed.items() if isinstance(error, FileErrors)}
    found: dict[Problem, list[str]] = {}
    for name, error in (in_files or failed).items():
        for mistake in error.mistakes:
            found.setdefault(mistake, []).append(name)
    mistakes = [
        mistake
        if len(names) == num_points
        else dataclasses.replace(mistake, where=": ".join(filter(None, (few(names), mistake.where))))
        for mistake, names in found.items()
    ]
    raise FileErrors(mistakes) if in_files else ConfigErrors(mistakes)


def _require_different(points: Sequence[Point]) -> None:
    """Refuses points with the same values, such as 1e-4 and 0.0001.

    Raises:
        ConfigErrors: some are the same. Lists all of them.
    """
    of_key: dict[str, list[str]] = {}
    for point in points:
        of_key.setdefault(point.key, []).append(" ".join(point.assignments))
    same = [" and ".join(found) for found in of_key.values() if len(found) > 1]
    if same:
        raise ConfigErrors(
            [Problem("", f"the points {each} are the same", "remove one of them") for each in same]
        )
