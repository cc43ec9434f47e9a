"""Loads a run file with overrides, preset, cluster profile and node type."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcgen.config import document as documents
from hpcgen.config.cluster import ClusterConfig, cluster_rule_problems
from hpcgen.config.directories import (
    configuration_directories,
    is_below,
    local_directories,
    names_in,
    origin,
    readable,
)
from hpcgen.config.document import Document
from hpcgen.config.fields import FilePath, constraint_problems
from hpcgen.config.inheritance import explain_removals, inherit
from hpcgen.config.invalid import INVALID, with_invalid
from hpcgen.config.node_type import NodeType
from hpcgen.config.node_types import (
    cycle,
    find_node_type,
    load_node_type,
    load_node_type_and_files,
    unknown_node_type,
)
from hpcgen.config.overrides import override
from hpcgen.config.presets import PRESETS, Preset
from hpcgen.config.run import TRAINER_SECTIONS, RunConfig
from hpcgen.config.trust import require_trusted_file
from hpcgen.config.validation import MISSING, build, describe
from hpcgen.errors import ConfigErrors, HpcgenError, Problem
from hpcgen.text import did_you_mean
from trainer.contract.config import BlendConfig

SHIPPED_CLUSTERS = Path(__file__).parent.parent / "clusters"
UNUSED_MODEL = {"preset": "tiny", "data": {"mock": True}}
"""Values for the required keys about the model, for runs whose stages do not use them."""
ANY_RUN: dict[str, Any] = {
    "name": "any",
    "cluster": "any",
    "paths": {"run_dir": "/any"},
    "model": {"num_layers": 1, "hidden_size": 1, "num_attention_heads": 1, "seq_length": 1},
    "training": {"micro_batch_size": 1, "global_batch_size": 1, "train_iters": 1},
    "optimizer": {"lr": 1},
}
"""The required keys of a run, with values that stand in for missing and invalid ones."""
STAND_INS = {
    **ANY_RUN,
    "model": {**ANY_RUN["model"], "rope_scaling": {"rope_type": "linear", "factor": 1}},
    "data": {"corpus": {"directory": "/any", "source": {"directory": "/any"}}},
    "program": {"command": ["any"]},
}
"""ANY_RUN with the required keys of optional sections."""


@dataclass(frozen=True)
class Run:
    """A loaded run file: the configuration, and the document with the origin of each value."""

    config: RunConfig
    cluster: ClusterConfig
    node_type: NodeType
    cluster_name: str
    document: Document
    cluster_document: Document
    directory: Path
    """Base directory of relative paths in the run file."""
    cluster_files: tuple[str, ...] = ()
    """The profile and the files that it extends, in this order; "shipped:clusters/local.yaml" for shipped files."""
    node_type_files: tuple[str, ...] = ()
    """The files of the node type, in the same form."""
    mistakes: tuple[str, ...] = ()
    """Mistakes in the run file, the profile and the node type. Planning reports them together with broken rules.

    `config`, `cluster` and `node_type` have defaults or stand-ins in place of invalid values.
    """
    invalid: tuple[str, ...] = ()
    """Paths of the missing and invalid values of the run file."""
    invalid_in_profile: tuple[str, ...] = ()
    """Paths of the missing and invalid values of the profile. "" is the complete profile."""
    has_valid_node_type: bool = True
    """False if the node type is unknown or has mistakes. `node_type` is then a stand-in."""
    file: Path | None = None
    """The run file; None for a run from a cluster profile only."""
    sha256: str = ""
    """Hash of the run file."""

    def with_invalid(self) -> Run:
        """A copy for checks, with INVALID in place of missing and invalid values."""
        return dataclasses.replace(
            self,
            config=with_invalid(self.config, self.invalid),
            cluster=with_invalid(self.cluster, self.invalid_in_profile),
            node_type=self.node_type if self.has_valid_node_type else INVALID,
        )


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> Run:
    """Loads a run file and the files that it refers to. `overrides` are assignments such as "a.b=c".

    Mistakes in these files are kept in `mistakes`, so that planning can report all mistakes at once.

    Raises:
        HpcgenError: the run file cannot be read.
    """
    path = Path(path)
    if not path.exists():
        raise HpcgenError(
            f"{path}: no such file", "write a run file with hpcgen init, or name another with -c"
        )
    run = load_document(documents.read(path), path.absolute().parent, overrides)
    return dataclasses.replace(
        run, file=path.absolute(), sha256=hashlib.sha256(path.read_bytes()).hexdigest()
    )


def load_valid_run(path: str | Path, overrides: Sequence[str] = ()) -> Run:
    """Loads a run file for a command that reads some of its values and plans nothing.

    Raises:
        ConfigErrors: the run file has mistakes. Lists all of them.
        HpcgenError: a file cannot be read.
    """
    run = load_run(path, overrides)
    if run.mistakes:
        raise ConfigErrors(run.mistakes)
    return run


def load_cluster_run(cluster: str, run_dir: str, overrides: Sequence[str] = ()) -> Run:
    """A run for stages such as nccl-test and node-health, which need only a cluster profile and a run directory.

    The other required keys of a run file get values that these stages do not use.

    Raises:
        ConfigErrors, HpcgenError: see `load_run`.
    """
    values = {
        "name": Path(cluster).name.removesuffix(".yaml"),
        "cluster": cluster,
        "paths": {"run_dir": run_dir},
        **UNUSED_MODEL,
    }
    document = documents.constant(values, "the command line")
    options = {"name": "--cluster", "cluster": "--cluster", "paths.run_dir": "--run-dir"}
    document = Document(values, {**document.origins, **options})
    return load_document(document, Path.cwd(), overrides)


def load_document(document: Document, directory: Path, overrides: Sequence[str] = ()) -> Run:
    """The run that a document describes. Relative paths start at `directory`.

    Raises:
        ConfigErrors, HpcgenError: see `load_run`.
    """
    for assignment in [overrides] if isinstance(overrides, str) else overrides:
        document = documents.merge(document, override(RunConfig, assignment))
    messages: list[str] = []
    if document.get("program") is not None:
        messages += [describe(problem, document) for problem in _trainer_keys(document)]
        document = documents.merge(documents.constant(UNUSED_MODEL, "program"), _without_trainer(document))
    preset = _preset(document, messages)
    if preset is not None:
        document = documents.merge(documents.constant(preset.sections, f"preset {preset.name}"), document)
    has_unknown_preset = preset is None and isinstance(document.get("preset"), str)
    if has_unknown_preset:
        document = documents.without(document, "preset")
    built = build(RunConfig, document, STAND_INS)
    problems, invalid = built.problems, built.invalid
    if has_unknown_preset:  # keys may be missing only because of it
        problems = tuple(problem for problem in problems if problem.reason != MISSING)
        invalid += tuple(_unset_preset_keys(document))
    messages += [describe(problem, document) for problem in problems]
    assert built.config is not None
    profile = UNKNOWN_PROFILE
    name = document.get("cluster")
    if isinstance(name, str) and not any(constraint_problems(FilePath, name)):
        try:
            profile = _read_profile(name, document, directory)
            messages += profile.mistakes
        except ConfigErrors as error:
            messages += error.messages
    return Run(
        config=built.config,
        cluster=profile.config,
        node_type=profile.node_type or load_node_type(STAND_IN_NODE_TYPE),
        cluster_name=Path(built.config.cluster).name.removesuffix(".yaml"),
        document=document,
        cluster_document=profile.document,
        directory=directory,
        cluster_files=profile.files,
        node_type_files=profile.node_type_files,
        mistakes=tuple(messages),
        invalid=invalid,
        invalid_in_profile=profile.invalid,
        has_valid_node_type=profile.node_type is not None,
    )


def load_cluster(name: str, directory: Path | None = None) -> tuple[ClusterConfig, NodeType]:
    """The cluster profile `name` (a name, or a path relative to `directory`) and its node type.

    Raises:
        ConfigErrors: the two files have mistakes. Lists all of them.
        HpcgenError: a file cannot be read.
    """
    profile = read_profile(name, directory)
    cluster = profile.valid()
    if cluster is None:
        raise ConfigErrors(profile.mistakes)
    return cluster


def cluster_directories(base: Path | None = None) -> list[Path]:
    """The directories in which cluster profiles are looked up by name. The first match is used.

    `base` is the directory of the run file; None without a run file.
    """
    return [
        *local_directories("clusters", base),
        *configuration_directories("clusters"),
        SHIPPED_CLUSTERS,
    ]


def cluster_names(base: Path | None = None) -> list[str]:
    """Names of all available profiles."""
    return names_in(cluster_directories(base))


def find_cluster(name: str) -> Path | None:
    """The file of the profile `name`, a name or a path; None if there is none."""
    return _find_cluster(name, Path.cwd(), None, ())


def _trainer_keys(document: Document) -> Iterator[Problem]:
    """Yields the keys for hpcgen's trainer in a document with the section `program`."""
    of_blend = {f"data.{field.name}" for field in dataclasses.fields(BlendConfig)}
    for key in (*TRAINER_SECTIONS, *sorted(of_blend)):
        if document.get(key) is not None:
            reason = "is for hpcgen's trainer, but the run file has the section program"
            yield Problem(key, reason, "remove it, or remove program to train with hpcgen's trainer")


