"""The location of the files shipped with hpcgen, in an installed package or a checkout."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent

SHIPPED_FOLDERS = ("templates", "topologies", "enroot")


def shipped(folder: str) -> Path:
    """The path of a shipped folder, one of SHIPPED_FOLDERS.

    In a wheel, the folder is inside the package. In a checkout, including an editable install, it is next to the
    package. The directory above the package is used only if it contains pyproject.toml, so that nothing in
    site-packages is mistaken for a folder of hpcgen. Raises FileNotFoundError if the installation is broken.
    """
    inside = _PACKAGE / folder
    if inside.is_dir():
        return inside
    checkout = _PACKAGE.parent
    if (checkout / "pyproject.toml").is_file() and (checkout / folder).is_dir():
        return checkout / folder
    raise FileNotFoundError(f"hpcgen's folder {folder!r} is missing from {_PACKAGE}; reinstall hpcgen")
