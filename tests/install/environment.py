"""Directories of installed distributions that have some of this environment's, as links."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from pathlib import Path

from hpcgen.install.extras import project_name


def with_needs(*names: str) -> set[str]:
    """Distributions with everything that they declare without extras, where it is installed."""
    found: set[str] = set()
    todo = set(names)
    while todo:
        found.add(name := todo.pop())
        requires = importlib.metadata.requires(name) or ()
        needs = {project_name(need) for need in requires if "extra ==" not in need}
        todo |= {need for need in needs if is_installed(need)} - found
    return found


def is_installed(name: str) -> bool:
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False


def link(names: Iterable[str], directory: Path) -> None:
    """Links the packages of distributions into `directory`."""
    for name in names:
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or () if ".." not in file.parts}:
            if not (directory / top).exists():
                (directory / top).symlink_to(str(distribution.locate_file(top)))


def size_in_bytes(names: Iterable[str]) -> int:
    """Disk space of the files of distributions, without what Python compiled."""
    files = [file for name in names for file in importlib.metadata.files(name) or ()]
    paths = [Path(str(file.locate())) for file in files if file.suffix != ".pyc"]
    return sum(path.stat().st_size for path in paths if path.exists())
