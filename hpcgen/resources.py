"""The location of the files shipped with hpcgen, in an installed package or a checkout."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
RELEASES = _PACKAGE / "releases"
"""Files that releases of hpcgen shipped: a folder for each, with its folders of YAML files."""
_release: ContextVar[str | None] = ContextVar("_release", default=None)

SHIPPED_FOLDERS = ("templates", "topologies", "enroot")


def shipped(folder: str) -> Path:
    """The path of a shipped folder: one of SHIPPED_FOLDERS, or one that is part of the package.

    In a wheel, the folder is inside the package. In a checkout, including an editable install, it is next to the
    package. The directory above the package is used only if it contains pyproject.toml, so that nothing in
    site-packages is mistaken for a folder of hpcgen. Raises FileNotFoundError if the installation is broken.
    """
    release = _release.get()
    return _shipped(folder, None if release is None else RELEASES / release, _PACKAGE)


@functools.cache  # thousands of facts of a run ask which files are shipped
def _shipped(folder: str, release: Path | None, package: Path) -> Path:
    if release and (release / folder).is_dir():
        return release / folder
    inside = package / folder
    if inside.is_dir():
        return inside
    checkout = package.parent
    if (checkout / "pyproject.toml").is_file() and (checkout / folder).is_dir():
        return checkout / folder
    raise FileNotFoundError(f"hpcgen's folder {folder!r} is missing from {package}; reinstall hpcgen")


@contextlib.contextmanager
def as_of(release: str) -> Iterator[None]:
    """Within the context, `shipped` finds the YAML files of a release, one of RELEASES, in place of today's."""
    token = _release.set(release)
    try:
        yield
    finally:
        _release.reset(token)
