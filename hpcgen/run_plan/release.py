"""What a run would have been with the files, defaults and variables of an older release of hpcgen.

Each release leaves a record (RELEASES): the YAML files that it shipped, the defaults of all keys, and the variables
that its code set.
"""

from __future__ import annotations

import dataclasses
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
from hpcgen.resources import RELEASES, as_of, shipped
from hpcgen.run_plan.explanation import Change, Changes, Comparison, Explanation, different, explain
from hpcgen.run_plan.plan import plan
from hpcgen.stages import STAGES
from trainer.contract.record import record

OWN_LAYERS = ("built-in", "stage")
"""Layers of variables that hpcgen's code sets."""
VARIANTS: tuple[tuple[str, ...], ...] = (
    (),
    ("parallelism.tensor_model_parallel_size=2",),
    ("container.runtime=pyxis", "container.image=any"),
    ("container.runtime=enroot", "container.image=/any.sqsh"),
    ("container.runtime=none",),
)
"""Changes of a run on which these variables depend."""


@record
class Release:
    """The record of a release."""

    version: str
    defaults: Mapping[str, Mapping[str, Any]]
    """"run file" and "cluster profile" -> dotted path -> default."""
    variables: Mapping[str, Mapping[str, Sequence[str]]]
    """Stage -> variable that the code sets -> its values in different runs, with RUN_DIR for the run's directory."""


def release_names() -> list[str]:
    """The versions that have a record, oldest first."""
    names = (path.name for path in RELEASES.iterdir() if path.is_dir())
    return sorted(names, key=lambda name: [int(part) for part in name.split(".")])


def read_release(version: str) -> Release:
    """The record of a version in `release_names`."""
    read = json.loads((RELEASES / version / "record.json").read_bytes())
    return Release(version, read["defaults"], read["variables"])


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
    changes = Changes(
        directives=different(directives, _directives(stage, run)),
        defaults=dict(_defaults(release, run)),
    )
    return Comparison(
        before=dataclasses.replace(before, variables=tuple(_variables(release, before))),
        after=explain(stage, run),
        against=f"hpcgen {version}",
        changes=changes,
        unseen=f"not compared: shell functions, templates, and how hpcgen {version} computed values. To see these too, "
        "keep a script that it renders, and name the script after --diff",
    )


def _directives(stage: str, run: Run) -> dict[str, list[str]]:
    """The stage's directives. None for a profile alone, without a model that the stage needs."""
    found: dict[str, list[str]] = {}
    if set(STAGES[stage].needs) & set(run.omitted):
        return found
    for directive in plan(run, [stage], exists=lambda path: True).stages[stage].directives:
        name, _, value = directive.removeprefix("--").partition("=")
        found[name] = [value]
    return found


def own_variables(stage: str) -> dict[str, list[str]]:
    """The variables that hpcgen's code sets for a stage, with their values in representative runs of each profile.

    The directory of a run is written as RUN_DIR.
    """
    found: dict[str, set[str]] = {}
    for profile in sorted(shipped("clusters").glob("*.yaml")):
        for overrides in VARIANTS:
            values = document.constant({**ANY_RUN, "cluster": str(profile)}, "a representative run")
            run = load_document(values, Path("/"), overrides)
            for variable in stage_environment(STAGES[stage], run, run.config):
                if variable.layer in OWN_LAYERS:
                    value = variable.value.replace(run.config.paths.run_dir, "RUN_DIR")
                    found.setdefault(variable.name, set()).add(value)
    return {name: sorted(values) for name, values in sorted(found.items())}


def _variables(release: Release, before: Explanation) -> Iterator[Variable]:
    """Yields the variables of `before`, those of today's code replaced by those of the release's code."""
    recorded, now = release.variables.get(before.stage, {}), own_variables(before.stage)
    for variable in before.variables:
        is_own, name = variable.layer in OWN_LAYERS, variable.name
        values, written = recorded.get(name), variable.value.replace(before.run_dir, "RUN_DIR")
        if is_own and values and written not in values and values != now.get(name, values):
            value = values[0].replace("RUN_DIR", before.run_dir)
            yield dataclasses.replace(variable, value=value, origin=f"hpcgen {release.version}")
        elif not is_own or values or name not in now:
            yield variable
    for name in sorted(recorded.keys() - now.keys()):
        yield Variable(
            name=name,
            value=recorded[name][0].replace("RUN_DIR", before.run_dir),
            layer="stage",
            why=f"hpcgen {release.version} set it, perhaps only for some runs.",
            origin=f"hpcgen {release.version}",
        )


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
