"""Directories where cluster profiles, node types, templates and presets are looked up by name."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from hpcgen.config.fields import is_profile_path
from hpcgen.config.trust import require_own_place, require_safe_parents, require_trusted
from hpcgen.errors import HpcgenError
from hpcgen.files import no_access, to_read
from hpcgen.resources import shipped

SITE_VARIABLE = "HPCGEN_SITE"
"""Environment variable with the site's directory, for sites that deploy hpcgen without root."""


def configuration_directories(kind: str, sites: Sequence[Path] = ()) -> list[Path]:
    """The user's and the site's directory for one kind of file: "clusters", "presets", "templates" or "topologies".

    `sites` are the site directories of profiles that are named by their paths (`site_of`). They come before the site's.
    """
    return [directory / kind for directory in (user_directory(), *sites, site_directory())]


def user_directory() -> Path:
    """The user's directory of profiles, node types, templates, presets and defaults."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "hpcgen"


def site_directory() -> Path:
    """The site's directory of the same files: HPCGEN_SITE, or else /etc/hpcgen, which may be missing.

    Whoever sets HPCGEN_SITE chooses its owner deliberately, as with a path in a run file. Others must not be able to
    write to it.

    Raises:
        HpcgenError: HPCGEN_SITE does not name a directory, or others could replace what is in it.
    """
    given = os.environ.get(SITE_VARIABLE)
    site = Path(given or "/etc/hpcgen")
    if given and not (site.is_absolute() and site.is_dir()):
        reason = no_access(site) or ("no such directory" if site.is_absolute() else "not an absolute path")
        hint = "load the module that sets it again, or set it to one directory, or unset it"
        raise HpcgenError(f"{SITE_VARIABLE} = {given}: {reason}", hint)
    if site.is_dir():
        require_safe_parents(site)
        require_trusted(site)
    return site


def site_of(profile: Path) -> tuple[Path, ...]:
    """The site directory whose directory `clusters` contains a profile; empty for a profile elsewhere."""
    directory = profile.absolute().parent
    return (directory.parent,) if directory.name == "clusters" else ()


def with_templates_of(sites: Sequence[Path], directories: Sequence[Path]) -> list[Path]:
    """`directories` of templates, with those of `sites` (see `configuration_directories`) before the site's."""
    configured = site_directory() / "templates"
    end = directories.index(configured) if configured in directories else len(directories)
    own = [site / "templates" for site in sites if (site / "templates").is_dir()]
    for directory in own:
        require_own_place(directory)
    return [*dict.fromkeys((*directories[:end], *own, *directories[end:]))]


def local_directories(kind: str, base: Path | None) -> list[Path]:
    """The directories next to the run file, which is in `base`, and in the working directory. None for no run file."""
    own = [] if base is None or base.absolute() == Path.cwd() else [base / kind]
    return [*own, Path(kind)]


def directories_of(kind: str, base: Path | None, sites: Sequence[Path]) -> list[Path]:
    """The directories in which files of a kind are looked up by name. The first match is used.

    `base` is the directory of the run file; None without a run file. For `sites`, see `Profile.sites`.
    """
    return [*local_directories(kind, base), *configuration_directories(kind, sites), shipped(kind)]


def readable(directories: Iterable[Path]) -> list[Path]:
    """The existing directories.

    Raises:
        HpcgenError: a directory exists but cannot be read. It must not be treated as empty.
    """
    found = [directory for directory in directories if directory.is_dir()]
    for directory in found:
        if not os.access(directory, os.R_OK | os.X_OK):
            raise HpcgenError("the directory cannot be read", to_read(directory), where=directory)
    return found


def names_in(directories: Iterable[Path]) -> list[str]:
    """The names of all .yaml files in the directories, without the suffix.

    Raises:
        HpcgenError: see `readable`.
    """
    return sorted({path.stem for folder in readable(directories) for path in folder.glob("*.yaml")})


MEASURED_SUFFIX = ".measured.json"
"""The end of the name of a file with what was measured on a cluster (`hpcgen.planning.measured_file`)."""


def measured_places(cluster: str, files: Sequence[str]) -> list[Path]:
    """Where measurements of a cluster can be: next to its profile unless hpcgen ships it, and in the user's directory.

    `cluster` is the name or the path of the profile, and `files` its files as in `Profile.files`.
    """
    name = Path(cluster).stem if is_profile_path(cluster) else cluster
    own = [
        Path(file).with_name(name + MEASURED_SUFFIX) for file in files[:1] if not file.startswith("shipped:")
    ]
    return [*dict.fromkeys([*own, user_directory() / "clusters" / (name + MEASURED_SUFFIX)])]


def is_below(path: Path, directory: Path) -> bool:
    """Returns True if a file is below the directory, after resolving symbolic links."""
    return path.resolve().is_relative_to(directory.resolve())


def origin(path: Path, folder: Path) -> str:
    """A file as named in a script's header, such as "shipped:clusters/local.yaml" for one in the shipped `folder`."""
    if is_below(path, folder):
        return f"shipped:{folder.name}/{path.resolve().relative_to(folder.resolve()).as_posix()}"
    return str(path.absolute())
