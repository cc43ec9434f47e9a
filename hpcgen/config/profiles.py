"""Finds and reads cluster profiles, merged with the profiles that they extend."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpcgen.config import document as documents
from hpcgen.config.cluster import ClusterConfig
from hpcgen.config.defaults import OF_PROFILE, part, read_defaults
from hpcgen.config.directories import (
    directories_of,
    is_below,
    names_in,
    origin,
    readable,
    site_of,
)
from hpcgen.config.document import Document
from hpcgen.config.fields import is_profile_path
from hpcgen.config.inheritance import explain_removals, inherit
from hpcgen.config.node_type import NodeType
from hpcgen.config.node_types import (
    LoadedNodeType,
    cycle,
    find_node_type,
    load_node_type,
    load_with_files,
    unknown_node_type,
)
from hpcgen.config.site_doubts import excluded, missing_fabric, other_site
from hpcgen.config.trust import require_trusted_file
from hpcgen.config.validation import build, located
from hpcgen.errors import FileErrors, HpcgenError, Problem, file_of
from hpcgen.files import no_access
from hpcgen.resources import shipped
from hpcgen.text import did_you_mean
from trainer.contract.record import record

OF_SITE = (
    *("slurm_version", "container.image", "scratch", "storage_write_gb_s", "startup_time_s"),
    *("slurm.partition", "partitions"),
)
"""Facts of a profile that other sites rarely share."""


@record
class Profile:
    """A loaded cluster profile, merged with the profiles that it extends."""

    document: Document
    config: ClusterConfig
    node_type: NodeType
    node_type_document: Document
    """The facts of the node type with their places."""
    files: tuple[str, ...] = ()
    """The profile and the files that it extends, in this order; "shipped:clusters/local.yaml" for shipped files."""
    node_type_files: tuple[str, ...] = ()
    """The files of the node type, in the same form."""
    sites: tuple[Path, ...] = ()
    """The site directories of the profiles that are named by their paths (`site_of`)."""
    doubts: tuple[Problem, ...] = ()
    """Values of the profile or its node type that are valid but probably wrong. `cluster check` refuses it."""


def load_cluster(name: str, directory: Path | None = None) -> tuple[ClusterConfig, NodeType]:
    """The cluster profile `name` (a name, or a path relative to `directory`) and its node type.

    Raises:
        ConfigErrors: see `read_profile`.
    """
    profile = read_profile(name, directory)
    return profile.config, profile.node_type


def cluster_directories(base: Path | None = None, sites: Sequence[Path] = ()) -> list[Path]:
    """The directories in which cluster profiles are looked up by name (see `directories_of`)."""
    return directories_of("clusters", base, sites)


def cluster_names(base: Path | None = None, sites: Sequence[Path] = ()) -> list[str]:
    """Names of all available profiles."""
    return names_in(cluster_directories(base, sites))


def find_cluster(name: str) -> Path | None:
    """The file of the profile `name`, a name or a path; None if there is none."""
    return _find_cluster(name, Path.cwd(), cluster_directories(), ())


def read_profile(
    name: str, directory: Path | None = None, asked: Document | None = None, text: str | None = None
) -> Profile:
    """Reads the cluster profile `name` (a name, or a path relative to `directory`).

    `asked` is the document whose key `cluster` names it. Default: the option --cluster. `text` takes the place of the
    text of its file.

    Raises:
        FileErrors: the profile, one that it extends, or the node type cannot be read or has mistakes. Lists all of
            them.
    """
    directory = directory or Path.cwd()
    asked = asked or documents.constant({"cluster": name}, "--cluster")
    document, paths, sites = _cluster_document(name, asked, directory, text)
    config, wrong = build(ClusterConfig, document)
    problems = list(explain_removals(ClusterConfig, wrong, document))
    node_type: LoadedNodeType | None = None
    mistakes = list[Problem]()
    named = document.get("node_type")
    if isinstance(named, str) and not any(problem.path == "node_type" for problem in problems):
        if find_node_type(named, base=directory, sites=sites) is None:
            problems.append(unknown_node_type("node_type", named, directory, sites))
        else:
            try:
                node_type = load_with_files(named, directory, sites)
            except HpcgenError as error:
                mistakes = list(error.mistakes)
    if problems or mistakes:
        raise FileErrors([*(located(problem, document) for problem in problems), *mistakes])
    assert config is not None
    assert node_type is not None
    files = tuple(origin(path, shipped("clusters")) for path in paths)
    doubts = tuple(_doubts(document, config, node_type))
    return Profile(
        document, config, node_type.config, node_type.document, files, node_type.files, sites, doubts
    )


def _doubts(document: Document, config: ClusterConfig, node_type: LoadedNodeType) -> Iterator[Problem]:
    yield from node_type.doubts
    for name, reason in excluded(config.environment, node_type.config):
        yield Problem(f"environment.{name}", reason, "remove it", "cluster")
    if not any(missing_fabric(node_type.config, {})):
        yield from missing_fabric(node_type.config, config.environment)
    yield from _of_other_site(document, node_type.config)


def _of_other_site(document: Document, node_type: NodeType) -> Iterator[Problem]:
    """Yields what the profile inherits of a shipped site's profile, although its nodes are not of that site."""
    used = (document.get("node_type"), document.origin("node_type") or "")
    own = document.get("description") if is_set_by_site(document, "description") else None
    for name, where in (*document.replaced.get("node_type", ()), used):
        if node_type.device == "cpu" or not is_below(Path(file_of(where)), shipped("clusters")):
            continue
        site = node_type.site if name == used[0] else load_node_type(name).site
        if site is None:
            continue
        if node_type.site != site:
            why = f"node type {used[0]} is not of that site"
        elif other := other_site(own, site) or other_site(node_type.description, site):
            why = f"the description names {other}"
        else:
            continue
        for path in OF_SITE:
            if document.get(path) is not None and file_of(document.origin(path)) == file_of(where):
                reason = f"is a fact of site {site}, but {why}"
                yield Problem(path, reason, "set the value of your cluster in the profile", "cluster")


