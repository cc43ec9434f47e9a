"""Mistakes and warnings of a cluster profile that do not depend on a run."""

from __future__ import annotations

import os.path
from collections.abc import Iterator
from pathlib import Path

from hpcgen.config import document as documents
from hpcgen.config.cluster import ClusterConfig
from hpcgen.config.loader import ANY_RUN, Profile, load_document
from hpcgen.config.node_types import load_node_type
from hpcgen.config.run import RunConfig
from hpcgen.config.validation import build, describe
from hpcgen.errors import Problem
from hpcgen.planning.allocation import allocation_problems, cluster_problems
from hpcgen.planning.container import container_problems, container_warnings, missing_file_warnings
from hpcgen.planning.environment import (
    environment_problems,
    environment_warnings,
    node_type_environment_problems,
    stage_environment,
)
from hpcgen.planning.paths import absolute_paths
from hpcgen.stages import STAGES
from hpcgen.stages.train import TRAIN


def profile_mistakes(profile: Profile) -> tuple[str, ...]:
    """All mistakes in a profile and its node type, including those that planning a run would find."""
    # the other keys can be checked with any node type
    config = profile.config or build(ClusterConfig, profile.document, {"node_type": "cpu"}).config
    problems = [] if config is None else _planning_problems(config, profile)
    described = (describe(problem, profile.document, config) for problem in problems)
    return tuple(dict.fromkeys((*profile.mistakes, *described)))


def profile_warnings(name: str, directory: Path) -> tuple[str, ...]:
    """Warnings that rendering any stage would print for a valid profile and its node type."""
    values = {**ANY_RUN, "cluster": name, "slurm": {TRAIN.section: {"nodes": 2}}}
    run = load_document(documents.constant(values, "any run"), directory)
    config = absolute_paths(run.config, run.directory)
    found = [*container_warnings(config, run.cluster)]
    found += missing_file_warnings(config, run.cluster, os.path.exists)
    for stage in STAGES.values():
        found += environment_warnings(stage, run, stage_environment(stage, run, config))
    of_profile = (problem for problem in found if problem.file == "cluster")
    return tuple(
        dict.fromkeys(describe(problem, run.cluster_document, run.cluster) for problem in of_profile)
    )


def _planning_problems(cluster: ClusterConfig, profile: Profile) -> Iterator[Problem]:
    run = build(RunConfig, documents.constant(ANY_RUN, "")).config
    assert run is not None
    node_type = profile.node_type or load_node_type("cpu")
    found = [*environment_problems(cluster.environment, ()), *cluster_problems(cluster, node_type)]
    found += node_type_environment_problems(cluster.node_type, node_type)
    in_both = [*container_problems(run, cluster)]
    for stage in STAGES.values():
        in_both += allocation_problems(stage, run, cluster, node_type)
    found += (problem for problem in in_both if problem.file == "cluster")
    for problem in found:
        if profile.node_type is not None or problem.path != "gres":  # gres is checked against the node type
            yield problem