def _without_trainer(document: Document) -> Document:
    for problem in _trainer_keys(document):
        document = documents.without(document, problem.path)
    return document


def _preset(document: Document, messages: list[str]) -> Preset | None:
    name = document.get("preset")
    if not isinstance(name, str):
        return None
    if name not in PRESETS:
        hint = did_you_mean(name, PRESETS) or f"use one of {', '.join(PRESETS)}"
        problem = Problem("preset", "is not a known preset", hint)
        messages.append(describe(problem, document))
        return None
    return PRESETS[name]


def _unset_preset_keys(document: Document) -> Iterator[str]:
    """Yields the keys that a preset sets and the document does not."""
    for preset in PRESETS.values():
        for section, keys in preset.sections.items():
            yield from (path for key in keys if document.get(path := f"{section}.{key}") is None)


@dataclass(frozen=True)
class Profile:
    """A loaded cluster profile, merged with the profiles that it extends, and all its mistakes."""

    document: Document
    config: ClusterConfig
    """The configuration, with defaults or stand-ins in place of invalid values."""
    node_type: NodeType | None
    """The node type; None if it is unknown or invalid."""
    mistakes: tuple[str, ...] = ()
    invalid: tuple[str, ...] = ()
    """See `Run.invalid_in_profile`."""
    files: tuple[str, ...] = ()
    """See `Run.cluster_files`."""
    node_type_files: tuple[str, ...] = ()

    def valid(self) -> tuple[ClusterConfig, NodeType] | None:
        """The configuration and node type of a profile without mistakes; None otherwise."""
        return None if self.mistakes or self.node_type is None else (self.config, self.node_type)

    def with_invalid(self) -> tuple[ClusterConfig, NodeType]:
        """The configuration and node type for checks, with INVALID in place of missing and invalid values."""
        cluster = with_invalid(self.config, self.invalid)
        return cluster, INVALID if self.node_type is None else self.node_type