def _cluster_document(
    name: str, asked: Document, directory: Path, text: str | None
) -> tuple[Document, list[Path], tuple[Path, ...]]:
    """The profile merged with the profiles that it extends, the files of all of them, and `Profile.sites`.

    The profile's own file comes first. Profiles of the site override the user's and the site's defaults, which override
    the profiles that hpcgen ships.

    Raises:
        ConfigErrors: a file is missing, cannot be read, or can be changed by other users; or profiles extend each
            other in a cycle.
    """
    chain: list[Document] = []
    names: list[str] = []
    seen: list[Path] = []
    sites: tuple[Path, ...] = ()
    key, base = "cluster", directory
    while True:
        directories = cluster_directories(base, sites)
        path = _find_cluster(name, directory, directories, seen)
        if path is None:
            known = _find_cluster(name, directory, directories, ())
            problem = (
                cycle(names[_index(known, seen) :])
                if known
                else unknown_cluster(key, name, base, directory, sites)
            )
            raise FileErrors([located(problem, asked)])
        try:
            if not is_below(path, shipped("clusters")):
                require_trusted_file(path, looked_up=not is_profile_path(name))
            profile = documents.parse(documents.read_text(path) if text is None else text, str(path))
        except HpcgenError as error:
            raise FileErrors(error.mistakes) from error
        chain.append(profile)
        text = None
        names.append(name)
        seen.append(path)
        if is_profile_path(name) and not is_below(path, shipped("clusters")):
            sites += site_of(path)
        parent = profile.values.get("extends")
        if not isinstance(parent, str):
            break
        name, asked, key, directory = parent, profile, "extends", path.absolute().parent
    num_shipped = sum(is_below(path, shipped("clusters")) for path in seen)
    chain.insert(len(chain) - num_shipped, part(read_defaults(), OF_PROFILE))
    return inherit(ClusterConfig, chain), seen, sites


def is_set_by_site(profile: Document, path: str) -> bool:
    """True if the value at `path` of a profile comes from a file that hpcgen does not ship."""
    where = profile.origin(path)
    return where is not None and not is_below(Path(file_of(where)), shipped("clusters"))


def unknown_cluster(
    key: str,
    name: str,
    base: Path | None = None,
    directory: Path | None = None,
    sites: Sequence[Path] = (),
) -> Problem:
    """The problem for an unknown profile name, or a path below `directory` that does not exist, at `key`."""
    known = cluster_names(base, sites)
    if directory is not None and name.endswith((".yaml", ".yml")):
        path = (directory / name).absolute()
        if closed := no_access(path):
            return Problem(key, f"cannot be read ({closed})", "use a profile that you can read")
        hint = f"use the path of a cluster profile, or one of {', '.join(known)}"
        return Problem(key, f"does not exist ({path})", hint)
    hint = did_you_mean(name, known) or f"use the path of a .yaml file, or one of {', '.join(known)}"
    return Problem(key, "is not a known cluster profile", hint)


def _find_cluster(
    name: str, directory: Path, directories: Sequence[Path], seen: Sequence[Path]
) -> Path | None:
    """The first matching file that is not in `seen`, so that ./clusters/azure-ndv5.yaml may extend azure-ndv5.

    A path starts at `directory`, and a name is looked up in `directories`.
    """
    named = [directory / name]
    candidates = (
        named if is_profile_path(name) else [folder / f"{name}.yaml" for folder in readable(directories)]
    )
    # unlike Path.is_file, isfile does not raise for a name that is too long
    found = (path for path in candidates if os.path.isfile(path))  # noqa: PTH113
    return next((path for path in found if not any(path.samefile(other) for other in seen)), None)


def _index(path: Path, seen: Sequence[Path]) -> int:
    """The index of a file in `seen`, even if the paths differ."""
    return next(index for index, other in enumerate(seen) if path.samefile(other))
