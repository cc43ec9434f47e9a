"""Loads a run file with overrides, preset, cluster profile (`profiles`) and node type."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcgen.config import document as documents
from hpcgen.config.cluster import ClusterConfig
from hpcgen.config.defaults import NAME as DEFAULTS
from hpcgen.config.defaults import OF_PROFILE, is_default, part, read_defaults, require_version
from hpcgen.config.directories import user_directory
from hpcgen.config.document import Document
from hpcgen.config.fields import ProfileName, constraint_problems
from hpcgen.config.node_type import NodeType
from hpcgen.config.overrides import override
from hpcgen.config.presets import PRESETS, Preset, unknown_preset
from hpcgen.config.profiles import Profile, read_profile
from hpcgen.config.run import OMITTED_SECTIONS, TRAINER_SECTIONS, RunConfig
from hpcgen.config.validation import build, located
from hpcgen.errors import ConfigErrors, FileErrors, HpcgenError, Problem, file_of
from trainer.contract.config import BlendConfig
from trainer.contract.record import record

ANY_RUN: dict[str, Any] = {
    "name": "any",
    "cluster": "any",
    "paths": {"run_dir": "/any"},
    **OMITTED_SECTIONS,
}
"""A run with the required keys only, for checks of a cluster profile."""


@record
class Run:
    """A loaded run file: the configuration, and the document with the origin of each value."""

    config: RunConfig
    cluster: ClusterConfig
    node_type: NodeType
    cluster_name: str
    document: Document
    cluster_document: Document
    node_type_document: Document
    directory: Path
    """Base directory of relative paths in the run file."""
    cluster_files: tuple[str, ...] = ()
    """See `Profile.files`."""
    node_type_files: tuple[str, ...] = ()
    """See `Profile.node_type_files`."""
    doubts: tuple[Problem, ...] = ()
    """See `Profile.doubts`."""
    sites: tuple[Path, ...] = ()
    """See `Profile.sites`."""
    file: Path | None = None
    """The run file; None for a run from a cluster profile only."""
    sha256: str = ""
    """Hash of the run file."""
    overrides: tuple[str, ...] = ()
    """Values of --set."""

    @property
    def omitted(self) -> tuple[str, ...]:
        """The sections that the run file omits (OMITTED_SECTIONS). `config` has stand-ins for them."""
        return tuple(name for name in OMITTED_SECTIONS if name not in self.document.values)

    @property
    def from_defaults(self) -> dict[str, tuple[str, str]]:
        """The values from defaults.yaml of the user or the site that apply to the run: key -> value and place.

        An account does not apply to stages for which the run file sets another one.
        """
        own, runtime = self.config, self.config.container.runtime or self.cluster.container.runtime or "none"
        given = {
            "cluster": (self.document, "cluster", True),
            "account": (
                self.cluster_document,
                OF_PROFILE["account"],
                own.slurm.defaults.account is None,
            ),
            "image": (
                self.cluster_document,
                OF_PROFILE["image"],
                own.container.image is None and runtime != "none",
            ),
        }
        return {
            key: (str(document.get(path)), str(where))
            for key, (document, path, is_used) in given.items()
            if is_used and is_default(where := document.origin(path))
        }

    @property
    def mistakes(self) -> tuple[str, ...]:
        """Always empty, since loading raises an error for mistakes. For programs written for hpcgen 0.2.0."""
        return ()


class RunFile:
    """A run file that is loaded with several sets of overrides. It and each cluster profile are read only once."""

    def __init__(self, path: str | Path) -> None:
        """Reads the file.

        Raises:
            HpcgenError: it does not exist or cannot be read.
        """
        self.path = Path(path)
        if not self.path.exists():
            hint = "write a run file with hpcgen init, or name another with -c"
            raise HpcgenError("no such file", hint, where=self.path)
        self._text = documents.read_text(self.path)
        self._document: Document | None = None
        self._profiles: dict[str, Profile] = {}

    def load(self, overrides: Sequence[str] = ()) -> Run:
        """Loads the run file and the files that it refers to. `overrides` are assignments such as "a.b=c".

        Raises:
            FileErrors: the files or overrides have mistakes in keys and values. Lists all of them.
        """
        try:
            self._document = self._document or documents.parse(self._text, str(self.path))
            run = _loaded(self._document, self.path.absolute().parent, overrides, self._profiles)
        except FileErrors as error:
            raise FileErrors(_with_headings(error.mistakes, str(self.path), self._text)) from None
        digest = hashlib.sha256(self._text.encode()).hexdigest()
        return dataclasses.replace(run, file=self.path.absolute(), sha256=digest, overrides=tuple(overrides))


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> Run:
    """Loads a run file and the files that it refers to. `overrides` are assignments such as "a.b=c".

    Raises:
        FileErrors: the files or overrides have mistakes in keys and values. Lists all of them.
        HpcgenError: the run file cannot be read.
    """
    return RunFile(path).load(overrides)


def _with_headings(mistakes: Sequence[Problem], file: str, text: str) -> list[Problem]:
    """The mistakes, in which those of unknown keys in the run file name the heading that is still commented out."""
    from hpcgen.config.unknown_keys import with_heading  # lazy: only files with mistakes need it

    return [with_heading(each, text) if file_of(each.where) == file else each for each in mistakes]


def load_cluster_run(cluster: str, run_dir: str, overrides: Sequence[str] = ()) -> Run:
    """A run for stages such as nccl-test and node-health, which need only a cluster profile and a run directory.

    Raises:
        FileErrors, HpcgenError: see `load_run`.
    """
    values = {
        "name": Path(cluster).name.removesuffix(".yaml"),
        "cluster": cluster,
        "paths": {"run_dir": run_dir},
    }
    document = documents.constant(values, "the command line")
    options = {"name": "--cluster", "cluster": "--cluster", "paths.run_dir": "--run-dir"}
    document = Document(values, {**document.origins, **options})
    return load_document(document, Path.cwd(), overrides)


def load_document(document: Document, directory: Path, overrides: Sequence[str] = ()) -> Run:
    """The run that a document describes. Relative paths start at `directory`.

    Raises:
        FileErrors, HpcgenError: see `load_run`.
    """
    return _loaded(document, directory, overrides, {})


def _loaded(
    document: Document, directory: Path, overrides: Sequence[str], profiles: dict[str, Profile]
) -> Run:
    """See `load_document`. `profiles` are those that were read before, by name; new ones are added."""
    require_version(document)
    if "cluster" not in document.values:
        document = documents.merge(part(read_defaults(), {"cluster": "cluster"}), document)
    mistakes: list[Problem] = []
    for assignment in [overrides] if isinstance(overrides, str) else overrides:
        # first, because an override may name a different preset or cluster
        try:
            document = documents.merge(document, override(RunConfig, assignment))
        except HpcgenError as error:
            mistakes += error.mistakes
    if document.get("program") is not None:
        mistakes += [located(problem, document) for problem in _trainer_keys(document)]
        document = _without_trainer(document)  # a further mistake in these keys would only distract
    preset = _preset(document, mistakes)
    if preset is not None:
        document = documents.merge(documents.constant(preset.sections, preset.origin), document)
    has_unknown_preset = preset is None and isinstance(document.get("preset"), str)
    if has_unknown_preset:
        document = documents.without(document, "preset")  # `_preset` has reported it
    config, problems = _config(document)
    if has_unknown_preset:  # keys may be missing only because the preset is unknown
        problems = tuple(problem for problem in problems if not problem.is_missing)
    mistakes += [located(_with_default(problem), document) for problem in problems]
    name = document.get("cluster")
    profile = None
    # `build` reports other values.
    if isinstance(name, str) and not any(constraint_problems(ProfileName, name)):
        try:
            profile = profiles[name] if name in profiles else read_profile(name, directory, document)
            profiles[name] = profile
        except ConfigErrors as error:
            mistakes += error.mistakes
    if mistakes:
        raise FileErrors(mistakes)
    assert config is not None
    assert profile is not None
    return Run(
        config=config,
        cluster=profile.config,
        node_type=profile.node_type,
        cluster_name=Path(config.cluster).name.removesuffix(".yaml"),
        document=document,
        cluster_document=profile.document,
        node_type_document=profile.node_type_document,
        directory=directory,
        cluster_files=profile.files,
        node_type_files=profile.node_type_files,
        doubts=profile.doubts,
        sites=profile.sites,
    )


def with_values(run: Run, values: Mapping[str, object], origin: str) -> Run:
    """The run with other values at dotted paths. Errors name `origin` as their place.

    Raises:
        FileErrors: values are not valid in a run file. Lists all of them.
    """
    document = run.document
    for path, value in values.items():
        document = documents.merge(document, documents.at(path, value, origin))
    config, problems = _config(document)
    if config is None:
        raise FileErrors([located(problem, document) for problem in problems])
    return dataclasses.replace(run, config=config, document=document)


def _config(document: Document) -> tuple[RunConfig | None, tuple[Problem, ...]]:
    """The configuration that a document describes, or its mistakes. Omitted sections have stand-ins."""
    omitted = {name: values for name, values in OMITTED_SECTIONS.items() if name not in document.values}
    return build(RunConfig, documents.merge(documents.constant(omitted, ""), document))


def _with_default(problem: Problem) -> Problem:
    """The problem. If no profile is named, it also tells where a default could be set."""
    if problem.path != "cluster" or not problem.is_missing:
        return problem
    hint = (
        f"name a profile of hpcgen cluster list here, or for all run files in {user_directory() / DEFAULTS}"
    )
    return dataclasses.replace(problem, hint=hint)


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


def _preset(document: Document, mistakes: list[Problem]) -> Preset | None:
    name = document.get("preset")
    if not isinstance(name, str):
        return None
    if name not in PRESETS:
        problem = Problem("preset", "is not a known preset", unknown_preset(name))
        mistakes.append(located(problem, document))
        return None
    try:
        return PRESETS[name]
    except HpcgenError as error:
        mistakes += error.mistakes
        return None
