"""Mistakes and warnings of a cluster profile that do not depend on a run."""

from __future__ import annotations

import os.path
from collections.abc import Iterator
from pathlib import Path

from hpcgen.config import document as documents
from hpcgen.config.directories import is_below, names_in
from hpcgen.config.loader import ANY_RUN, Run, load_document
from hpcgen.config.node_types import load_node_type
from hpcgen.config.plausible import cluster_doubts, node_type_doubts, topology_file_doubt, unnamed_nics
from hpcgen.config.profiles import Profile
from hpcgen.config.run import RunConfig
from hpcgen.config.validation import build, located
from hpcgen.errors import Problem, file_of
from hpcgen.planning.allocation_warnings import allocation_warnings
from hpcgen.planning.container import (
    container_problems,
    container_warnings,
    missing_file_warnings,
    not_run_warnings,
)
from hpcgen.planning.environment import (
    environment_problems,
    environment_warnings,
    node_type_environment_problems,
    stage_environment,
)
from hpcgen.planning.host_doubts import host_doubts
from hpcgen.planning.paths import absolute_paths
from hpcgen.planning.request import allocation_problems, cluster_problems
from hpcgen.resources import shipped
from hpcgen.stages import STAGES
from hpcgen.stages.train import TRAIN


def profile_mistakes(profile: Profile) -> list[Problem]:
    """The rules that a profile and its node type break, and what is probably wrong in them.

    Planning a run warns about the second kind, so that an upgrade of hpcgen ends no job.
    """
    problems = (*_planning_problems(profile), *profile.doubts)
    placed = [located(problem, profile.document, profile.config) for problem in problems]
    return list(dict.fromkeys(placed))  # stages may share a section


def profile_warnings(name: str, directory: Path) -> tuple[str, ...]:
    """Warnings that rendering any stage would print for a valid profile and its node type, and implausible facts of
    them, which only an administrator can correct."""
    values = {**ANY_RUN, "cluster": name, "slurm": {TRAIN.section: {"nodes": 2}}}
    run = load_document(documents.constant(values, "any run"), directory)
    config = absolute_paths(run.config, run.directory)
    found = [*container_warnings(config, run.cluster), *not_run_warnings(config, run.cluster)]
    found += missing_file_warnings(config, run.cluster, os.path.exists)
    for stage in STAGES.values():
        found += allocation_warnings(stage, config, run.cluster, run.node_type)
        found += environment_warnings(stage, run, stage_environment(stage, run, config))
    of_profile = [problem for problem in found if problem.file == "cluster"]
    of_profile += (*cluster_doubts(run.cluster, run.node_type), *host_doubts(run.cluster))
    placed = [located(problem, run.cluster_document, run.cluster) for problem in of_profile]
    placed += [located(problem, run.node_type_document, run.node_type) for problem in _node_type_doubts(run)]
    return tuple(map(str, dict.fromkeys(placed)))


def _node_type_doubts(run: Run) -> Iterator[Problem]:
    yield from node_type_doubts(run.node_type)
    # shipped types list all adapters of their machines
    is_own = not is_below(Path(file_of(run.node_type_document.origin("nics"))), shipped("topologies"))
    if is_own and (problem := unnamed_nics(run.node_type, run.cluster.environment)):
        yield problem
    if run.node_type.topology_file and run.cluster.node_type not in (
        names := names_in([shipped("topologies")])
    ):
        others = {name: load_node_type(name) for name in names}
        if problem := topology_file_doubt(run.node_type, others):
            yield problem


def _planning_problems(profile: Profile) -> Iterator[Problem]:
    run, _ = build(RunConfig, documents.constant(ANY_RUN, ""))
    assert run is not None
    cluster, node_type = profile.config, profile.node_type
    yield from environment_problems(cluster.environment, cluster.secrets)
    yield from cluster_problems(cluster, node_type)
    yield from node_type_environment_problems(node_type, profile.node_type_document)
    in_both = list(container_problems(run, cluster))
    for stage in STAGES.values():
        in_both += allocation_problems(stage, run, cluster, node_type)
    yield from (problem for problem in in_both if problem.file == "cluster")
