"""Defaults of a site and of a user for run files and profiles: defaults.yaml in their configuration directories."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpcgen.config import document as documents
from hpcgen.config.container import Image
from hpcgen.config.directories import site_directory, user_directory
from hpcgen.config.document import Document
from hpcgen.config.fields import (
    MinimumVersion,
    ProfileName,
    SlurmWord,
    constraint_problems,
    is_profile_path,
)
from hpcgen.config.trust import require_trusted_file
from hpcgen.config.validation import build, located
from hpcgen.errors import FileErrors, Problem, file_of
from hpcgen.version import __version__
from trainer.contract.record import config_section

NAME = "defaults.yaml"
OF_PROFILE = {"account": "slurm.account", "image": "container.image"}
"""Key of the file -> path in a cluster profile."""


@config_section
class Defaults:
    """Defaults for all runs of a site or a user. The user's file overrides the site's, key by key."""

    cluster: ProfileName | None = None
    """Cluster profile of `hpcgen init`, and of run files that name none: a name, or a path relative to this file."""
    account: SlurmWord | None = None
    """Account to charge if neither the run file nor the profile sets one."""
    image: Image | None = None
    """Container image if neither the run file nor a profile of the site sets one. It replaces the image of the profiles
    that hpcgen ships."""
    requires_hpcgen: MinimumVersion | None = None
    """Oldest version of hpcgen that may be used, such as ">=0.3". An older one stops with a message."""


def read_defaults() -> Document:
    """The site's and the user's defaults, merged. Empty if neither has a file.

    Raises:
        FileErrors: a file has mistakes, can be changed by others, or requires a newer hpcgen.
        HpcgenError: a file cannot be read, or see `site_directory`.
    """
    merged = Document({}, {"": ""})
    for directory in (site_directory(), user_directory()):
        path = directory / NAME
        if path.exists() or path.is_symlink():
            merged = documents.merge(merged, _read(path))
    return merged


def _read(path: Path) -> Document:
    require_trusted_file(path, looked_up=False)
    document = documents.read(path)
    require_version(document)
    _, problems = build(Defaults, document)
    if problems:
        raise FileErrors(located(problem, document) for problem in problems)
    cluster = document.get("cluster")
    if cluster is not None and is_profile_path(cluster):
        document = Document(
            {**document.values, "cluster": str(path.absolute().parent / cluster)}, document.origins
        )
    return document


def part(defaults: Document, paths: dict[str, str]) -> Document:
    """The values of some keys of the defaults, as a document with another path for each key."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for key, path in paths.items():
        if (value := defaults.get(key)) is None:
            continue
        *sections, last = path.split(".")
        inner = values
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value
        origins[path] = defaults.origins[key]
    return Document(values, origins)


def is_default(origin: str | None) -> bool:
    """True for the place of a value of defaults.yaml."""
    return Path(file_of(origin)) in [directory / NAME for directory in (site_directory(), user_directory())]


def require_version(document: Document) -> None:
    """Refuses a document that requires a newer hpcgen. Its other mistakes may only be keys that this one lacks.

    Raises:
        FileErrors: this hpcgen is too old.
    """
    problems = [located(problem, document) for problem in _version_problems(document)]
    if problems:
        raise FileErrors(problems)


def _version_problems(document: Document) -> Iterator[Problem]:
    key = "requires_hpcgen"
    wanted = document.get(key)
    if not isinstance(wanted, str) or any(constraint_problems(MinimumVersion, wanted)):
        return  # whoever reads the document reports it
    if _numbers(__version__) < _numbers(wanted):
        hint = "load the site's newer module, or run pip install --upgrade hpcgen"
        yield Problem(key, f"excludes this hpcgen, which is {__version__}", hint)


def _numbers(version: str) -> tuple[int, ...]:
    """The first three numbers of a version: (0, 3, 0) for ">=0.3" and for "0.3.0.dev1"."""
    numbers = [int(number) for number in re.findall(r"\d+", version)[:3]]
    return (*numbers, *(0,) * (3 - len(numbers)))
