"""Reads a run file with everything it refers to: overrides, preset, cluster profile and node type."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcgen.config import document as documents
from hpcgen.config.cluster import ClusterConfig
from hpcgen.config.directories import configuration_directories
from hpcgen.config.document import Document
from hpcgen.config.fields import FilePath, constraint_problems
from hpcgen.config.node_type import NodeType
from hpcgen.config.node_types import find_node_type, load_node_type, unknown_node_type
from hpcgen.config.presets import PRESETS, Preset
from hpcgen.config.run import RunConfig
from hpcgen.config.validation import build, describe
from hpcgen.errors import ConfigErrors, HpcgenError, Problem


@dataclass(frozen=True)
class Run:
    """A run file as it was read: the frozen configuration, and the document that says where each value is from."""

    config: RunConfig
    cluster: ClusterConfig
    node_type: NodeType
    cluster_name: str
    document: Document
    cluster_document: Document
    directory: Path
    """Relative paths of the run file start here."""
    mistakes: tuple[str, ...] = ()
    """What is wrong in the run file, left out of `config`; planning refuses it together with broken rules."""
    unsure_sections: frozenset[str] = frozenset()
    """Sections that hold a mistake: what follows from them is not worth a message."""


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> Run:
    """Reads a run file and all it refers to; `overrides` are "a.b=c" texts that win over it.

    Mistakes that leave enough to go on are kept in `mistakes`, so that planning can report all of them at once.

    Raises:
        ConfigErrors: mistakes in the run file, the overrides, the cluster profile or the node type that leave
            no configuration to plan with, all of them.
        HpcgenError: a file that can't be read.
    """
    path = Path(path)
    return _load(documents.read(path), path.absolute().parent, overrides)


def load_cluster_run(cluster: str, run_dir: str, overrides: Sequence[str] = ()) -> Run:
    """A run for the cluster's own stages (nccl-test, node-health, ...), which need a cluster and a directory alone.

    What a run file must say besides is filled in, and those stages do not look at it.

    Raises:
        ConfigErrors, HpcgenError: as `load_run`.
    """
    values = {
        "name": Path(cluster).name.removesuffix(".yaml"),
        "cluster": cluster,
        "preset": "tiny",
        "paths": {"run_dir": run_dir},
        "data": {"mock": True},
    }
    return _load(documents.constant(values, "the command line"), Path.cwd(), overrides)


def _load(document: Document, directory: Path, overrides: Sequence[str]) -> Run:
    for assignment in [overrides] if isinstance(overrides, str) else overrides:
        document = documents.merge(document, documents.override(assignment))
    messages: list[str] = []
    preset = _preset(document, messages)
    if preset is not None:
        document = documents.merge(documents.constant(preset.sections, f"preset {preset.name}"), document)
    built = build(RunConfig, document)
    problems = built.problems
    if is_unknown := preset is None and isinstance(document.get("preset"), str):
        # said already; and what is missing may be so because of it
        problems = tuple(
            problem for problem in problems if problem.path != "preset" and problem.reason != "is missing"
        )
    messages += [describe(problem, document) for problem in problems]
    cluster = None
    name = document.get("cluster")
    if isinstance(name, str) and not any(constraint_problems(FilePath, name)):
        cluster = _cluster(name, document, directory, messages)
    if is_unknown or built.config is None or cluster is None:
        raise ConfigErrors(messages)
    return Run(
        config=built.config,
        cluster=cluster.config,
        node_type=cluster.node_type,
        cluster_name=Path(name).name.removesuffix(".yaml"),
        document=document,
        cluster_document=cluster.document,
        directory=directory,
        mistakes=tuple(messages),
        unsure_sections=frozenset(re.split(r"[.\[]", problem.path)[0] for problem in problems),
    )


def load_cluster(name: str, directory: Path | None = None) -> tuple[ClusterConfig, NodeType]:
    """The cluster profile `name` (a name, or a path from `directory`) and its node type.

    Raises:
        ConfigErrors: every mistake in the two files.
        HpcgenError: a file that can't be read.
    """
    messages: list[str] = []
    asked = documents.constant({"cluster": name}, "cluster")
    cluster = _cluster(name, asked, directory or Path.cwd(), messages)
    if cluster is None:
        raise ConfigErrors(messages)
    return cluster.config, cluster.node_type


def cluster_directories() -> list[Path]:
    """Where cluster profiles are looked up by name, first match wins."""
    return [
        Path("clusters"),
        *configuration_directories("clusters"),
        Path(__file__).parent.parent / "clusters",
    ]


def cluster_names() -> list[str]:
    """Names of all profiles that can be found."""
    found = {
        path.stem
        for directory in cluster_directories()
        if directory.is_dir()
        for path in directory.glob("*.yaml")
    }
    return sorted(found)


def _preset(document: Document, messages: list[str]) -> Preset | None:
    name = document.get("preset")
    if not isinstance(name, str):
        return None
    if name not in PRESETS:
        problem = Problem("preset", "is not a preset", f"use one of {', '.join(PRESETS)}")
        messages.append(describe(problem, document))
        return None
    return PRESETS[name]


@dataclass(frozen=True)
class _Cluster:
    config: ClusterConfig
    node_type: NodeType
    document: Document


def _cluster(name: str, asked: Document, directory: Path, messages: list[str]) -> _Cluster | None:
    """The profile and its node type; None, with a message for each mistake, when they are not right."""
    document = _cluster_document(name, asked, directory, messages)
    if document is None:
        return None
    built = build(ClusterConfig, document)
    messages += [describe(problem, document) for problem in built.problems]
    if built.config is None or built.problems:
        return None
    if find_node_type(built.config.node_type) is None:
        messages.append(describe(unknown_node_type("node_type"), document))
        return None
    try:
        node_type = load_node_type(built.config.node_type)
    except ConfigErrors as error:
        messages += error.messages
        return None
    return _Cluster(built.config, node_type, document)


def _cluster_document(name: str, asked: Document, directory: Path, messages: list[str]) -> Document | None:
    """The profile with all that it extends, farthest ancestor lowest."""
    chain: list[Document] = []
    seen: list[Path] = []
    key = "cluster"
    while True:
        path = _find_cluster(name, directory, seen)
        if path is None:
            hint = f"use the path of a .yaml, or one of {', '.join(cluster_names())}"
            messages.append(describe(Problem(key, "names no cluster profile", hint), asked))
            return None
        try:
            profile = documents.read(path)
        except HpcgenError as error:
            messages.append(str(error))
            return None
        chain.append(profile)
        seen.append(path)
        parent = profile.values.get("extends")
        if not isinstance(parent, str):
            break
        name, asked, key, directory = parent, profile, "extends", path.absolute().parent
    merged = chain.pop()
    while chain:
        merged = documents.merge(merged, chain.pop())
    return merged


def _find_cluster(name: str, directory: Path, seen: Sequence[Path]) -> Path | None:
    """The first file that `name` can mean, but none of `seen`: ./clusters/azure-ndv5.yaml may extend azure-ndv5."""
    if "/" in name or name.endswith((".yaml", ".yml")):
        candidates = [directory / name]
    else:
        candidates = [folder / f"{name}.yaml" for folder in cluster_directories()]
    # unlike Path.is_file, it answers for a name that is too long as well
    return next((path for path in candidates if os.path.isfile(path) and path not in seen), None)  # noqa: PTH113
