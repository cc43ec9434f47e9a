"""Where files of users and admins are looked up by name, besides the working directory and what hpcgen ships."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from hpcgen.errors import HpcgenError


def configuration_directories(kind: str) -> list[Path]:
    """The user's and the system's folder for one kind of file ("clusters", "templates", "topologies")."""
    user = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return [user / "hpcgen" / kind, Path("/etc/hpcgen") / kind]


def readable(directories: Iterable[Path]) -> list[Path]:
    """Those of the directories that are there.

    Raises:
        HpcgenError: one is there and cannot be read. What it holds would count; nobody may take it for empty.
    """
    found = [directory for directory in directories if directory.is_dir()]
    for directory in found:
        if not os.access(directory, os.R_OK | os.X_OK):
            raise HpcgenError(f"{directory}: the directory cannot be read", f"chmod u+rx {directory}")
    return found


def names_in(directories: Iterable[Path]) -> list[str]:
    """The names that can be looked up there: those of all .yaml files.

    Raises:
        HpcgenError: as `readable`.
    """
    return sorted({path.stem for folder in readable(directories) for path in folder.glob("*.yaml")})


def is_below(path: Path, directory: Path) -> bool:
    """Whether a file lies in the directory, whatever links lead to either."""
    return path.resolve().is_relative_to(directory.resolve())


def origin(path: Path, shipped: Path) -> str:
    """A file as a script's header names it: "shipped:clusters/local.yaml" for one that comes with hpcgen."""
    if is_below(path, shipped):
        return f"shipped:{shipped.name}/{path.resolve().relative_to(shipped.resolve()).as_posix()}"
    return str(path.absolute())