STAND_IN_NODE_TYPE = "cpu"
"""Node type in place of an invalid one."""
UNKNOWN_PROFILE = Profile(Document({}, {}), ClusterConfig(node_type=STAND_IN_NODE_TYPE), None, invalid=("",))


def read_profile(name: str, directory: Path | None = None) -> Profile:
    """Reads the cluster profile `name` (a name, or a path relative to `directory`), valid or not.

    Raises:
        ConfigErrors: the profile or one that it extends does not exist or is not YAML.
    """
    asked = documents.constant({"cluster": name}, "--cluster")
    return _read_profile(name, asked, directory or Path.cwd())


def _read_profile(name: str, asked: Document, directory: Path) -> Profile:
    document, files = _cluster_document(name, asked, directory)
    built = build(ClusterConfig, document, {"node_type": STAND_IN_NODE_TYPE})
    config, invalid = built.config, built.invalid
    assert config is not None
    problems = [*explain_removals(ClusterConfig, built.problems, document), *cluster_rule_problems(config)]
    node_type, mistakes = None, []
    node_type_files: tuple[str, ...] = ()
    named = document.get("node_type")
    if isinstance(named, str) and not any(problem.path == "node_type" for problem in problems):
        if find_node_type(named, base=directory) is None:
            problems.append(unknown_node_type("node_type", named, directory))
        else:
            try:
                node_type, node_type_files = load_node_type_and_files(named, directory)
            except HpcgenError as error:
                mistakes = list(error.mistakes)
    described = (describe(problem, document) for problem in problems)
    return Profile(document, config, node_type, (*described, *mistakes), invalid, files, node_type_files)


