"""A run as an older release of hpcgen would plan it, with its files, defaults and variables.

Each release leaves a record (RELEASES): the YAML files that it shipped, the defaults of all keys, and the variables and
directives that its code set in representative runs.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcgen.config import document
from hpcgen.config.cluster import ClusterConfig
from hpcgen.config.document import Document
from hpcgen.config.keys import defaults
from hpcgen.config.loader import ANY_RUN, Run, load_document
from hpcgen.config.run import RunConfig
from hpcgen.errors import HpcgenError
from hpcgen.planning.environment import Variable, stage_environment
from hpcgen.planning.request import make_allocation
from hpcgen.resources import RELEASES, as_of, shipped
from hpcgen.run_plan.explanation import Change, Changes, Comparison, Explanation, different, explain
from hpcgen.run_plan.plan import plan
from hpcgen.run_plan.stage import stage_directives
from hpcgen.stages import STAGES
from trainer.contract.record import record

Values = Mapping[str, Sequence[str]]
"""Name -> its values in different runs, with RUN_DIR for the run's directory."""
OWN_LAYERS = ("built-in", "stage")
"""Layers of variables that hpcgen's code sets."""
VARIANTS: tuple[tuple[str, ...], ...] = (
    (),
    ("parallelism.tensor_model_parallel_size=2",),
    ("container.runtime=pyxis", "container.image=any"),
    ("container.runtime=enroot", "container.image=/any.sqsh"),
    ("container.runtime=none",),
)
"""Changes of a representative run on which these variables depend."""


@record
class Release:
    """The record of a release."""

    version: str
    defaults: Mapping[str, Mapping[str, Any]]
    """"run file" and "cluster profile" -> dotted path -> default."""
    variables: Mapping[str, Values]
    """Stage -> variables that the code sets in representative runs."""
    directives: Mapping[str, Values]
    """Stage -> options of sbatch in representative runs."""


def release_names() -> list[str]:
    """The versions that have a record, oldest first."""
    names = (path.name for path in RELEASES.iterdir() if path.is_dir())
    return sorted(names, key=lambda name: [int(part) for part in name.split(".")])


def read_release(version: str) -> Release:
    """The record of a version in `release_names`."""
    read = json.loads((RELEASES / version / "record.json").read_bytes())
    return Release(version, read["defaults"], read["variables"], read["directives"])


def compare_with(version: str, stage: str, load: Callable[[], Run]) -> Comparison:
    """A stage with a release's record and now. `load` loads the run.

    Raises:
        HpcgenError: the run has mistakes, or needs what the release did not ship.
    """
    release = read_release(version)
    run = load()
    try:
        with as_of(version):
            earlier = load()
            before, directives = explain(stage, earlier), _directives(stage, earlier)
    except HpcgenError as error:
        raise HpcgenError(
            f"not comparable with hpcgen {version}, with whose files this run would be refused: {error}"
        ) from error
    if directives:
        recorded = release.directives.get(stage, {})
        directives = _as_recorded(directives, recorded, own_directives(stage), before.run_dir)
    changes = Changes(
        directives=different(*(_lists(options) for options in (directives, _directives(stage, run)))),
        defaults=dict(_defaults(release, run)),
    )
    return Comparison(
        before=dataclasses.replace(
            before, variables=tuple(sorted(_variables(release, before), key=lambda v: v.name))
        ),
        after=explain(stage, run),
        against=f"hpcgen {version}",
        changes=changes,
        unseen=f"not compared: shell functions, templates, and how hpcgen {version} computed values. To see these too, "
        "keep a script that it renders, and name the script after --diff",
    )


def _directives(stage: str, run: Run) -> dict[str, str]:
    """The stage's directives. None for a profile alone, without a model that the stage needs."""
    if set(STAGES[stage].needs) & set(run.omitted):
        return {}
    return dict(map(_option, plan(run, [stage], exists=lambda path: True).stages[stage].directives))


