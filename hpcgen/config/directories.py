"""Directories where cluster profiles, node types and templates are looked up by name."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from hpcgen.errors import HpcgenError
from hpcgen.files import to_read


def configuration_directories(kind: str) -> list[Path]:
    """The user's and the system's directory for one kind of file ("clusters", "templates", "topologies")."""
    user = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return [user / "hpcgen" / kind, Path("/etc/hpcgen") / kind]


def local_directories(kind: str, base: Path | None) -> list[Path]:
    """The directories next to the run file, which is in `base`, and in the working directory. None for no run file."""
    own = [] if base is None or base.absolute() == Path.cwd() else [base / kind]
    return [*own, Path(kind)]


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


def is_below(path: Path, directory: Path) -> bool:
    """Returns True if a file is below the directory, after resolving symbolic links."""
    return path.resolve().is_relative_to(directory.resolve())


def origin(path: Path, shipped: Path) -> str:
    """A file as named in a script's header, such as "shipped:clusters/local.yaml" for one shipped with hpcgen."""
    if is_below(path, shipped):
        return f"shipped:{shipped.name}/{path.resolve().relative_to(shipped.resolve()).as_posix()}"
    return str(path.absolute())