def _cluster_document(name: str, asked: Document, directory: Path) -> tuple[Document, tuple[str, ...]]:
    """The profile merged with the profiles that it extends, and the files of all of them, its own first.

    Raises:
        ConfigErrors: a file is missing, cannot be read, or can be changed by other users; or profiles extend each
            other in a cycle.
    """
    chain: list[Document] = []
    names: list[str] = []
    seen: list[Path] = []
    key, base = "cluster", directory
    while True:
        path = _find_cluster(name, directory, base, seen)
        if path is None:
            known = _find_cluster(name, directory, base, ())
            problem = (
                cycle(names[_index(known, seen) :]) if known else unknown_cluster(key, name, base, directory)
            )
            raise ConfigErrors([describe(problem, asked)])
        try:
            if not is_below(path, SHIPPED_CLUSTERS):
                require_trusted_file(path, looked_up=not _is_path(name))
            profile = documents.read(path)
        except HpcgenError as error:
            raise ConfigErrors(error.mistakes) from error
        chain.append(profile)
        names.append(name)
        seen.append(path)
        parent = profile.values.get("extends")
        if not isinstance(parent, str):
            break
        name, asked, key, directory = parent, profile, "extends", path.absolute().parent
    return inherit(ClusterConfig, chain), tuple(origin(path, SHIPPED_CLUSTERS) for path in seen)


def unknown_cluster(key: str, name: str, base: Path | None = None, directory: Path | None = None) -> Problem:
    """The problem for an unknown profile name, or a path below `directory` that does not exist, at `key`."""
    known = cluster_names(base)
    if directory is not None and name.endswith((".yaml", ".yml")):
        hint = f"use the path of a cluster profile, or one of {', '.join(known)}"
        return Problem(key, f"does not exist ({(directory / name).absolute()})", hint)
    hint = did_you_mean(name, known) or f"use the path of a .yaml file, or one of {', '.join(known)}"
    return Problem(key, "is not a known cluster profile", hint)


def _is_path(name: str) -> bool:
    return "/" in name or name.endswith((".yaml", ".yml"))


def _find_cluster(name: str, directory: Path, base: Path | None, seen: Sequence[Path]) -> Path | None:
    """The first matching file that is not in `seen`, so that ./clusters/azure-ndv5.yaml may extend azure-ndv5."""
    if _is_path(name):
        candidates = [directory / name]
    else:
        candidates = [folder / f"{name}.yaml" for folder in readable(cluster_directories(base))]
    # unlike Path.is_file, isfile does not raise for a name that is too long
    found = (path for path in candidates if os.path.isfile(path))  # noqa: PTH113
    return next((path for path in found if not any(path.samefile(other) for other in seen)), None)


def _index(path: Path, seen: Sequence[Path]) -> int:
    """The index of a file in `seen`, even if the paths differ."""
    return next(index for index, other in enumerate(seen) if path.samefile(other))