def _lists(values: Mapping[str, str]) -> dict[str, list[str]]:
    return {name: [value] for name, value in values.items()}


def _option(directive: str) -> tuple[str, str]:
    name, _, value = directive.removeprefix("--").partition("=")
    return name, value


def own_variables(stage: str) -> Values:
    """The variables that hpcgen's code sets for a stage in representative runs."""
    found: dict[str, set[str]] = {}
    for run in _representative_runs():
        for variable in stage_environment(STAGES[stage], run, run.config):
            if variable.layer in OWN_LAYERS:
                found.setdefault(variable.name, set()).add(_general(variable.value, run.config.paths.run_dir))
    return _sorted(found)


def own_directives(stage: str) -> Values:
    """The directives of a stage in representative runs."""
    found: dict[str, set[str]] = {}
    for run in _representative_runs():
        allocation = make_allocation(STAGES[stage], run.config, run.cluster, run.node_type)
        for name, value in map(_option, stage_directives(STAGES[stage], run.config, allocation, 0)):
            found.setdefault(name, set()).add(_general(value, run.config.paths.run_dir))
    return _sorted(found)


def _sorted(found: Mapping[str, set[str]]) -> Values:
    return {name: sorted(values) for name, values in sorted(found.items())}


@functools.cache
def _representative_runs() -> list[Run]:
    return [
        load_document(
            document.constant({**ANY_RUN, "cluster": str(profile)}, "representative"), Path("/"), overrides
        )
        for profile in sorted(shipped("clusters").glob("*.yaml"))
        for overrides in VARIANTS
    ]


def _general(value: str, run_dir: str) -> str:
    """The value with RUN_DIR for the run's directory."""
    return value.replace(run_dir, "RUN_DIR")


def _as_recorded(found: Mapping[str, str], recorded: Values, now: Values, run_dir: str) -> dict[str, str]:
    """Values that today's code sets for a run, as the release's code would have set them.

    `recorded` and `now` are the values of both in representative runs. A value that neither of them has depends on the
    run and is kept.
    """
    values = {name: value for name, value in found.items() if name in recorded or name not in now}
    for name, alternatives in recorded.items():
        value = _general(found[name], run_dir) if name in found else None
        is_new = value in now.get(name, ()) and value not in alternatives
        is_gone = value is None and name not in now
        if is_new or is_gone:
            values[name] = alternatives[0].replace("RUN_DIR", run_dir)
    return values


def _variables(release: Release, before: Explanation) -> Iterator[Variable]:
    """Yields the variables of `before`, those of today's code replaced by those of the release's code."""
    own = {variable.name: variable for variable in before.variables if variable.layer in OWN_LAYERS}
    values = {name: variable.value for name, variable in own.items()}
    recorded = release.variables.get(before.stage, {})
    as_recorded = _as_recorded(values, recorded, own_variables(before.stage), before.run_dir)
    given = {variable.name for variable in before.variables} - own.keys()
    for name, value in as_recorded.items():
        if value == values.get(name):
            yield own[name]
        elif name not in given:
            why = (
                own[name].why
                if name in own
                else f"hpcgen {release.version} set it, perhaps only for some runs."
            )
            origin = f"hpcgen {release.version}"
            yield Variable(name=name, value=value, layer="stage", why=why, origin=origin)
    yield from (variable for variable in before.variables if variable.name in given)


def _defaults(release: Release, run: Run) -> Iterator[tuple[str, Change]]:
    """Yields the keys whose default has changed and that no file sets."""
    files: dict[str, tuple[type, Document]] = {
        "run file": (RunConfig, run.document),
        "cluster profile": (ClusterConfig, run.cluster_document),
    }
    for file, (cls, read) in files.items():
        now = json.loads(json.dumps(defaults(cls)))
        for path, value in release.defaults[file].items():
            if path in now and now[path] != value and read.get(path) is None:
                yield f"{file}: {path}", Change((json.dumps(value),), (json.dumps(now[path]),))
